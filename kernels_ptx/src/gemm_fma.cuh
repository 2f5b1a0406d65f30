// A tile of a large matrix product without tensor cores: 64 x 64 at a time, 16 of the depth a step, in shared memory as
// floats. Thread (i, j) of 8 x 16 has tokens 8 i..8 i + 7 and slots 2 j, 2 j + 1 and those 32 slots on.
#pragma once

#include "linear_in.cuh"
#include "linear_out.cuh"

enum : int { PART = 64, STEP = 16, STRIDE = PART + 4, SECOND = 32 };  // the stride keeps four floats on 16 bytes

// Elements [k, k + 8) of a row that may not exist, as the column `column` of a STEP x PART matrix.
template <typename X>
DEVICE void stage_piece(float* to, const X* row, int k, int depth) {
  Pack<X, WIDE> piece = {};
  if (row != nullptr && k < depth) piece = depth % WIDE == 0 ? load<WIDE>(row + k) : load_piece(row, k, depth);
  UNROLL
  for (int i = 0; i < WIDE; ++i) to[i * STRIDE] = to_float(piece.at[i]);
}

// What one step adds to the sums of 8 tokens and 2 + 2 slots.
DEVICE void add_step(float (&sums)[8][4], const float* tokens, const float* slots) {
  NO_UNROLL
  for (int k = 0; k < STEP; ++k) {
    const Pack<float, 8> x = load<8>(tokens + k * STRIDE);
    const float w[4] = {slots[k * STRIDE], slots[k * STRIDE + 1], slots[k * STRIDE + SECOND],
                        slots[k * STRIDE + SECOND + 1]};
    UNROLL
    for (int i = 0; i < 8; ++i) {
      UNROLL
      for (int j = 0; j < 4; ++j) sums[i][j] = fused_multiply_add(x.at[i], w[j], sums[i][j]);
    }
  }
}

// The 64 x 64 tile from token `token` and slot `slot` on.
template <typename X, typename Out>
DEVICE void gemm_part(const Operands<X>& in, const Out& out, int token, int slot) {
  SHARED_ARRAY(float, tokens, STEP* STRIDE);
  SHARED_ARRAY(float, slots, STEP* STRIDE);
  const int thread = thread_index(), row = thread / 2, first_k = thread % 2 * WIDE;
  const int weight_row = out.template row<SECOND>(slot + row);
  const X* x = token + row < in.tokens ? in.x + int64(token + row) * in.depth : nullptr;
  const X* weight = weight_row == NOWHERE ? nullptr : in.weight + int64(weight_row) * in.depth;
  float sums[8][4] = {};
  NO_UNROLL
  for (int k = first_k; k - first_k < in.depth; k += STEP) {
    stage_piece(tokens + first_k * STRIDE + row, x, k, in.depth);
    stage_piece(slots + first_k * STRIDE + row, weight, k, in.depth);
    sync_block();
    add_step(sums, tokens + thread / 16 * 8, slots + thread % 16 * 2);
    sync_block();
  }
  NO_UNROLL
  for (int i = 0; i < 8; ++i) {
    float first[2] = {}, second[2] = {};
    UNROLL
    for (int row = 0; row < 8; ++row) {  // registers have no index
      if (row == i) {
        first[0] = sums[row][0], first[1] = sums[row][1];
        second[0] = sums[row][2], second[1] = sums[row][3];
      }
    }
    const int at = token + thread / 16 * 8 + i;
    if (at < in.tokens) out.template finish<SECOND>(at, slot + thread % 16 * 2, first, second);
  }
}

template <int SIDE, typename X, typename Out>
DEVICE void gemm(const Operands<X>& in, const Out& out) {
  NO_UNROLL
  for (int part = 0; part < SIDE * SIDE / (PART * PART); ++part) {
    const int token = block_x() * SIDE + part % (SIDE / PART) * PART,
              slot = block_y() * SIDE + part / (SIDE / PART) * PART;
    gemm_part(in, out, token, slot);
  }
}
