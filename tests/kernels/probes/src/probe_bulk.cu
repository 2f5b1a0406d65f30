// probe_bulk: the copies of whole rows that t90 adds.
//
// launch: one block of 32; all arrays are global.
// tiers: t90
#include "intrinsics_t90.cuh"

// to = from (stages, 128 words), through a ring of two stages that are filled one ahead. `wait` 0 leaves the wait out: a
// fault, to be found. block 32.
KERNEL(32) void probe_copy_bytes(const uint32* from, uint32* to, int stages, int wait) {
  DYNAMIC_SHARED(memory);
  SHARED_ARRAY(uint64, words, 2);
  uint32* ring = reinterpret_cast<uint32*>(memory);
  const auto fetch = [&](int stage) {
    if (lane_index() != 0 || stage >= stages) return;
    arrive_expecting(words + stage % 2, 512);
    copy_bytes(ring + stage % 2 * 128, from + stage * 128, 512, words + stage % 2);
  };
  if (lane_index() == 0) {
    for (int i = 0; i < 2; ++i) begin_arrivals(words + i, 1);
    show_arrivals();
  }
  sync_warp();
  fetch(0);
  for (int stage = 0; stage < stages; ++stage) {
    fetch(stage + 1);
    if (wait) wait_arrivals(words + stage % 2, stage / 2 % 2);
    store_words4(to + stage * 128 + lane_index() * 4, load_words4(ring + stage % 2 * 128 + lane_index() * 4));
    sync_warp();
  }
}
