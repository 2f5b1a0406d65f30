// Matrix fragments and products: for each lane and place, the row and column that it holds (PTX manual, "mma"). Sums of
// a product are exact before one rounding, which no device promises: tests that compare bits use integers.
#pragma once

#include <cmath>

#include "machine.h"

namespace shim {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// The fraction and exponent in a float's places are the half's value times 2^-112, subnormal ones too.
float half_value(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16, size = uint32_t(bits & 0x7fffu) << 13;
  if (size >= 0x0f800000u) return float_of(sign | 0x70000000u | size);  // infinity, or not a number
  return float_of(sign | bits_of(float_of(size) * 0x1p112f));
}

// To nearest even.
uint16_t half_bits(float value) {
  const uint32_t sign = bits_of(value) >> 16 & 0x8000u, size = bits_of(value) & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fff;
  if (float_of(size) >= 65520.0f) return uint16_t(sign | 0x7c00);
  // Subnormal: the last place is 2^-24, which is that of the floats from 0.5 on.
  if (float_of(size) < 0x1p-14f) return uint16_t(sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f)));
  return uint16_t(sign | (size - (112u << 23) + 0xfffu + (size >> 13 & 1)) >> 13);
}

inline float element(uint16_t bits, bool brain) { return brain ? float_of(uint32_t(bits) << 16) : half_value(bits); }

inline void elements(float* to, const void* bits, int count, bool brain) {
  uint16_t each[16];
  __builtin_memcpy(each, bits, sizeof(each[0]) * size_t(count));
  for (int i = 0; i < count; ++i) to[i] = element(each[i], brain);
}

// m16n8k(8 N): a (16, K), b (K, 8), d (16, 8). Register r of a holds rows +8 (r odd) and columns +8 (r >= 2), two
// elements each, the lower half first. Lanes show each other the values.
template <int N>
void product(float* d, const void* a, const void* b, const char* operation, bool brain) {
  need_whole_warp(operation);
  float mine[3 * N];
  static_assert(sizeof(mine) <= SLOT_BYTES, "a slot holds the fragments");
  elements(mine, a, 2 * N, brain);
  elements(mine + 2 * N, b, N, brain);
  const Slots slots = meet(operation, ~0u, mine, sizeof(mine));
  const int lane = machine.now->current % LANES;
  const float* left = reinterpret_cast<const float*>(slots[lane / 4 * 4]);
  const float* right = reinterpret_cast<const float*>(slots[lane % 4 * 8]) + 2 * N;
  constexpr int SLOT = SLOT_BYTES / sizeof(float), NEXT_COLUMN = 4 * SLOT;
  double sum0 = d[0], sum1 = d[1], sum2 = d[2], sum3 = d[3];  // an array would go through memory at every step
#pragma GCC unroll 16
  for (int k = 0; k < 4 * N; ++k) {
    const float* of_row = left + k % 8 / 2 * SLOT + k / 8 * 4 + k % 2;
    const float* of_column = right + k % 8 / 2 * SLOT + k / 8 * 2 + k % 2;
    const double upper = of_row[0], lower = of_row[2], first = of_column[0], second = of_column[NEXT_COLUMN];
    sum0 += upper * first;
    sum1 += upper * second;
    sum2 += lower * first;
    sum3 += lower * second;
  }
  d[0] = float(sum0), d[1] = float(sum1), d[2] = float(sum2), d[3] = float(sum3);
}

void matrix_product(float* d, const void* a, const void* b, int registers, bool brain) {
  if (registers == 4) return product<4>(d, a, b, "mma_16816", brain);
  product<2>(d, a, b, "mma_1688", brain);
}

// m8n8k4, four products at once: quad pair p is lanes 4 p..4 p + 3 and those 16 above. a's rows 4..7 and b's columns
// 4..7 are in the upper lanes; each lane of a holds a row's four k, each lane of b a column's.
void products_8x8x4(float* d, const void* a, const void* b) {
  need_whole_warp("mma_884");
  float mine[8];
  elements(mine, a, 4, false);
  elements(mine + 4, b, 4, false);
  const Slots slots = meet("mma_884", ~0u, mine, sizeof(mine));
  const int lane = machine.now->current % LANES, pair = lane % 16 / 4;
  for (int place = 0; place < 8; ++place) {
    const int row = (lane & 1) + (place & 2) + (lane < 16 ? 0 : 4), column = (place & 4) + (lane & 2) + (place & 1);
    const float* left = reinterpret_cast<const float*>(slots[4 * pair + row % 4 + row / 4 * 16]);
    const float* right = reinterpret_cast<const float*>(slots[4 * pair + column % 4 + column / 4 * 16]) + 4;
    double sum = d[place];
    for (int k = 0; k < 4; ++k) sum += double(left[k]) * right[k];
    d[place] = float(sum);
  }
}

