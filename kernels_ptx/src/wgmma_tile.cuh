// What products on warpgroups share: a block of two has a tile of 128 slots (linear_out.cuh), 64 each, and some tokens, and
// goes through the depth in steps of 64 elements, which the copy engine brings.
#pragma once

#include "linear_out.cuh"
#include "meeting.cuh"

enum : int { SLOTS = 128, HALF = SLOTS / 2, STEP = 64, ROW_BYTES = STEP * 2, TILE_THREADS = 256 };

// The descriptions of x (tokens, depth), in boxes of a tile's tokens, and of the weight, in boxes of 64 rows.
struct Matrices {
  const void *x, *weight;
  int tokens, depth;
};

// The tiles from `whole` on are cut into `parts` parts of the depth. Tiles are counted with the tokens fastest, so that
// blocks that share slots run at the same time.
struct Cut {
  int whole, parts;
};

struct TilePart {
  int tile, parts, part, cut;  // cut: its number among those that are cut

  DEVICE TilePart(const Cut& cutting) {
    const int over = block_x() - cutting.whole;
    tile = over < 0 ? block_x() : cutting.whole + over / cutting.parts;
    parts = over < 0 ? 1 : cutting.parts;
    part = over < 0 ? 0 : over % cutting.parts;
    cut = over / cutting.parts;
  }
};

// Where a tile is: its first token and slot, and the rows of the weight where its two halves begin.
template <int TOKENS>
struct Tile {
  int token, slot, rows[2];

  template <typename Out>
  DEVICE Tile(const Matrices& in, const Out& out, int number) {
    const int token_tiles = (in.tokens + TOKENS - 1) / TOKENS;
    token = number % token_tiles * TOKENS;
    slot = number / token_tiles * SLOTS;
    rows[0] = out.template first_row<HALF>(slot);
    rows[1] = out.template first_row<HALF>(slot + HALF);
  }
};

// Steps [step, end) of a tile's depth, on their way through shared memory: each in a stage, rows of 128 bytes of 128 slots,
// then of the tokens. The first thread has the copy engine bring them, one into the stage of the one STAGES before it as
// soon as all warps have read that.
template <int TOKENS, int COUNT>
struct Steps {
  enum : int { STAGES = COUNT, STAGE_BYTES = (SLOTS + TOKENS) * ROW_BYTES };

  const Matrices& in;
  const Tile<TOKENS>& tile;
  unsigned char* memory;  // on 1024 bytes
  uint64 *filled, *read;  // (STAGES)
  int step, end;
  int stage = 0;
  uint32 round = 0;  // how often the ring has gone round, odd or even

  // Waits for the grid before; the weights of the first stages are on their way by then.
  DEVICE Steps(const Matrices& matrices, const Tile<TOKENS>& of, unsigned char* stages, uint64* words, int first,
               int last)
      : in(matrices), tile(of), memory(stages), filled(words), read(words + STAGES), step(first), end(last) {
    const int ahead = end - step < STAGES ? end - step : STAGES;
    if (thread_index() == 0) {
      UNROLL
      for (int i = 0; i < STAGES; ++i) {
        begin_arrivals(filled + i, 1);
        begin_arrivals(read + i, TILE_THREADS / WARP);
      }
      show_arrivals();
      NO_UNROLL
      for (int i = 0; i < ahead; ++i) fetch_weights(i, step + i);
    }
    sync_block();
    wait_for_previous_grid();
    NO_UNROLL
    for (int i = 0; thread_index() == 0 && i < ahead; ++i) fetch_tokens(i, step + i);
    sync_warp();
  }

  DEVICE unsigned char* stage_at(int i) const { return memory + i * STAGE_BYTES; }
  DEVICE const unsigned char* weights() const { return stage_at(stage) + warp_index() / 4 * HALF * ROW_BYTES; }
  DEVICE const unsigned char* tokens() const { return stage_at(stage) + SLOTS * ROW_BYTES; }

  DEVICE void fetch_weights(int to, int number) const {
    arrive_expecting(filled + to, STAGE_BYTES);
    UNROLL
    for (int half = 0; half < 2; ++half) {
      copy_box(stage_at(to) + half * HALF * ROW_BYTES, in.weight, number * STEP, tile.rows[half], filled + to);
    }
  }
  DEVICE void fetch_tokens(int to, int number) const {
    copy_box(stage_at(to) + SLOTS * ROW_BYTES, in.x, number * STEP, tile.token, filled + to);
  }

  // This warp has read step `number`, which was in stage `from`, the last time when the ring had gone round `turn` times.
  DEVICE void has_read(int number, int from, uint32 turn) const {
    if (lane_index() == 0) arrive_at(read + from);
    if (thread_index() == 0 && number + STAGES < end) {
      wait_arrivals(read + from, turn);
      fetch_weights(from, number + STAGES);
      fetch_tokens(from, number + STAGES);
    }
    sync_warp();
  }

  // The next `count` steps' products are added to the sums. While those of a step are made, the next are started.
  template <typename X, int N>
  DEVICE void accumulate(int count, float (&sums)[N], X type) {
    wgmma_border(sums);
    int before = stage;
    uint32 turn = round;
    NO_UNROLL
    for (int i = 0; i < count; ++i) {
      wait_arrivals(filled + stage, round);
      wgmma_begin();
      UNROLL
      for (int k = 0; k < STEP; k += 16) wgmma_16(sums, matrix_at(weights(), k), matrix_at(tokens(), k), type);
      wgmma_commit();
      wgmma_wait<1>();
      if (i > 0) has_read(step - 1, before, turn);
      before = stage;
      turn = round;
      ++step;
      if (++stage == STAGES) {
        stage = 0;
        round ^= 1u;
      }
    }
    wgmma_wait<0>();
    if (count > 0) has_read(step - 1, before, turn);
    wgmma_border(sums);
  }
};

// Stores a tile: sum(i) is a thread's own in the order of wgmma_16's d. All go through shared memory, the ring's, so that
// a thread has eight neighbours to store.
template <int TOKENS, typename Out, typename Sum>
DEVICE void finish_tile(const Out& out, const Tile<TOKENS>& tile, int tokens, unsigned char* memory, const Sum& sum) {
  // Floats from one token's sums to the next's: what a warp stores at a time is in different banks.
  enum : int { STRIDE = SLOTS + 4 };
  float* kept = reinterpret_cast<float*>(memory);
  float* to = kept + lane_index() % 4 * 2 * STRIDE + warp_index() * 16 + lane_index() / 4;
  sync_block();  // what was in the memory is read
  UNROLL
  for (int i = 0; i < TOKENS / 2; ++i) to[(i / 4 * 8 + i % 2) * STRIDE + i % 4 / 2 * 8] = sum(i);
  sync_block();
  NO_UNROLL
  for (int item = thread_index(); item < TOKENS * (HALF / 8); item += TILE_THREADS) {
    const int row = item / (HALF / 8), column = item % (HALF / 8) * 8;
    if (tile.token + row >= tokens) return;
    const Pack<float, 8> first = load<8>(kept + row * STRIDE + column);
    const Pack<float, 8> second = load<8>(kept + row * STRIDE + HALF + column);
    out.template finish<HALF>(tile.token + row, tile.slot + column, first.at, second.at);
  }
}
