// dummy: weights that need no file; element i of a tensor, i counted in row-major order from first_index on, is
//
//     key = mix(seed + (i >> 32)), h = mix(key ^ low 32 bits of i)         32-bit unsigned arithmetic
//     out = X(centre + (2 (h >> (32 - bits)) - (2^bits - 1)) unit)         exact in float before the one rounding
//     mix(x): x ^= x >> 16, x *= 0x7feb352d, x ^= x >> 15, x *= 0x846ca68b, x ^= x >> 16     (lowbias32, C. Wellons)
//
// out (count) X.
// launch: grid (any number of blocks; ceil(count / 2048) gives every thread one pack), block 256, no dynamic shared
//   memory. One thread: 8 elements at a time.
// bound: 2 count bytes; about 3 integer operations a byte.
// assumes: first_index >= 0; 1 <= bits <= 23; unit is a power of two. 16-byte stores where out starts on 16 bytes.
// tiers: t70
#include "element.cuh"

struct Recipe {
  uint32 seed;
  float centre;
  int bits;
  float unit;
};

DEVICE uint32 mix(uint32 x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

DEVICE float dummy_value(int64 index, const Recipe& recipe) {
  const uint32 hashed = mix(mix(recipe.seed + uint32(index >> 32)) ^ uint32(index));
  const float odd = float(int(2 * (hashed >> (32 - recipe.bits))) - ((1 << recipe.bits) - 1));
  return recipe.centre + odd * recipe.unit;
}

template <typename X>
DEVICE void dummy(X* out, int64 count, int64 first_index, const Recipe& recipe) {
  const int64 stride = int64(grid_x()) * thread_count() * WIDE;
  const bool aligned = reinterpret_cast<uint64>(out) % 16 == 0;
  NO_UNROLL
  for (int64 at = (int64(block_x()) * thread_count() + thread_index()) * WIDE; at < count; at += stride) {
    Pack<X, WIDE> pack;
    UNROLL
    for (int i = 0; i < WIDE; ++i) pack.at[i] = rounded<X>(dummy_value(first_index + at + i, recipe));
    if (aligned && at + WIDE <= count) {
      store(out + at, pack);
    } else {
      UNROLL
      for (int i = 0; i < WIDE; ++i) {
        if (at + i < count) out[at + i] = pack.at[i];
      }
    }
  }
}

KERNEL(256)
void dummy_f16(half_t* out, int64 count, int64 first_index, uint32 seed, float centre, int bits, float unit) {
  dummy(out, count, first_index, {seed, centre, bits, unit});
}

KERNEL(256)
void dummy_bf16(bfloat_t* out, int64 count, int64 first_index, uint32 seed, float centre, int bits, float unit) {
  dummy(out, count, first_index, {seed, centre, bits, unit});
}
