// A tile of a large matrix product on tensor cores, m16n8k16: 4 warps, two along the tokens and two along the slots.
//
// Stages of 32 elements of the depth wait in shared memory, copied there while earlier ones are multiplied. A row of a
// stage is 64 bytes, four pieces of 16; piece p of row r lies at p ^ (r / 2 % 4), so that eight rows' pieces of one k,
// which load_matrices reads at a time, are in different banks.
#pragma once

#include "linear_in.cuh"
#include "linear_out.cuh"

template <int SIDE, typename X, typename Out>
struct Tile {
  // A warp has HEIGHT products of 16 tokens and WIDTH of 8 slots.
  enum : int { HEIGHT = SIDE / 32, WIDTH = SIDE / 16, SECOND = WIDTH / 2 * 8 };
  enum : int { STEP = 32, PIECES = STEP / WIDE, ROW_BYTES = STEP * 2, STAGE_BYTES = 2 * SIDE * ROW_BYTES };
  // Floats from one token's sums to the next's: what a half warp stores at a time is in different banks.
  enum : int { STRIDE = WIDTH * 8 + 8 };
  enum : int { STAGES = 49152 / STAGE_BYTES, ROWS_A_ROUND = 128 / PIECES, ROUNDS = 2 * SIDE / ROWS_A_ROUND };

  const Operands<X>& in;
  const Out& out;
  unsigned char* stages;
  const X* from[ROUNDS];  // the starts of the rows that this thread copies

  DEVICE Tile(const Operands<X>& operands, const Out& target, unsigned char* memory)
      : in(operands), out(target), stages(memory) {
    UNROLL
    for (int round = 0; round < ROUNDS; ++round) from[round] = row_of(round * ROWS_A_ROUND + thread_index() / PIECES);
  }

  // Row `row` of a stage: SIDE tokens, then SIDE slots. Behind the last it is the first, whose sums nobody asks for.
  DEVICE const X* row_of(int row) const {
    if (row < SIDE) {
      const int token = block_x() * SIDE + row;
      return in.x + (token < in.tokens ? int64(token) * in.depth : 0);
    }
    const int weight_row = out.template row<SECOND>(block_y() * SIDE + row - SIDE);
    return in.weight + (weight_row == NOWHERE ? 0 : int64(weight_row) * in.depth);
  }

  DEVICE unsigned char* place(int stage, int row, int piece) const {
    return stages + stage * STAGE_BYTES + row * ROW_BYTES + (piece ^ (row / 2 % PIECES)) * 16;
  }

  // Every call commits one group, so that counting groups is counting steps.
  DEVICE void fetch(int stage, int step) const {
    const int piece = thread_index() % PIECES, first = thread_index() / PIECES, k = step * STEP + piece * WIDE;
    if (step * STEP < in.depth && in.depth % WIDE == 0) {
      const bool inside = k < in.depth;
      UNROLL
      for (int round = 0; round < ROUNDS; ++round) {
        copy_async(place(stage, round * ROWS_A_ROUND + first, piece), from[round] + (inside ? k : 0), inside ? 16 : 0);
      }
    } else if (step * STEP < in.depth) {  // rows start anywhere
      NO_UNROLL
      for (int row = first; row < 2 * SIDE; row += ROWS_A_ROUND) {
        store(reinterpret_cast<X*>(place(stage, row, piece)), load_piece(row_of(row), k, in.depth));
      }
    }
    commit_copies();
  }

  // Elements [16 half, 16 half + 16) of a stage.
  DEVICE void multiply(int stage, int half, float (&sums)[HEIGHT][WIDTH][4]) const {
    const int lane = lane_index(), token = warp_index() % 2 * HEIGHT * 16, slot = SIDE + warp_index() / 2 * WIDTH * 8;
    uint32 a[HEIGHT][4], b[WIDTH / 2][4];
    UNROLL
    for (int i = 0; i < HEIGHT; ++i) {
      load_matrices(a[i], place(stage, token + i * 16 + lane % 16, half * 2 + lane / 16));
    }
    UNROLL
    for (int i = 0; i < WIDTH / 2; ++i) {  // two products' columns: k 0..7 and 8..15 of the first, then of the second
      load_matrices(b[i], place(stage, slot + i * 16 + lane / 16 * 8 + lane % 8, half * 2 + lane / 8 % 2));
    }
    UNROLL
    for (int i = 0; i < HEIGHT; ++i) {
      UNROLL
      for (int j = 0; j < WIDTH; ++j) {
        const uint32 column[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
        mma_16816(sums[i][j], a[i], column, X());
      }
    }
  }

  DEVICE void accumulate(float (&sums)[HEIGHT][WIDTH][4]) const {
    const int steps = (in.depth + STEP - 1) / STEP;
    NO_UNROLL
    for (int step = 0; step < STAGES - 1; ++step) fetch(step, step);
    int stage = 0;
    NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      wait_copies<STAGES - 2>();
      sync_block();  // all copies of this stage have arrived, and all warps are done with the stage before it
      fetch(stage == 0 ? STAGES - 1 : stage - 1, step + STAGES - 1);
      UNROLL
      for (int half = 0; half < 2; ++half) multiply(stage, half, sums);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
  }

  // The warp's part, 16 tokens at a time through shared memory, so that a lane has four neighbours to store.
  DEVICE void finish(const float (&sums)[HEIGHT][WIDTH][4]) const {
    const int token = block_x() * SIDE + warp_index() % 2 * HEIGHT * 16;
    float* kept = reinterpret_cast<float*>(stages) + warp_index() * 16 * STRIDE;
    sync_block();  // the stages are read
    NO_UNROLL
    for (int i = 0; i < HEIGHT; ++i) {
      UNROLL
      for (int row = 0; row < HEIGHT; ++row) {  // registers have no index
        if (row == i) keep(kept, sums[row]);
      }
      sync_warp();
      finish_rows(kept, token + i * 16);
      sync_warp();
    }
  }

  DEVICE void keep(float* kept, const float (&sums)[WIDTH][4]) const {
    float* to = kept + lane_index() / 4 * STRIDE + lane_index() % 4 * 2;
    UNROLL
    for (int j = 0; j < WIDTH; ++j) {
      store_words2(to + j * 8, {{bits_of(sums[j][0]), bits_of(sums[j][1])}});
      store_words2(to + 8 * STRIDE + j * 8, {{bits_of(sums[j][2]), bits_of(sums[j][3])}});
    }
  }

  DEVICE void finish_rows(const float* kept, int token) const {
    const int slot = block_y() * SIDE + warp_index() / 2 * WIDTH * 8;
    NO_UNROLL
    for (int item = lane_index(); item < 16 * SECOND / 4; item += WARP) {
      const int row = item / (SECOND / 4), column = item % (SECOND / 4) * 4;
      const Pack<float, 4> first = load<4>(kept + row * STRIDE + column);
      const Pack<float, 4> second = load<4>(kept + row * STRIDE + SECOND + column);
      if (token + row < in.tokens) out.template finish<SECOND>(token + row, slot + column, first.at, second.at);
    }
  }
};

template <int SIDE, typename X, typename Out>
DEVICE void gemm(const Operands<X>& in, const Out& out) {
  DYNAMIC_SHARED(memory);
  const Tile<SIDE, X, Out> tile(in, out, memory);
  float sums[SIDE / 32][SIDE / 16][4] = {};
  tile.accumulate(sums);
  tile.finish(sums);
}
