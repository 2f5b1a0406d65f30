// The sums of a block of `linear` without tensor cores: warp w of 8 has slots w and w + 8 of each tile. Its lanes take
// 8 elements of the depth each, 256 a round, or one each, and are summed as in warp_sum.
#pragma once

#include "linear_in.cuh"
#include "linear_out.cuh"
#include "reduce.cuh"

// N elements from column k on of row `row` of a matrix, as floats; zeros where there is no such row.
template <int N, typename X>
DEVICE Pack<float, N> floats_of(const X* matrix, int row, int k, int depth) {
  Pack<float, N> floats = {};
  if (row == NOWHERE) return floats;
  const Pack<X, N> piece = load<N>(matrix + int64(row) * depth + k);
  UNROLL
  for (int i = 0; i < N; ++i) floats.at[i] = to_float(piece.at[i]);
  return floats;
}

template <int N>
DEVICE float add_products(float sum, const Pack<float, N>& a, const Pack<float, N>& b) {
  UNROLL
  for (int i = 0; i < N; ++i) sum = fused_multiply_add(a.at[i], b.at[i], sum);
  return sum;
}

// What one lane has of slots `slot` and slot + 8 times tokens `token`..token + 7: sums[0] and sums[1].
template <int N, typename X, typename Out>
DEVICE void lane_sums(float (&sums)[2][8], const Operands<X>& in, const Out& out, int slot, int token) {
  const Range range = part_of(in.depth, block_y(), grid_y());
  const int rows[2] = {out.template row<8>(slot), out.template row<8>(slot + 8)};
  NO_UNROLL
  for (int k = range.begin + lane_index() * N; k < range.end; k += WARP * N) {
    const Pack<float, N> first = floats_of<N>(in.weight, rows[0], k, in.depth);
    const Pack<float, N> second = floats_of<N>(in.weight, rows[1], k, in.depth);
    UNROLL
    for (int i = 0; i < 8; ++i) {
      if (token + i >= in.tokens) break;
      const Pack<float, N> x = floats_of<N>(in.x, token + i, k, in.depth);
      sums[0][i] = add_products(sums[0][i], first, x);
      sums[1][i] = add_products(sums[1][i], second, x);
    }
  }
}

// Leaves the sums of the block's tiles in shared memory, laid out as linear_mma.cuh does, in the one layer that it
// gives.
template <int EIGHTS, typename X, typename Out>
DEVICE int block_sums(const Operands<X>& in, const Out& out, int tiles, unsigned char* memory) {
  float* to = reinterpret_cast<float*>(memory) + warp_index() * 4 * 4;
  NO_UNROLL
  for (int part = 0; part < tiles * EIGHTS; ++part) {
    float sums[2][8] = {};
    const int slot = (block_x() * tiles + part / EIGHTS) * 16 + warp_index(), token = part % EIGHTS * 8;
    if (in.depth % WIDE == 0) {
      lane_sums<WIDE>(sums, in, out, slot, token);
    } else {
      lane_sums<1>(sums, in, out, slot, token);
    }
    UNROLL
    for (int i = 0; i < 16; ++i) {
      const float sum = warp_sum(sums[i / 8][i % 8]);
      if (lane_index() == i) to[part * WARP * 4 + i % 8 / 2 * 4 + i / 8 * 2 + i % 2] = sum;
    }
  }
  sync_block();
  return 1;
}
