// Elements of 16 and 32 bits, and packs of them. X stands for half_t or bfloat_t throughout the kernels.
//
// Sums and products are float; `rounded<X>` is a rounding point. Both builds of bfloat_t rounding give the same bits.
#pragma once

#include "intrinsics.cuh"

DEVICE float log2_e() { return 1.4426950409f; }
DEVICE int smaller_int(int a, int b) { return a < b ? a : b; }
DEVICE int larger_int(int a, int b) { return a > b ? a : b; }

#ifndef NATIVE_BFLOAT
// To nearest even. The carry out of the lower half rounds up; NaN becomes 0x7fff, as the instruction of t80 gives.
DEVICE uint16 bfloat_bits(float value) {
  const uint32 bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#endif

DEVICE float to_float(half_t value) { return half_value(value.bits); }
DEVICE float to_float(bfloat_t value) { return float_of(uint32(value.bits) << 16); }

template <typename X>
DEVICE X rounded(float value);
template <>
DEVICE half_t rounded<half_t>(float value) {
  return {half_bits(value)};
}
template <>
DEVICE bfloat_t rounded<bfloat_t>(float value) {
  return {bfloat_bits(value)};
}

// N consecutive elements, held in registers.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};

// Elements that one 16-byte access of X moves; rows whose width is no multiple go element by element.
enum : int { WIDE = 8 };

// N = 1, or a pack of whole 16-byte words; the address is aligned to the pack, or to 16 bytes.
template <int N, typename T>
DEVICE Pack<T, N> load(const T* from) {
  Pack<T, N> pack;
  if constexpr (N == 1) {
    pack.at[0] = *from;
  } else {
    static_assert(sizeof(pack) % 16 == 0, "packs are whole 16-byte words");
    UNROLL
    for (int word = 0; word < int(sizeof(pack) / 16); ++word) {
      reinterpret_cast<Words4*>(&pack)[word] = load_words4(from + word * (16 / sizeof(T)));
    }
  }
  return pack;
}

template <int N, typename T>
DEVICE void store(T* to, const Pack<T, N>& pack) {
  if constexpr (N == 1) {
    *to = pack.at[0];
  } else {
    static_assert(sizeof(pack) % 16 == 0, "packs are whole 16-byte words");
    UNROLL
    for (int word = 0; word < int(sizeof(pack) / 16); ++word) {
      store_words4(to + word * (16 / sizeof(T)), reinterpret_cast<const Words4*>(&pack)[word]);
    }
  }
}
