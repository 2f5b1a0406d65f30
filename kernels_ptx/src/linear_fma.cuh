// The sums of a block of `linear` without tensor cores: warp w of 8 has slots w and w + 8 of each tile. Its lanes take
// 8 elements of the depth each, 256 a round, and are summed as in warp_sum.
#pragma once

#include "linear_in.cuh"
#include "linear_out.cuh"
#include "reduce.cuh"

// Elements [k, k + 8) of row `row` of a matrix; zeros where there is no such row or k.
template <typename X>
DEVICE Pack<X, WIDE> piece_of(const X* matrix, int row, int k, int end, int depth) {
  if (row == NOWHERE) return {};
  const X* start = matrix + int64(row) * depth;
  return depth % WIDE == 0 ? load<WIDE>(start + k) : load_piece(start, k, end);
}

template <typename X>
DEVICE float add_products(float sum, const Pack<X, WIDE>& a, const Pack<X, WIDE>& b) {
  UNROLL
  for (int i = 0; i < WIDE; ++i) sum = fused_multiply_add(to_float(a.at[i]), to_float(b.at[i]), sum);
  return sum;
}

// Slots `slot` and slot + 8 times tokens `token`..token + 7: sums[0] and sums[1], the same in every lane.
template <typename X, typename Out>
DEVICE void warp_sums(float (&sums)[2][8], const Operands<X>& in, const Out& out, int slot, int token) {
  const Range range = part_of(in.depth, block_y(), grid_y());
  const int rows[2] = {out.template row<8>(slot), out.template row<8>(slot + 8)};
  NO_UNROLL
  for (int k = range.begin + lane_index() * WIDE; k < range.end; k += WARP * WIDE) {
    const Pack<X, WIDE> first = piece_of(in.weight, rows[0], k, range.end, in.depth);
    const Pack<X, WIDE> second = piece_of(in.weight, rows[1], k, range.end, in.depth);
    UNROLL
    for (int i = 0; i < 8; ++i) {
      if (token + i >= in.tokens) break;
      const Pack<X, WIDE> x = piece_of(in.x, token + i, k, range.end, in.depth);
      sums[0][i] = add_products(sums[0][i], first, x);
      sums[1][i] = add_products(sums[1][i], second, x);
    }
  }
  UNROLL
  for (int i = 0; i < 16; ++i) sums[i / 8][i % 8] = warp_sum(sums[i / 8][i % 8]);
}

// Leaves the sums of the block's tile in shared memory, laid out as linear_mma.cuh does, and gives 1: there are no
// partial ones.
template <int TILES, int EIGHTS, typename X, typename Out>
DEVICE int block_sums(const Operands<X>& in, const Out& out, unsigned char* memory) {
  float* to = reinterpret_cast<float*>(memory) + warp_index() * 4 * 4;
  NO_UNROLL
  for (int part = 0; part < TILES * EIGHTS; ++part) {
    float sums[2][8] = {};
    const int slot = (block_x() * TILES + part / EIGHTS) * 16 + warp_index();
    warp_sums(sums, in, out, slot, part % EIGHTS * 8);
    UNROLL
    for (int t = 0; t < 4; ++t) {
      const Pack<float, 4> four = {{sums[0][2 * t], sums[0][2 * t + 1], sums[1][2 * t], sums[1][2 * t + 1]}};
      if (lane_index() == t) store(to + part * WARP * 4 + t * 4, four);
    }
  }
  sync_block();
  return 1;
}
