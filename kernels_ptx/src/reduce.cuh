// Reductions over a warp and over a block; sums in an order that depends on nothing but the number of warps.
#pragma once

#include "intrinsics.cuh"

enum : int { MOST_WARPS = 32 };

// The sum of every lane's value, the same bits in all of them: lanes pair up 16, 8, 4, 2 and 1 apart.
DEVICE float warp_sum(float value) {
  UNROLL
  for (int apart = WARP / 2; apart > 0; apart /= 2) value += shuffle_xor(value, apart);
  return value;
}

// The sum of every thread's value, the same bits in all of them. Between two calls there must be a sync_block().
DEVICE float block_sum(float value) {
  SHARED_ARRAY(float, partials, MOST_WARPS);
  value = warp_sum(value);
  if (lane_index() == 0) partials[warp_index()] = value;
  sync_block();
  return warp_sum(lane_index() < warp_count() ? partials[lane_index()] : 0.0f);
}

// The same of any `join` that is associative and commutative, for every lane, or thread.
template <typename T, typename Join>
DEVICE T warp_joined(T value, Join join) {
  UNROLL
  for (int apart = WARP / 2; apart > 0; apart /= 2) value = join(value, shuffle_xor(value, apart));
  return value;
}

template <typename Join>
DEVICE uint64 block_joined(uint64 value, Join join) {
  SHARED_ARRAY(uint64, parts, MOST_WARPS);
  value = warp_joined(value, join);
  sync_block();  // the call before may still be read
  if (lane_index() == 0) parts[warp_index()] = value;
  sync_block();
  return warp_joined(lane_index() < warp_count() ? parts[lane_index()] : uint64(0), join);  // 0 changes no result
}
