// probe_async: the matrix products, the asynchronous copies and the arithmetic on pairs that t80 adds.
//
// launch: one block of 32; all arrays are global.
// tiers: t80
#include "e4m3.cuh"
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

// to = from (32, 3 words): of each row 8 bytes and 4 bytes in copies of their own, as many as are valid.
KERNEL(32) void probe_few_copies(const uint32* from, uint32* to, int valid_of_8, int valid_of_4) {
  DYNAMIC_SHARED(memory);
  uint32* pairs = reinterpret_cast<uint32*>(memory);
  uint32* singles = pairs + 2 * WARP;
  const int lane = lane_index();
  copy_async_few<8>(pairs + 2 * lane, from + 2 * lane, valid_of_8);
  copy_async_few<4>(singles + lane, from + 2 * WARP + lane, valid_of_4);
  commit_copies();
  wait_copies<0>();
  store_words2(to + 2 * lane, load_words2(pairs + 2 * lane));
  to[2 * WARP + lane] = singles[lane];
}

// Codes 2 i and 2 i + 1 as pairs of elements, whatever lies beside them. halves, bfloats (128); grid (4), block 32.
KERNEL(32) void probe_expanded(uint32* halves, uint32* bfloats) {
  const int i = block_x() * WARP + lane_index();
  const uint32 codes = chosen_bytes(uint32(2 * i) << 16, uint32(2 * i + 1) | 0xa5a5a500u, 0x4625);
  halves[i] = expanded_pair(codes, half_t());
  bfloats[i] = expanded_pair(codes, bfloat_t());
}
