// Where blocks that share a sum meet: each leaves its part in the workspace, the last to arrive adds them up in order.
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
