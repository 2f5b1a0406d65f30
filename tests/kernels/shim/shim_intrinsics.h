// What intrinsics.cuh has from CUDA, on the machine of fibers: the same names, with the meaning that the PTX manual
// gives. Sums of a matrix product are exact before one rounding, which no device promises: tests that compare bits use
// integers. Included by intrinsics.cuh, after its types.
#pragma once

#include <cmath>

#include "machine.h"

#define KERNEL(threads) extern "C"
#define DEVICE inline
#define UNROLL
#define NO_UNROLL
#define SHARED_ARRAY(type, name, count) \
  alignas(16) static type name[count];  \
  shim::poison_once(name, sizeof(type) * (count))
#define DYNAMIC_SHARED(name) unsigned char* name = shim::machine.now->shared
DEVICE unsigned char* aligned_shared(unsigned char* memory, uint32 bytes) {
  return memory + (-reinterpret_cast<uintptr_t>(memory) & (bytes - 1));
}

namespace shim {

inline void poison_once(void* array, size_t bytes) {
  for (const Fixed& met : machine.now->poisoned) {
    if (met.array == array) return;
  }
  machine.now->poisoned.push_back({array, bytes, {}});
  memset(array, POISON, bytes);
}

template <typename T>
T* aligned(T* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) fail("%zu bytes at %p, which is not aligned", bytes, address);
  return address;
}

template <typename T>
T from_lane(const unsigned char (*slots)[SLOT_BYTES], int lane) {
  T value;
  memcpy(&value, slots[lane], sizeof(T));
  return value;
}

// Complete the oldest committed groups until `left` remain.
inline void finish(const std::vector<Copy>& group) {
  for (const Copy& copy : group) {
    memset(copy.to, 0, copy.bytes);
    memcpy(copy.to, copy.from, copy.valid);
  }
}

inline void finish_copies(size_t left) {
  auto& groups = current_thread().copies;
  while (groups.size() - 1 > left) {
    finish(groups.front());
    groups.erase(groups.begin());
  }
}

// Copies that are started before it read what is there before it.
inline void wait_for_previous_grid() {
  if (machine.launch->late_count == 0 || machine.now->late_is_there) return;
  for (std::vector<Copy>& group : current_thread().copies) {
    finish(group);
    group.clear();
  }
  bring_all_boxes();
  wait_for_late();
}

}  // namespace shim

DEVICE int thread_index() { return shim::machine.now->current; }
DEVICE int thread_count() { return shim::machine.launch->block; }
DEVICE int block_x() { return shim::machine.now->block[0]; }
DEVICE int block_y() { return shim::machine.now->block[1]; }
DEVICE int block_z() { return shim::machine.now->block[2]; }
DEVICE int grid_x() { return shim::machine.launch->grid[0]; }
DEVICE int grid_y() { return shim::machine.launch->grid[1]; }
DEVICE int grid_z() { return shim::machine.launch->grid[2]; }

DEVICE void sync_block() { shim::arrive(0, 0, true); }
DEVICE void sync_warp(uint32 lanes = ALL_LANES) { shim::meet("sync_warp", lanes, &lanes, 4); }
DEVICE void barrier_wait(int barrier, int threads) { shim::arrive(barrier, threads, true); }
DEVICE void barrier_arrive(int barrier, int threads) { shim::arrive(barrier, threads, false); }

template <typename T>
T shuffle(T value, int source, uint32 lanes = ALL_LANES) {
  return shim::from_lane<T>(shim::meet("shuffle", lanes, &value, sizeof(T)), source & (WARP - 1));
}
template <typename T>
T shuffle_xor(T value, int lane_bits, uint32 lanes = ALL_LANES) {
  const int source = (thread_index() ^ lane_bits) & (WARP - 1);
  return shim::from_lane<T>(shim::meet("shuffle_xor", lanes, &value, sizeof(T)), source);
}
DEVICE uint32 lanes_where(bool holds, uint32 lanes = ALL_LANES) {
  const unsigned char shown = holds;
  const auto slots = shim::meet("lanes_where", lanes, &shown, 1);
  uint32 found = 0;
  for (int lane = 0; lane < WARP; ++lane) found |= uint32(slots[lane][0] == 1) << lane;
  return found;
}

