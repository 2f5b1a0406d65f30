// Few tokens times a large weight on Hopper, with linear's bits: what the entries of linear_t90a and its kinds share.
//
// As in linear_mma.cuh each of 8 warps has its part of the depth, 16 slots of the weight are a product's rows and up to 8
// tokens its columns. Here the copy engine brings a warp's boxes, a tile's slots by 64 elements, into a ring of its own,
// which goes on from tile to tile. Tokens stay in shared memory for all tiles of a block. A tile may have fewer than 16
// slots, so that all multiprocessors have as many: what the product's other rows are changes no sum of these.
#pragma once

#include "intrinsics_t90.cuh"
#include "linear_in.cuh"
#include "linear_sums.cuh"

// A stage has room for 16 slots, of which the second eight begin on 1024 bytes.
enum : int { PARTS = 8, ROW_BYTES = LINE * 2, STAGE_BYTES = 16 * ROW_BYTES, MOST_STAGES = 12 };

// Sums of a tile: a layer of linear_sums.cuh for each part. A block has two sets.
enum : int { LAYER_SUMS = WARP * 4, SET_SUMS = PARTS * LAYER_SUMS };

// x (tokens, depth); the weight's description, in boxes of a tile's neighbouring rows; how many slots a tile has; the stages
// of a ring.
template <typename X>
struct RingOperands {
  const X* x;
  const void* weight;
  int tokens, depth, tall, stages;
};

// Shared memory, from its first multiple of 1024 bytes on: rings, sums, tokens.
template <typename X>
struct RingRoom {
  unsigned char* rings;
  float* sums;  // (2, SET_SUMS)
  X* tokens;    // (tokens, pitch)
  int pitch;    // whole lines and 16 bytes, so that eight tokens are in different banks

  DEVICE RingRoom(unsigned char* memory, const RingOperands<X>& in)
      : rings(aligned_shared(memory, 1024)),
        sums(reinterpret_cast<float*>(rings + PARTS * in.stages * STAGE_BYTES)),
        tokens(reinterpret_cast<X*>(sums + 2 * SET_SUMS)),
        pitch((in.depth + LINE - 1) / LINE * LINE + WIDE) {}
};

template <typename X, typename Out>
struct Ring {
  const RingOperands<X>& in;
  const Out& out;
  const RingRoom<X>& room;
  Range range;  // this warp's part of the depth
  unsigned char* boxes;
  uint64* arrivals;  // (stages)
  int tiles;
  int tile, column;  // of the box that is asked for next
  int stage = 0;     // of the one that is multiplied next
  uint32 round = 0;  // how often the ring has gone round, odd or even

  DEVICE Ring(const RingOperands<X>& operands, const Out& target, const RingRoom<X>& memory, uint64* words)
      : in(operands),
        out(target),
        room(memory),
        range(part_of(in.depth, warp_index(), PARTS)),
        boxes(room.rings + warp_index() * in.stages * STAGE_BYTES),
        arrivals(words + warp_index() * in.stages),
        tiles(out.tiles(in.tall)),
        tile(range.begin == range.end ? tiles : block_x()),
        column(range.begin) {
    if (lane_index() == 0) {
      NO_UNROLL
      for (int i = 0; i < in.stages; ++i) begin_arrivals(arrivals + i, 1);
      show_arrivals();
    }
    sync_warp();
  }

  // The next box, into stage `to`.
  DEVICE void fetch(int to) {
    if (tile >= tiles) return;
    if (lane_index() == 0) {
      arrive_expecting(arrivals + to, in.tall * ROW_BYTES);
      UNROLL
      for (int box = 0; box < Out::BOXES; ++box) {
        copy_box(boxes + to * STAGE_BYTES + box * 8 * ROW_BYTES, in.weight, column, out.box_row(tile, in.tall, box),
                 arrivals + to);
      }
    }
    column += LINE;
    if (column >= range.end) {
      column = range.begin;
      tile += grid_x();
    }
  }

  DEVICE void fill() {
    NO_UNROLL
    for (int i = 0; i < in.stages; ++i) fetch(i);
  }

