// How weight files store elements, eight at a time as float. Knows blocks, not rows.
//
// Quantised layouts are ggml's (the GGUF file format): little-endian; d (scale) and m (minimum) are binary16; a byte of
// nibbles holds element i of its group low and element i + half high. The order of the float operations decides the
// last bit, and is ggml's too. A format is a struct with
//     ELEMENTS, BYTES               of a block
//     eight(block, first, out)      elements first..first + 7 of the block at `block`; first is a multiple of 8
//     one(block)                    a single element, where ELEMENTS is 1
// Blocks are aligned to 2 bytes, no more.
#pragma once

#include "element.cuh"

using Byte = unsigned char;

DEVICE uint32 load_uint16(const Byte* from) { return *reinterpret_cast<const uint16*>(from); }
DEVICE float load_half(const Byte* from) { return half_value(uint16(load_uint16(from))); }
DEVICE uint32 load_uint32(const Byte* from) { return load_uint16(from) | load_uint16(from + 2) << 16; }
DEVICE uint64 load_uint64(const Byte* from) { return load_uint32(from) | uint64(load_uint32(from + 4)) << 32; }
DEVICE int byte_of(uint64 bytes, int i) { return int(bytes >> (8 * i)) & 255; }

// Words of 4 bytes, a multiple of four of them, in the widest loads that the address allows.
template <int WORDS>
DEVICE void load_any(const Byte* from, uint32 (&to)[WORDS]) {
  if (reinterpret_cast<uint64>(from) % 16 == 0) {
    UNROLL
    for (int i = 0; i < WORDS; i += 4) {
      const Words4 four = load_words4(from + 4 * i);
      UNROLL
      for (int j = 0; j < 4; ++j) to[i + j] = four.word[j];
    }
  } else if (reinterpret_cast<uint64>(from) % 4 == 0) {
    UNROLL
    for (int i = 0; i < WORDS; ++i) to[i] = *reinterpret_cast<const uint32*>(from + 4 * i);
  } else {
    UNROLL
    for (int i = 0; i < WORDS; ++i) to[i] = load_uint32(from + 4 * i);
  }
}

struct StoredFloat {
  enum : int { ELEMENTS = 1, BYTES = 4 };
  static DEVICE float one(const Byte* block) { return float_of(load_uint32(block)); }
  static DEVICE void eight(const Byte* block, int, float (&out)[8]) {
    uint32 words[8];
    load_any(block, words);
    UNROLL
    for (int i = 0; i < 8; ++i) out[i] = float_of(words[i]);
  }
};

template <typename T>
struct StoredShort {  // half_t or bfloat_t
  enum : int { ELEMENTS = 1, BYTES = 2 };
  static DEVICE float one(const Byte* block) { return to_float(T{uint16(load_uint16(block))}); }
  static DEVICE void eight(const Byte* block, int, float (&out)[8]) {
    uint32 words[4];
    load_any(block, words);
    UNROLL
    for (int i = 0; i < 8; ++i) out[i] = to_float(T{uint16(words[i / 2] >> (i % 2 * 16))});
  }
};

// The eight nibbles of elements first..first + 7 in a group of 2 HALF elements, each in the low half of its byte.
template <int HALF>
DEVICE uint64 nibbles(const Byte* group, int first) {
  return load_uint64(group + first % HALF) >> (first < HALF ? 0 : 4) & 0x0f0f0f0f0f0f0f0full;
}

// x = (q - 8) d: d, 16 bytes of nibbles.
struct Q4_0 {
  enum : int { ELEMENTS = 32, BYTES = 18 };
  static DEVICE void eight(const Byte* block, int first, float (&out)[8]) {
    const float d = load_half(block);
    const uint64 low = nibbles<16>(block + 2, first);
    UNROLL
    for (int i = 0; i < 8; ++i) out[i] = float(byte_of(low, i) - 8) * d;
  }
};

// x = q d + m: d, m, 16 bytes of nibbles.
struct Q4_1 {
  enum : int { ELEMENTS = 32, BYTES = 20 };
  static DEVICE void eight(const Byte* block, int first, float (&out)[8]) {
    const float d = load_half(block), m = load_half(block + 2);
    const uint64 low = nibbles<16>(block + 4, first);
    UNROLL
    for (int i = 0; i < 8; ++i) out[i] = float(byte_of(low, i)) * d + m;
  }
};