DEVICE Words4 load_words4(const void* address) { return *static_cast<const Words4*>(shim::aligned(address, 16)); }
DEVICE void store_words4(void* address, Words4 value) { *static_cast<Words4*>(shim::aligned(address, 16)) = value; }
DEVICE Words2 load_words2(const void* address) { return *static_cast<const Words2*>(shim::aligned(address, 8)); }
DEVICE void store_words2(void* address, Words2 value) { *static_cast<Words2*>(shim::aligned(address, 8)) = value; }
DEVICE Words4 load_words4_once(const void* address) { return load_words4(address); }
DEVICE Words2 load_words2_once(const void* address) { return load_words2(address); }

DEVICE uint32 load_acquire(const uint32* address) {
  shim::yield();
  return *address;
}
DEVICE void store_release(uint32* address, uint32 value) {
  *address = value;
  shim::yield();
}
DEVICE void fence() {}
DEVICE void wait_until(const uint32* address, uint32 least) { shim::wait_until(address, least); }

template <typename T>
T atomic_add(T* address, T value) {
  shim::yield();
  const T old = *address;
  *address = old + value;
  return old;
}
template <typename T>
T atomic_max(T* address, T value) {
  shim::yield();
  const T old = *address;
  if (value > old) *address = value;
  return old;
}
template <typename T>
T atomic_compare_swap(T* address, T expected, T value) {
  shim::yield();
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}

