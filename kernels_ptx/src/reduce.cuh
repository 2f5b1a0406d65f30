// Sums over a warp and over a block, in an order that depends on nothing but the number of warps.
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
