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
  enum : int { STAGES = 49152 / STAGE_BYTES, ROWS_A_ROUND = 128 / PIECES, ROUNDS = 2 * SIDE / ROWS_A_ROUND };

  const Operands<X>& in;
  const Out& out;
  unsigned char* stages;
  const X* from[ROUNDS];  // the starts of the rows that this thread copies; x's where there is no such row
  uint32 present;         // bit i: there is a row in round i

  DEVICE Tile(const Operands<X>& operands, const Out& target, unsigned char* memory)
      : in(operands), out(target), stages(memory), present(0) {
    UNROLL
    for (int round = 0; round < ROUNDS; ++round) {
      const X* row = row_of(round * ROWS_A_ROUND + thread_index() / PIECES);
      from[round] = row == nullptr ? in.x : row;
      present |= uint32(row != nullptr) << round;
    }
  }

  // Row `row` of a stage: SIDE tokens, then SIDE slots; null behind the last.
  DEVICE const X* row_of(int row) const {
    if (row < SIDE) {
      const int token = block_x() * SIDE + row;
      return token < in.tokens ? in.x + int64(token) * in.depth : nullptr;
    }
    const int weight_row = out.template row<SECOND>(block_y() * SIDE + row - SIDE);
    return weight_row == NOWHERE ? nullptr : in.weight + int64(weight_row) * in.depth;
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
        const bool wanted = inside && (present >> round & 1u);
        copy_async(place(stage, round * ROWS_A_ROUND + first, piece), from[round] + (inside ? k : 0), wanted ? 16 : 0);
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
    for (int i = 0; i < HEIGHT; ++i)
      load_matrices(a[i], place(stage, token + i * 16 + lane % 16, half * 2 + lane / 16));
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

  DEVICE void finish(const float (&sums)[HEIGHT][WIDTH][4]) const {
    const int lane = lane_index();
    const int token = block_x() * SIDE + warp_index() % 2 * HEIGHT * 16 + lane / 4;
    const int slot = block_y() * SIDE + warp_index() / 2 * WIDTH * 8 + lane % 4 * 2;
    UNROLL
    for (int i = 0; i < HEIGHT * 2; ++i) {
      if (token + i * 8 >= in.tokens) continue;
      UNROLL
      for (int j = 0; j < WIDTH / 2; ++j) {
        const float (&left)[4] = sums[i / 2][j], (&right)[4] = sums[i / 2][j + WIDTH / 2];
        const float first[2] = {left[i % 2 * 2], left[i % 2 * 2 + 1]};
        const float second[2] = {right[i % 2 * 2], right[i % 2 * 2 + 1]};
        out.template finish<SECOND>(token + i * 8, slot + j * 8, first, second);
      }
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