DEVICE uint32 bits_of(float value) {
  uint32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
DEVICE float float_of(uint32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
DEVICE uint32 chosen_bytes(uint32 low, uint32 high, uint32 selector) {
  const uint64 all = uint64(high) << 32 | low;
  uint32 chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= uint32(all >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}
DEVICE float half_value(uint16 bits) {
  const uint32 sign = uint32(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
  if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return std::ldexp(float(fraction), -24) * (sign ? -1.0f : 1.0f);
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}
// To nearest even: scaled so that the last place of the half is 1, the float is rounded by the host to an integer.
DEVICE uint16 half_bits(float value) {
  const uint16 sign = uint16(bits_of(value) >> 16 & 0x8000u);
  const float size = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent;
  std::frexp(size, &exponent);          // 2^(exponent - 1) <= size < 2^exponent
  if (size < 0x1p-14f) exponent = -13;  // subnormal: the last place is 2^-24
  const uint32 places = uint32(std::nearbyint(std::ldexp(size, 11 - exponent)));  // 1024..2048, less if subnormal
  return uint16(sign | (((exponent + 13) << 10) + places));
}
DEVICE float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE double fused_multiply_add(double a, double b, double c) { return std::fma(a, b, c); }
DEVICE int64 nearest_integer(double value) { return std::llrint(value); }
DEVICE float square_root(float value) { return std::sqrt(value); }
DEVICE float larger(float a, float b) { return std::fmax(a, b); }
DEVICE float exponential(float value) { return std::exp(value); }
DEVICE float hyperbolic_tangent(float value) { return std::tanh(value); }
DEVICE float error_function(float value) { return std::erf(value); }
DEVICE float logarithm(float value) { return std::log(value); }
DEVICE double logarithm(double value) { return std::log(value); }
DEVICE float reciprocal(float value) { return 1.0f / value; }
DEVICE float power_of_two(float value) {
  const float power = std::exp2(value);
  return power < 0x1p-126f ? 0.0f : power;
}

// Only products that a bfloat16 holds: nothing here needs another.
DEVICE uint32 multiply_pairs(uint32 a, uint32 b, bfloat_t) {
  uint32 pair = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const float product = float_of(a >> shift << 16) * float_of(b >> shift << 16);
    if (std::isnan(product) || (bits_of(product) & 0xffffu)) shim::fail("a product that no bfloat16 holds");
    pair |= bits_of(product) >> 16 << shift;
  }
  return pair;
}

// ---- Matrix fragments: for each lane and place, the row and column that it holds (PTX manual, "mma").
namespace shim {

inline float element(uint16 bits, half_t) { return half_value(bits); }
inline float element(uint16 bits, bfloat_t) { return float_of(uint32(bits) << 16); }

template <int N>
struct Fragments {
  uint16 a[2 * N];  // N registers of two elements, the lower half first
  uint16 b[N];
};

// m16n8k(8 N): a (16, K), b (K, 8), d (16, 8). Register r of a holds rows +8 (r odd) and columns +8 (r >= 2).
template <int A, typename X>
void matrix_product(float (&d)[4], const Fragments<A>& mine, const char* operation, X type) {
  static_assert(sizeof(mine) <= SLOT_BYTES, "a slot holds the fragments");
  constexpr int K = 4 * A;
  need_whole_warp(operation);
  const auto slots = meet(operation, ALL_LANES, &mine, sizeof(mine));
  const int lane = machine.now->current % LANES;
  double sums[4] = {d[0], d[1], d[2], d[3]};
  for (int place = 0; place < 4; ++place) {
    const int row = lane / 4 + place / 2 * 8, column = lane % 4 * 2 + place % 2;
    for (int k = 0; k < K; ++k) {
      const auto left = from_lane<Fragments<A>>(slots, row % 8 * 4 + k % 8 / 2);
      const auto right = from_lane<Fragments<A>>(slots, column * 4 + k % 8 / 2);
      const float a = element(left.a[(k / 8 * 2 + row / 8) * 2 + k % 2], type);
      sums[place] += double(a) * element(right.b[k / 8 * 2 + k % 2], type);
    }
    d[place] = float(sums[place]);
  }
}

template <int MATRICES, bool TRANSPOSED>
void load_matrices(uint32 (&to)[MATRICES], const void* row) {
  need_whole_warp("load_matrices");
  Words4 shown = {};  // the addresses of lanes beyond the matrices' rows are ignored
  const int lane = machine.now->current % LANES;
  if (lane < 8 * MATRICES) memcpy(&shown, aligned(row, 16), 16);
  const auto slots = meet(TRANSPOSED ? "load_matrices, transposed" : "load_matrices", ALL_LANES, &shown, 16);
  for (int matrix = 0; matrix < MATRICES; ++matrix) {
    uint16 pair[2];
    for (int i = 0; i < 2; ++i) {
      const int at_row = TRANSPOSED ? lane % 4 * 2 + i : lane / 4, column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + i;
      memcpy(&pair[i], slots[8 * matrix + at_row] + 2 * column, 2);
    }
    memcpy(&to[matrix], pair, 4);
  }
}

}  // namespace shim

DEVICE uint32 turned_matrix(uint32 pair) {
  shim::need_whole_warp("turned_matrix");
  const auto slots = shim::meet("turned_matrix", ALL_LANES, &pair, sizeof(pair));
  const int lane = thread_index() % WARP;
  uint32 turned = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32 row = shim::from_lane<uint32>(slots, (lane % 4 * 2 + i) * 4 + lane / 8);
    turned |= (row >> lane / 4 % 2 * 16 & 0xffffu) << 16 * i;
  }
  return turned;
}

template <typename X>
void mma_16816(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2], X type) {
  shim::Fragments<4> mine;
  memcpy(mine.a, a, sizeof(a));
  memcpy(mine.b, b, sizeof(b));
  shim::matrix_product(d, mine, "mma_16816", type);
}
template <typename X>
void mma_1688(float (&d)[4], const uint32 (&a)[2], uint32 b, X type) {
  shim::Fragments<2> mine;
  memcpy(mine.a, a, sizeof(a));
  memcpy(mine.b, &b, sizeof(b));
  shim::matrix_product(d, mine, "mma_1688", type);
}

// m8n8k4, four products at once: quad pair p is lanes 4 p..4 p + 3 and those 16 above. a's rows 4..7 and b's columns
// 4..7 are in the upper lanes; each lane of a holds a row's four k, each lane of b a column's.
DEVICE void mma_884(float (&d)[8], const uint32 (&a)[2], const uint32 (&b)[2], half_t type) {
  shim::need_whole_warp("mma_884");
  shim::Fragments<4> mine = {};
  memcpy(mine.a, a, sizeof(a));
  memcpy(mine.b, b, sizeof(b));
  const auto slots = shim::meet("mma_884", ALL_LANES, &mine, sizeof(mine));
  const int lane = thread_index() % WARP, pair = lane % 16 / 4;
  for (int place = 0; place < 8; ++place) {
    const int row = (lane & 1) + (place & 2) + (lane < 16 ? 0 : 4), column = (place & 4) + (lane & 2) + (place & 1);
    const auto left = shim::from_lane<shim::Fragments<4>>(slots, 4 * pair + row % 4 + row / 4 * 16);
    const auto right = shim::from_lane<shim::Fragments<4>>(slots, 4 * pair + column % 4 + column / 4 * 16);
    double sum = d[place];
    for (int k = 0; k < 4; ++k) sum += double(shim::element(left.a[k], type)) * shim::element(right.b[k], type);
    d[place] = float(sum);
  }
}

template <bool TRANSPOSED = false>
void load_matrices(uint32 (&to)[4], const void* row, int beyond = 0) {
  shim::load_matrices<4, TRANSPOSED>(to, static_cast<const unsigned char*>(row) + beyond);
}
template <bool TRANSPOSED = false>
void load_matrices(uint32 (&to)[2], const void* row) {
  shim::load_matrices<2, TRANSPOSED>(to, row);
}

// A copy happens as late as it may, and until then its target is poison: a missing wait reads that, and a source that
// is overwritten too early is copied wrong. In the reverse schedule it happens at once: then what is written over its
// target too early stays there.
template <int BYTES>
void copy_async_few(void* to, const void* from, int valid) {
  memset(shim::aligned(to, BYTES), shim::POISON, BYTES);
  const shim::Copy copy = {to, shim::aligned(from, BYTES), valid, BYTES};
  if (shim::machine.launch->schedule == shim::REVERSE) return shim::finish({copy});
  shim::current_thread().copies.back().push_back(copy);
}
DEVICE void copy_async(void* to, const void* from, int valid = 16) { copy_async_few<16>(to, from, valid); }
DEVICE void copy_async_once(void* to, const void* from, int valid = 16) { copy_async(to, from, valid); }
DEVICE void commit_copies() { shim::current_thread().copies.emplace_back(); }
template <int GROUPS>
void wait_copies() {
  shim::finish_copies(GROUPS);
}

// ---- Products of a warpgroup. A product happens when it is started in half of the schedules, and in the others as late
// as it may: then a matrix that is overwritten too early, or a sum that is read without waiting, is wrong.
DEVICE uint64 matrix_at(const void* rows, int k) {
  if (reinterpret_cast<uintptr_t>(rows) % 1024 != 0) shim::fail("a matrix at %p, which is not on 1024 bytes", rows);
  return reinterpret_cast<uintptr_t>(rows) + k * 2;
}

namespace shim {

// Element `k` of row `row`, where a swizzle by 128 bytes has put it.
template <typename X>
float element_of_matrix(uint64 matrix, int row, int k, X type) {
  const uintptr_t plain = matrix + row * 128 + k * 2;
  uint16 bits;
  memcpy(&bits, reinterpret_cast<const void*>(plain ^ (plain >> 7 & 7) << 4), 2);
  return element(bits, type);
}

template <int N, typename X>
void warpgroup_product(float* d, uint64 a, uint64 b, X type) {
  const int lane = machine.now->current % LANES, warp = machine.now->current / LANES % 4;
  float left[2][16], right[16];
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < 16; ++k) left[half][k] = element_of_matrix(a, warp * 16 + lane / 4 + half * 8, k, type);
  }
  for (int column = 0; column < 2 * N; ++column) {
    if (column % 8 / 2 != lane % 4) continue;
    for (int k = 0; k < 16; ++k) right[k] = element_of_matrix(b, column, k, type);
    for (int half = 0; half < 2; ++half) {
      float& place = d[column / 8 * 4 + half * 2 + column % 2];
      double sum = place;
      for (int k = 0; k < 16; ++k) sum += double(left[half][k]) * right[k];
      place = float(sum);
    }
  }
}

}  // namespace shim