  // This warp's part of every token, zeros behind the depth.
  DEVICE void take_tokens() const {
    NO_UNROLL
    for (int token = 0; token < in.tokens; ++token) {
      const X* row = in.x + int64(token) * in.depth;
      X* to = room.tokens + token * room.pitch;
      NO_UNROLL
      for (int k = range.begin + lane_index() * WIDE; k < (range.end + LINE - 1) / LINE * LINE; k += WARP * WIDE) {
        copy_async(to + k, k < range.end ? row + k : row, k < range.end ? 16 : 0);
      }
    }
    commit_copies();
    wait_copies<0>();
    sync_warp();
  }

  // This warp's sums of its next tile.
  DEVICE Pack<float, 4> accumulate() {
    const int row = lane_index() % 16, token = smaller_int(lane_index() % 8, in.tokens - 1);
    // Where matrix loads begin. A box's pieces change places by their row.
    const int box_at = row * ROW_BYTES + (lane_index() / 16 ^ row % 8) * 16;
    const X* x = room.tokens + token * room.pitch + range.begin + lane_index() / 8 * WIDE;
    float sums[4] = {};
    NO_UNROLL
    for (int k = range.begin; k < range.end; k += LINE) {
      uint32 a[4][4], b[2][4];
      UNROLL
      for (int half = 0; half < 2; ++half) load_matrices(b[half], x, half * 64);
      wait_arrivals(arrivals + stage, round);
      UNROLL
      for (int sixteen = 0; sixteen < 4; ++sixteen) {
        load_matrices(a[sixteen], boxes + stage * STAGE_BYTES + (box_at ^ sixteen * 32));
      }
      sync_warp();  // all lanes have read the box
      fetch(stage);
      UNROLL
      for (int sixteen = 0; sixteen < 4; ++sixteen) {
        const uint32(&of)[4] = b[sixteen / 2];
        const uint32 two[2] = {of[sixteen % 2 * 2], of[sixteen % 2 * 2 + 1]};
        mma_16816(sums, a[sixteen], two, X());
      }
      x += LINE;
      if (++stage == in.stages) {
        stage = 0;
        round ^= 1u;
      }
    }
    return {{sums[0], sums[1], sums[2], sums[3]}};
  }

  // Fetches into the nearest cache what `finish` reads for this lane.
  DEVICE void touch(int tile) const {
    const int token = lane_index() % 4 * 2;
    if (token < in.tokens) out.touch_pair(token, tile, in.tall, lane_index() / 4);
    if (token + 1 < in.tokens) out.touch_pair(token + 1, tile, in.tall, lane_index() / 4);
  }

  DEVICE void finish(int tile, const Pack<float, 4>& sums) const {
    const int token = lane_index() % 4 * 2, g = lane_index() / 4;
    if (token < in.tokens) out.finish_pair(token, tile, in.tall, g, sums.at[0], sums.at[2]);
    if (token + 1 < in.tokens) out.finish_pair(token + 1, tile, in.tall, g, sums.at[1], sums.at[3]);
  }
};

// Up to 8 tokens. Blocks go through the tiles together, from front to back.
template <typename X, typename Out>
DEVICE void linear_ring(const RingOperands<X>& in, const Out& out) {
  DYNAMIC_SHARED(memory);
  SHARED_ARRAY(uint64, words, PARTS * MOST_STAGES);
  const RingRoom<X> room(memory, in);
  Ring<X, Out> ring(in, out, room, words);
  ring.fill();
  wait_for_previous_grid();
  // Not before the wait: what the next grid does before its own may then count on all that ended before this one began.
  start_next_grid();
  ring.take_tokens();
  int count = 0;
  NO_UNROLL
  for (int tile = block_x(); tile < ring.tiles; tile += grid_x(), ++count) {
    const bool is_own = warp_index() == count % PARTS;  // to end this tile is each warp's in turns
    if (is_own) ring.touch(tile);
    float* set = room.sums + count % 2 * SET_SUMS + lane_index() * 4;
    store(set + warp_index() * LAYER_SUMS, ring.accumulate());
    // Behind it all sums of this set are there, and those of the other are read.
    sync_block();
    if (is_own) ring.finish(tile, sum_of<PARTS>(set, LAYER_SUMS));
  }
}