// x = (q - 16) d: d, 4 bytes of fifth bits (bit i for element i), 16 bytes of nibbles.
struct Q5_0 {
  enum : int { ELEMENTS = 32, BYTES = 22 };
  static DEVICE void eight(const Byte* block, int first, float (&out)[8]) {
    const float d = load_half(block);
    const int fifth = block[2 + first / 8];
    const uint64 low = nibbles<16>(block + 6, first);
    UNROLL
    for (int i = 0; i < 8; ++i) out[i] = float((byte_of(low, i) | (fifth >> i & 1) << 4) - 16) * d;
  }
};

// x = q d + m: d, m, 4 bytes of fifth bits, 16 bytes of nibbles.
struct Q5_1 {
  enum : int { ELEMENTS = 32, BYTES = 24 };
  static DEVICE void eight(const Byte* block, int first, float (&out)[8]) {
    const float d = load_half(block), m = load_half(block + 2);
    const int fifth = block[4 + first / 8];
    const uint64 low = nibbles<16>(block + 8, first);
    UNROLL
    for (int i = 0; i < 8; ++i) out[i] = float(byte_of(low, i) | (fifth >> i & 1) << 4) * d + m;
  }
};

// x = q d: d, 32 signed bytes.
struct Q8_0 {
  enum : int { ELEMENTS = 32, BYTES = 34 };
  static DEVICE void eight(const Byte* block, int first, float (&out)[8]) {
    const float d = load_half(block);
    const uint64 bytes = load_uint64(block + 2 + first);
    UNROLL
    for (int i = 0; i < 8; ++i) out[i] = float((byte_of(bytes, i) ^ 128) - 128) * d;
  }
};

// Sub-block `sub` (0..7, of 32 elements) of q4_k and q5_k: its scale d sc and minimum m mn. After d and m come 12 bytes
// s of 6-bit numbers. sc and mn 0..3 are the low six bits of s[0..3] and s[4..7]; 4..7 are the low and high nibbles of
// s[8..11], with their upper two bits at the top of s[0..3] and s[4..7].
DEVICE void k_scales(const Byte* block, int sub, float& scale, float& minimum) {
  const Byte* s = block + 4 + sub % 4;
  const int sc = sub < 4 ? s[0] & 63 : (s[8] & 15) | s[0] >> 6 << 4;
  const int mn = sub < 4 ? s[4] & 63 : s[8] >> 4 | s[4] >> 6 << 4;
  scale = load_half(block) * float(sc);
  minimum = load_half(block + 2) * float(mn);
}

// x = (d sc) q - m mn: d, m, 12 bytes of scales, 128 bytes of nibbles (32 bytes: two sub-blocks).
struct Q4_K {
  enum : int { ELEMENTS = 256, BYTES = 144 };
  static DEVICE void eight(const Byte* block, int first, float (&out)[8]) {
    float scale, minimum;
    k_scales(block, first / 32, scale, minimum);
    const uint64 low = nibbles<32>(block + 16 + first / 64 * 32, first % 64);
    UNROLL
    for (int i = 0; i < 8; ++i) out[i] = float(byte_of(low, i)) * scale - minimum;
  }
};

// As q4_k, with 32 bytes of fifth bits before the nibbles: bit j of byte i is for element i of sub-block j.
struct Q5_K {
  enum : int { ELEMENTS = 256, BYTES = 176 };
  static DEVICE void eight(const Byte* block, int first, float (&out)[8]) {
    float scale, minimum;
    k_scales(block, first / 32, scale, minimum);
    const uint64 fifth = load_uint64(block + 16 + first % 32) >> (first / 32);
    const uint64 low = nibbles<32>(block + 48 + first / 64 * 32, first % 64);
    UNROLL
    for (int i = 0; i < 8; ++i) out[i] = float(byte_of(low, i) | (byte_of(fifth, i) & 1) << 4) * scale - minimum;
  }
};

// x = (q - 32) (d scale): 128 bytes of nibbles, 64 of upper bit pairs, 16 signed scales of 16 elements each, d. Each
// half of 128 elements has 64 bytes of nibbles and 32 of pairs: pair j of byte i is for element 32 j + i.
struct Q6_K {
  enum : int { ELEMENTS = 256, BYTES = 210 };
  static DEVICE void eight(const Byte* block, int first, float (&out)[8]) {
    const int half = first / 128, place = first % 128;
    const uint64 low = nibbles<64>(block + 64 * half, place);
    const uint64 pairs = load_uint64(block + 128 + 32 * half + place % 32) >> (place / 32 * 2);
    const float scale = load_half(block + 208) * float((block[192 + first / 16] ^ 128) - 128);
    UNROLL
    for (int i = 0; i < 8; ++i) out[i] = float((byte_of(low, i) | (byte_of(pairs, i) & 3) << 4) - 32) * scale;
  }
};
