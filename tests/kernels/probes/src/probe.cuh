// A matrix product by one warp, its fragments loaded element by element as the PTX manual lays them out.
#pragma once

#include "element.cuh"

template <typename X>
DEVICE uint32 two(const X* from) {
  return uint32(from[0].bits) | uint32(from[1].bits) << 16;
}

// d (16, 8) += a (16, K) b (8, K)^T, fragments loaded element by element.
template <int K, typename X>
DEVICE void product(const X* a, const X* b, float* d) {
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = d[(row + i / 2 * 8) * 8 + column + i % 2];
  uint32 left[K / 4], right[K / 8];
  for (int i = 0; i < K / 4; ++i) left[i] = two(a + (row + i % 2 * 8) * K + column + i / 2 * 8);
  for (int i = 0; i < K / 8; ++i) right[i] = two(b + row * K + column + i * 8);
  if constexpr (K == 8) {
    mma_1688(sums, left, right[0], X{});
#if TIER >= 80
  } else {
    mma_16816(sums, left, right, X{});
#endif
  }
  for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * 8 + column + i % 2] = sums[i];
}
