// What products on warpgroups share: a block has a tile of some slots (linear_out.cuh) and some tokens, and goes through the
// depth in steps of 64 elements, which the copy engine brings. Each of its warpgroups multiplies 64 rows, which are slots or
// tokens, with all of the other.
#pragma once

#include "intrinsics_t90.cuh"
#include "linear_out.cuh"
#include "meeting.cuh"

enum : int { STEP = 64, ROW_BYTES = STEP * 2, GROUP_ROWS = 64 };

// A tile's slots and tokens, the more of both, the less is read for a product; and the float sums of a thread.
template <int S, int T>
struct SlotRows {
  enum : int { SLOTS = S, HALF = S / 2, TOKENS = T, THREADS = 2 * S, SUMS = T / 2, TOKENS_ARE_ROWS = 0 };
};
// Any multiple of 16 may be S, so that tiles fill the GPU's waves.
template <int S, int T>
struct TokenRows {
  enum : int { SLOTS = S, HALF = S / 2, TOKENS = T, THREADS = 2 * T, SUMS = S / 2, TOKENS_ARE_ROWS = 1 };
};

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
template <typename Size>
struct Tile {
  enum : int { SLOTS = Size::SLOTS, HALF = Size::HALF, TOKENS = Size::TOKENS };

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

// Steps [step, end) of a tile's depth, on their way through shared memory: each in a stage, rows of 128 bytes of all slots,
// then of the tokens. The first thread has the copy engine bring them, one into the stage of the one STAGES before it as
// soon as all warps have read that.
template <typename Size, int COUNT>
struct Steps {
  enum : int { SLOTS = Size::SLOTS, HALF = Size::HALF, TOKENS = Size::TOKENS, THREADS = Size::THREADS };
  enum : int { STAGES = COUNT, STAGE_BYTES = (SLOTS + TOKENS) * ROW_BYTES };

  const Matrices& in;
  const Tile<Size>& tile;
  unsigned char* memory;  // on 1024 bytes
  uint64 *filled, *read;  // (STAGES)
  int step, end;
  int stage = 0;
  uint32 round = 0;  // how often the ring has gone round, odd or even