void load_matrices(uint32_t* to, int matrices, bool transposed, const void* row) {
  need_whole_warp("load_matrices");
  unsigned char shown[16] = {};  // the addresses of lanes beyond the matrices' rows are ignored
  const int lane = machine.now->current % LANES;
  if (lane < 8 * matrices) memcpy(shown, aligned(row, 16), 16);
  const Slots slots = meet(transposed ? "load_matrices, transposed" : "load_matrices", ~0u, shown, 16);
  for (int matrix = 0; matrix < matrices; ++matrix) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int at_row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
      __builtin_memcpy(&pair[i], slots[8 * matrix + at_row] + 2 * column, 2);
    }
    __builtin_memcpy(&to[matrix], pair, 4);
  }
}

uint32_t turned_matrix(uint32_t pair) {
  need_whole_warp("turned_matrix");
  const Slots slots = meet("turned_matrix", ~0u, &pair, sizeof(pair));
  const int lane = machine.now->current % LANES;
  uint32_t turned = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t row = from_lane<uint32_t>(slots, (lane % 4 * 2 + i) * 4 + lane / 8);
    turned |= (row >> lane / 4 % 2 * 16 & 0xffffu) << 16 * i;
  }
  return turned;
}

// ---- Products of a warpgroup. A product happens when it is started in half of the schedules, and in the others as late
// as it may: then a matrix that is overwritten too early, or a sum that is read without waiting, is wrong.

// The 16 elements of a row from `matrix` on, where a swizzle by 128 bytes has put them.
inline void row_of_matrix(float* to, uint64_t matrix, int row, bool brain) {
  const uintptr_t begin = matrix + uintptr_t(row) * 128;
  for (int half = 0; half < 2; ++half) {
    const uintptr_t plain = begin + uintptr_t(half) * 16;
    unsigned char bits[16];
    memcpy(bits, reinterpret_cast<const void*>(plain ^ (plain >> 7 & 7) << 4), sizeof(bits));
    elements(to + half * 8, bits, 8, brain);
  }
}

inline void happen(const Product& asked) {
  const int lane = machine.now->current % LANES, warp = machine.now->current / LANES % 4;
  float upper[16], lower[16], first[16], second[16];
  row_of_matrix(upper, asked.a, warp * 16 + lane / 4, asked.brain);
  row_of_matrix(lower, asked.a, warp * 16 + lane / 4 + 8, asked.brain);
  float* d = asked.d;
  for (int column = lane % 4 * 2; column < 2 * asked.count; column += 8, d += 4) {
    row_of_matrix(first, asked.b, column, asked.brain);
    row_of_matrix(second, asked.b, column + 1, asked.brain);
    double sum0 = d[0], sum1 = d[1], sum2 = d[2], sum3 = d[3];  // side by side, for each waits for what it was before
    for (int k = 0; k < 16; ++k) {
      sum0 += double(upper[k]) * first[k];
      sum1 += double(upper[k]) * second[k];
      sum2 += double(lower[k]) * first[k];
      sum3 += double(lower[k]) * second[k];
    }
    d[0] = float(sum0), d[1] = float(sum1), d[2] = float(sum2), d[3] = float(sum3);
  }
}

void warpgroup_product(float* d, int count, uint64_t a, uint64_t b, bool brain) {
  if ((a | b) % 16 != 0) fail("a matrix from %p or %p on, which is not on 16 bytes", (void*)a, (void*)b);
  const Product asked = {d, count, a, b, brain};
  if (machine.launch->schedule % 2 == 0) return happen(asked);
  Groups<Product>& products = current_thread().products;
  products.members.push_back({asked, products.open});
}

void commit_products() { ++current_thread().products.open; }
void wait_products(size_t left) { current_thread().products.finish(left, happen); }

}  // namespace shim
