// probe_async: the matrix products and the asynchronous copies that t80 adds.
//
// launch: one block of 32; all arrays are global.
// tiers: t80
#include "probe.cuh"

KERNEL(32) void probe_mma_1688_bf16(const bfloat_t* a, const bfloat_t* b, float* d) { product<8>(a, b, d); }
KERNEL(32) void probe_mma_16816_f16(const half_t* a, const half_t* b, float* d) { product<16>(a, b, d); }
KERNEL(32) void probe_mma_16816_bf16(const bfloat_t* a, const bfloat_t* b, float* d) { product<16>(a, b, d); }

// to = from (stages, 128 words), through a ring of two stages that are filled one ahead; the last word's bytes from
// `valid` on are 0. `wait` 0 leaves the wait out: a fault, to be found. block 32, each thread 16 bytes of a stage.
KERNEL(32) void probe_copies(const uint32* from, uint32* to, int stages, int valid, int wait) {
  DYNAMIC_SHARED(memory);
  uint32* ring = reinterpret_cast<uint32*>(memory);
  const int own = lane_index() * 4;
  copy_async(ring + own, from + own, valid);
  commit_copies();
  for (int stage = 0; stage < stages; ++stage) {
    if (stage + 1 < stages) copy_async(ring + (stage + 1) % 2 * 128 + own, from + (stage + 1) * 128 + own, valid);
    commit_copies();
    if (wait) wait_copies<1>();
    store_words4(to + stage * 128 + own, load_words4(ring + stage % 2 * 128 + own));
  }
}