  // Waits for the grid before; the weights of the first stages are on their way by then.
  DEVICE Steps(const Matrices& matrices, const Tile<Size>& of, unsigned char* stages, uint64* words, int first,
               int last)
      : in(matrices), tile(of), memory(stages), filled(words), read(words + STAGES), step(first), end(last) {
    const int ahead = end - step < STAGES ? end - step : STAGES;
    if (thread_index() == 0) {
      UNROLL
      for (int i = 0; i < STAGES; ++i) {
        begin_arrivals(filled + i, 1);
        begin_arrivals(read + i, THREADS / WARP);
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
  DEVICE const unsigned char* part_at(int tokens) const { return stage_at(stage) + tokens * SLOTS * ROW_BYTES; }
  // This warpgroup's rows, and what all of them are multiplied with.
  DEVICE const unsigned char* rows() const {
    return part_at(Size::TOKENS_ARE_ROWS) + warp_index() / 4 * GROUP_ROWS * ROW_BYTES;
  }
  DEVICE const unsigned char* columns() const { return part_at(!Size::TOKENS_ARE_ROWS); }

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
      for (int k = 0; k < STEP; k += 16) wgmma_16(sums, matrix_at(rows(), k), matrix_at(columns(), k), type);
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

// A tile's sums on their way out.
template <typename Size>
struct Leaving;

// Where slots are rows, through the memory of the tile's steps: so that a thread has eight neighbours to store.
template <int S, int T>
struct Leaving<SlotRows<S, T>> {
  using Size = SlotRows<S, T>;
  enum : int { SLOTS = Size::SLOTS, HALF = Size::HALF, TOKENS = Size::TOKENS, THREADS = Size::THREADS };
  enum : int { GROUPS = TOKENS / 8 };
  enum : int {
    STRIDE = SLOTS + 4
  };  // floats from a token to the next: what a warp puts at a time is in different banks

  const Tile<Size>& tile;
  float* kept;  // (TOKENS, STRIDE)
  int first = 0, end = GROUPS;

  DEVICE Leaving(const Tile<Size>& of, unsigned char* memory) : tile(of), kept(reinterpret_cast<float*>(memory)) {}

  // This thread's sums 4 group.. in the order of wgmma_16's d, which are of tokens 8 group...
  DEVICE void put(int group, const Pack<float, 4>& sums) const {
    float* to = kept + (group * 8 + lane_index() % 4 * 2) * STRIDE + warp_index() * 16 + lane_index() / 4;
    to[0] = sums.at[0];
    to[STRIDE] = sums.at[1];
    to[8] = sums.at[2];
    to[STRIDE + 8] = sums.at[3];
  }

  // Of a block that has a tile alone.
  DEVICE void take(const float (&sums)[Size::SUMS]) {
    sync_block();  // what was in the memory is read
    UNROLL
    for (int group = 0; group < GROUPS; ++group) {
      put(group, {{sums[4 * group], sums[4 * group + 1], sums[4 * group + 2], sums[4 * group + 3]}});
    }
  }

  // Of one of the blocks that share a tile: some of its tokens, once all have left their sums. added(group): of this thread.
  template <typename Added>
  DEVICE void take_share(const TilePart& own, uint32* counter, const Added& added) {
    first = GROUPS * own.part / own.parts;
    end = GROUPS * (own.part + 1) / own.parts;
    meet_blocks(counter, own.parts);
    NO_UNROLL
    for (int group = first; group < end; ++group) put(group, added(group));
    leave_blocks(counter, own.parts);
  }

  // Stores what was taken.
  template <typename Out>
  DEVICE void finish(const Out& out, int tokens) const {
    sync_block();
    NO_UNROLL
    for (int item = first * HALF + thread_index(); item < end * HALF; item += THREADS) {
      const int row = item / (HALF / 8), column = item % (HALF / 8) * 8;
      if (tile.token + row >= tokens) return;
      const Pack<float, 8> left = load<8>(kept + row * STRIDE + column);
      const Pack<float, 8> right = load<8>(kept + row * STRIDE + HALF + column);
      out.template finish<HALF>(tile.token + row, tile.slot + column, left.at, right.at);
    }
  }
};

// Where tokens are rows, a thread has two neighbouring slots of two tokens, and as many that are half a tile on. They wait
// in the memory of the tile's steps, so that a loop takes them: code that runs once a tile costs by its length, which an
// unrolled one has (benchmarks/LOG.md).
template <int S, int T>
struct Leaving<TokenRows<S, T>> {
  using Size = TokenRows<S, T>;
  enum : int { GROUPS = Size::HALF / 8 };

  const Tile<Size>& tile;
  float* kept;  // (SUMS / 4, THREADS, 4)
  int first = 0, end = GROUPS;

  DEVICE Leaving(const Tile<Size>& of, unsigned char* memory) : tile(of), kept(reinterpret_cast<float*>(memory)) {}

  DEVICE float* own(int group) const { return kept + (group * Size::THREADS + thread_index()) * 4; }

  DEVICE void take(const float (&sums)[Size::SUMS]) {
    sync_block();  // what was in the memory is read
    UNROLL
    for (int group = 0; group < 2 * GROUPS; ++group) {
      const float* from = sums + 4 * group;
      store(own(group), Pack<float, 4>{{from[0], from[1], from[2], from[3]}});
    }
  }

  // Of one of the blocks that share a tile: some of its slots of either half.
  template <typename Added>
  DEVICE void take_share(const TilePart& part, uint32* counter, const Added& added) {
    first = GROUPS * part.part / part.parts;
    end = GROUPS * (part.part + 1) / part.parts;
    meet_blocks(counter, part.parts);
    NO_UNROLL
    for (int i = 2 * first; i < 2 * end; ++i) {
      const int group = i / 2 + i % 2 * GROUPS;
      store(own(group), added(group));
    }
    leave_blocks(counter, part.parts);
  }

  // Stores what was taken, of a group 4 sums of both halves, in the order of wgmma_16's d.
  template <typename Out>
  DEVICE void finish(const Out& out, int tokens) const {
    const int token = tile.token + warp_index() * 16 + lane_index() / 4, slot = tile.slot + lane_index() % 4 * 2;
    NO_UNROLL
    for (int group = first; group < end; ++group) {
      const Pack<float, 4> sums[2] = {load<4>(own(group)), load<4>(own(GROUPS + group))};
      UNROLL
      for (int lower = 0; lower < 2; ++lower) {
        if (token + lower * 8 >= tokens) break;
        const float left[2] = {sums[0].at[2 * lower], sums[0].at[2 * lower + 1]};
        const float right[2] = {sums[1].at[2 * lower], sums[1].at[2 * lower + 1]};
        out.template finish<Size::HALF>(token + lower * 8, slot + group * 8, left, right);
      }
    }
  }
};

// Where a thread's sums are in the workspace, of number `index` of those that are left for a tile: by fours, four * 4 *
// THREADS on, as they lie in its registers.
template <typename Size>
DEVICE float* left_of_thread(float* workspace, int index) {
  return workspace + (int64(index) * Size::TOKENS * Size::SLOTS + thread_index() * 4);
}

template <typename Size>
DEVICE void leave_sums(float* workspace, int index, const float (&sums)[Size::SUMS]) {
  float* to = left_of_thread<Size>(workspace, index);
  UNROLL
  for (int i = 0; i < Size::SUMS; i += 4) {
    store(to + i * Size::THREADS, Pack<float, 4>{{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]}});
  }
}

// Of `count` parts, at most MOST, from number `index` on: their sums 4 four.., added up in that order.
template <typename Size, int MOST>
DEVICE Pack<float, 4> add_parts(float* workspace, int index, int count, int four) {
  Pack<float, 4> parts[MOST];
  const float* from = left_of_thread<Size>(workspace, index) + four * 4 * Size::THREADS;
  UNROLL
  for (int i = 0; i < MOST; ++i) {
    if (i < count) parts[i] = load<4>(from + int64(i) * Size::TOKENS * Size::SLOTS);
  }
  UNROLL
  for (int i = 1; i < MOST; ++i) {
    UNROLL
    for (int j = 0; i < count && j < 4; ++j) parts[0].at[j] += parts[i].at[j];
  }
  return parts[0];
}
