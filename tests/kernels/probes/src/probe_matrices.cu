// probe_matrices: the matrix operations that t75 adds.
//
// launch: one block of 32; all arrays are global.
// tiers: t75
#include "probe.cuh"

KERNEL(32) void probe_mma_1688_f16(const half_t* a, const half_t* b, float* d) { product<8>(a, b, d); }

// The fragments of 8x8 matrices: from (4, 8, 8) 16-bit; to four, four transposed, the first two and these transposed, and
// the four turned by lanes, (16, 32) words. block 32.
KERNEL(32) void probe_load_matrices(const uint16* from, uint32* to) {
  DYNAMIC_SHARED(memory);
  uint16* kept = reinterpret_cast<uint16*>(memory);
  for (int i = lane_index(); i < 256; i += WARP) kept[i] = from[i];
  sync_warp();
  const uint16* row = kept + lane_index() * 8;
  uint32 four[4], two_of_them[2];
  load_matrices(four, row);
  for (int i = 0; i < 4; ++i) to[i * WARP + lane_index()] = four[i];
  for (int i = 0; i < 4; ++i) to[(12 + i) * WARP + lane_index()] = turned_matrix(four[i]);
  load_matrices<true>(four, row);
  for (int i = 0; i < 4; ++i) to[(4 + i) * WARP + lane_index()] = four[i];
  load_matrices(two_of_them, row);
  for (int i = 0; i < 2; ++i) to[(8 + i) * WARP + lane_index()] = two_of_them[i];
  load_matrices<true>(two_of_them, row);
  for (int i = 0; i < 2; ++i) to[(10 + i) * WARP + lane_index()] = two_of_them[i];
}
