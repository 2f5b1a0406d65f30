// Where blocks that share a sum meet: each leaves its part in the workspace, and the last to arrive, or each for a share,
// adds them up in order.
#pragma once

#include "intrinsics.cuh"

// Float sums, and counters that are 0 between launches.
struct Meeting {
  float* workspace;
  uint32* counters;
};

// True in the last of `blocks` blocks that come here; what all of them wrote before is then seen by this one.
DEVICE bool arrives_last(uint32* counter, int blocks) {
  SHARED_ARRAY(uint32, ticket, 1);
  fence();
  sync_block();
  if (thread_index() == 0) ticket[0] = atomic_add(counter, 1u);
  sync_block();
  if (ticket[0] != uint32(blocks - 1)) return false;
  if (thread_index() == 0) *counter = 0;
  fence();
  return true;
}

// All of `blocks` blocks leave this when all have come; what they wrote before is then seen. Such blocks must have none
// behind them in the grid but their like: blocks start in order, so that all of them run once those before have ended.
DEVICE void meet_blocks(uint32* counter, int blocks) {
  fence();
  sync_block();
  if (thread_index() == 0) {
    atomic_add(counter, 1u);
    wait_until(counter, uint32(blocks));
  }
  sync_block();
  fence();
}

// Each of them, when it has read what the others left.
DEVICE void leave_blocks(uint32* counter, int blocks) {
  sync_block();
  if (thread_index() == 0 && atomic_add(counter, 1u) == uint32(2 * blocks - 1)) *counter = 0;
}