template <int N, typename X>
void wgmma_16(float (&d)[N], uint64 a, uint64 b, X type) {
  float* to = d;
  const auto product = [to, a, b, type] { shim::warpgroup_product<N>(to, a, b, type); };
  if (shim::machine.launch->schedule % 2 == 0) return product();
  shim::current_thread().products.back().push_back(product);
}
DEVICE void wgmma_begin() {}
DEVICE void wgmma_commit() { shim::current_thread().products.emplace_back(); }
template <int GROUPS>
void wgmma_wait() {
  auto& groups = shim::current_thread().products;
  while (groups.size() - 1 > GROUPS) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  sync_warp();  // its lanes wait together
}
template <int N>
void wgmma_border(float (&)[N]) {}

// ---- Arrivals and boxes. What `map` points to is HostMap (tests/kernels/device.py).
namespace shim {

struct HostMap {
  const unsigned char* matrix;
  int64_t rows, columns;
  int32_t box_rows;
};

inline void copy_box(unsigned char* to, const HostMap& map, int column, int row) {
  for (int i = 0; i < map.box_rows; ++i) {
    for (int piece = 0; piece < 8; ++piece) {
      unsigned char* at = to + i * 128 + (piece ^ i % 8) * 16;
      memset(at, 0, 16);
      for (int element = 0; element < 8; ++element) {
        const int64_t from = column + piece * 8 + element;
        if (row + i >= map.rows || from >= map.columns) continue;
        memcpy(at + element * 2, map.matrix + ((row + i) * map.columns + from) * 2, 2);
      }
    }
  }
}

}  // namespace shim

