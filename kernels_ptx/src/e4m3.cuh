// E4M3 (Micikevicius et al. 2022): sign, 4 bits of exponent with bias 7, 3 of fraction; at most 448, NaN 0x7f. What a
// cache of codes adds to one of X: a row of head_dim codes has a float scale, and stands for codes times scale.
//
// scale = largest |x| of the row / 448, and NaN where the row holds anything that is no finite number. A code is
// x / scale, to nearest even and at most 448; 0 where the scale is 0. Both builds give the same bits.
#pragma once

#include "element.cuh"

// What of C, the cache's element, depends on its format. UNIT: by how much codes in fragments are smaller than values.
template <typename C>
struct Stored {
  enum : int { SCALED = 0, UNIT = 1 };
};
template <>
struct Stored<e4m3_t> {
  enum : int { SCALED = 1, UNIT = 256 };
};

// What values are multiplied as by matrix instructions. Weights times a scale reach far below half's exponents.
template <typename X, typename C>
struct Mixed {
  using Type = X;
};
template <typename X>
struct Mixed<X, e4m3_t> {
  using Type = bfloat_t;
};

// Code 0x7f, NaN, becomes 480: its row's scale is NaN.
DEVICE float to_float(e4m3_t value) {
  return float_of(uint32(value.bits & 0x80) << 24 | uint32(value.bits & 0x7f) << 20) * 0x1p120f;
}

#ifndef NATIVE_E4M3
DEVICE uint32 e4m3_bits(float value) {
  const uint32 sign = bits_of(value) >> 24 & 0x80u, size = bits_of(value) & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7f;
  if (size >= bits_of(448.0f)) return sign | 0x7e;
  // Below 2^-6 codes are multiples of 2^-9, which is the last place of a float from 2^14 on.
  if (size < bits_of(0x1p-6f)) return sign | (bits_of(float_of(size) + 0x1p14f) & 0xf);
  return sign | (((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3));
}
DEVICE uint32 e4m3_pair(float first, float second) { return e4m3_bits(first) | e4m3_bits(second) << 8; }
#endif

// largest: the bits of the largest |x|, in whose order NaN is above infinity.
DEVICE float e4m3_scale(uint32 largest) {
  return largest < 0x7f800000u ? float_of(largest) / 448.0f : float_of(0x7fc00000u);
}

template <int N>
DEVICE void store_codes(e4m3_t* to, const Pack<float, N>& values, float scale) {
  static_assert(N == 1 || N == WIDE, "one code, or eight");
  if constexpr (N == 1) {
    to->bits = scale == 0.0f ? 0 : e4m3_pair(values.at[0] / scale, 0.0f) & 0xff;
  } else {
    Words2 words = {};
    UNROLL
    for (int i = 0; i < N; i += 2) {
      const uint32 pair = e4m3_pair(values.at[i] / scale, values.at[i + 1] / scale);
      words.word[i / 4] |= scale == 0.0f ? 0 : pair << i % 4 * 8;
    }
    store_words2(to, words);
  }
}

// Eight codes; the address is aligned to them.
DEVICE Pack<e4m3_t, WIDE> load_codes(const e4m3_t* from) {
  Pack<e4m3_t, WIDE> pack;
  *reinterpret_cast<Words2*>(&pack) = load_words2(from);
  return pack;
}

#if TIER >= 80
// Bytes 1 and 3 of `codes` as two elements, exactly, 1 / UNIT of their values; bytes 0 and 2 may be anything.
DEVICE uint32 expanded_pair(uint32 codes, half_t) { return (codes & 0x80008000u) | (codes & 0x7f007f00u) >> 1; }
DEVICE uint32 expanded_pair(uint32 codes, bfloat_t) {
  const uint32 tiny = (codes & 0x80008000u) | (codes & 0x7f007f00u) >> 4;  // 2^-120 of their values
  return multiply_pairs(tiny, 0x77807780u, bfloat_t());                    // 2^112
}

// Eight codes as eight elements.
template <typename X>
DEVICE Words4 expanded(const Words2& codes) {
  Words4 elements;
  UNROLL
  for (int i = 0; i < 4; ++i) {
    elements.word[i] = expanded_pair(chosen_bytes(codes.word[i / 2], 0, i % 2 ? 0x3424 : 0x1404), X());
  }
  return elements;
}
#endif