DEVICE void begin_arrivals(uint64* word, int count) {
  shim::Arrivals& arrivals = shim::machine.now->arrivals[word];
  arrivals = {};
  arrivals.count = arrivals.missing = count;
}
DEVICE void show_arrivals() {}
DEVICE void arrive_at(uint64* word) { shim::arrive_once(word, 0); }
DEVICE void arrive_expecting(uint64* word, int bytes) { shim::arrive_once(word, bytes); }
DEVICE void wait_arrivals(uint64* word, uint32 parity) { shim::wait_arrivals(word, parity); }
DEVICE void copy_box(void* to, const void* map, int column, int row, uint64* word) {
  const shim::HostMap box = *static_cast<const shim::HostMap*>(shim::aligned(map, 64));
  if (reinterpret_cast<uintptr_t>(to) % 1024 != 0) shim::fail("a box at %p, which is not on 1024 bytes", to);
  unsigned char* bytes = static_cast<unsigned char*>(to);
  memset(bytes, shim::POISON, size_t(box.box_rows) * 128);
  const auto copy = [=] { shim::copy_box(bytes, box, column, row); };
  shim::machine.now->boxes.push_back({word, int64_t(box.box_rows) * 128, copy});
  shim::arrivals_at(word);
}

DEVICE void copy_bytes(void* to, const void* from, int bytes, uint64* word) {
  if (bytes <= 0 || bytes % 16 != 0) shim::fail("a copy of %d bytes", bytes);
  const void* source = shim::aligned(from, 16);
  memset(shim::aligned(to, 16), shim::POISON, size_t(bytes));
  shim::machine.now->boxes.push_back({word, bytes, [=] { memcpy(to, source, size_t(bytes)); }});
  shim::arrivals_at(word);
}

enum : bool { GRIDS_OVERLAP = true };
DEVICE void wait_for_previous_grid() { shim::wait_for_previous_grid(); }
DEVICE void begin_grid() { wait_for_previous_grid(); }
DEVICE void start_next_grid() {}
