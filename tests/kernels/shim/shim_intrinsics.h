// What intrinsics.cuh has from CUDA, on the machine of fibers: the same names, with the meaning that the PTX manual
// gives. Included by intrinsics.cuh, after its types.
#pragma once

#include "seen.h"

#define KERNEL(threads) extern "C"
#define DEVICE inline
#define UNROLL
#define NO_UNROLL
#define SHARED_ARRAY(type, name, count) \
  alignas(16) static type name[count];  \
  shim::poison_once(name, sizeof(type) * (count))
#define DYNAMIC_SHARED(name) unsigned char* name = shim::seen.shared
DEVICE unsigned char* aligned_shared(unsigned char* memory, uint32 bytes) {
  return memory + (-reinterpret_cast<uintptr_t>(memory) & (bytes - 1));
}

DEVICE int thread_index() { return shim::seen.thread; }
DEVICE int thread_count() { return shim::seen.threads; }
DEVICE int block_x() { return shim::seen.block[0]; }
DEVICE int block_y() { return shim::seen.block[1]; }
DEVICE int block_z() { return shim::seen.block[2]; }
DEVICE int grid_x() { return shim::seen.grid[0]; }
DEVICE int grid_y() { return shim::seen.grid[1]; }
DEVICE int grid_z() { return shim::seen.grid[2]; }

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

template <typename T>
T load_aligned(const void* address) {
  T value;
  memcpy(&value, shim::aligned(address, sizeof(T)), sizeof(T));
  return value;
}
template <typename T>
void store_aligned(void* address, T value) {
  memcpy(const_cast<void*>(shim::aligned(address, sizeof(T))), &value, sizeof(T));
}
DEVICE Words4 load_words4(const void* address) { return load_aligned<Words4>(address); }
DEVICE void store_words4(void* address, Words4 value) { store_aligned(address, value); }
DEVICE Words2 load_words2(const void* address) { return load_aligned<Words2>(address); }
DEVICE void store_words2(void* address, Words2 value) { store_aligned(address, value); }
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
DEVICE void prefetch(const void*) {}
DEVICE void fence() {}
DEVICE void wait_until(const uint32* address, uint32 least) {
  if (*address < least) shim::wait_until(address, least);
}

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
using shim::half_bits;
using shim::half_value;
DEVICE float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE double fused_multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
DEVICE int64 nearest_integer(double value) { return __builtin_llrint(value); }
DEVICE float square_root(float value) { return __builtin_sqrtf(value); }
DEVICE float larger(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE float exponential(float value) { return __builtin_expf(value); }
DEVICE float hyperbolic_tangent(float value) { return __builtin_tanhf(value); }
DEVICE float error_function(float value) { return __builtin_erff(value); }
DEVICE float logarithm(float value) { return __builtin_logf(value); }
DEVICE double logarithm(double value) { return __builtin_log(value); }
DEVICE float reciprocal(float value) { return 1.0f / value; }
DEVICE float power_of_two(float value) {
  const float power = __builtin_exp2f(value);
  return power < 0x1p-126f ? 0.0f : power;
}

// Only products that a bfloat16 holds: nothing here needs another.
DEVICE uint32 multiply_pairs(uint32 a, uint32 b, bfloat_t) {
  uint32 pair = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const float product = float_of(a >> shift << 16) * float_of(b >> shift << 16);
    if (product != product || (bits_of(product) & 0xffffu)) shim::fail("a product that no bfloat16 holds");
    pair |= bits_of(product) >> 16 << shift;
  }
  return pair;
}

// ---- Matrix fragments and products: products.h
namespace shim {
constexpr bool is_brain(half_t) { return false; }
constexpr bool is_brain(bfloat_t) { return true; }
}  // namespace shim

DEVICE uint32 turned_matrix(uint32 pair) { return shim::turned_matrix(pair); }

template <typename X>
void mma_16816(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2], X type) {
  shim::matrix_product(d, a, b, 4, shim::is_brain(type));
}
template <typename X>
void mma_1688(float (&d)[4], const uint32 (&a)[2], uint32 b, X type) {
  shim::matrix_product(d, a, &b, 2, shim::is_brain(type));
}
DEVICE void mma_884(float (&d)[8], const uint32 (&a)[2], const uint32 (&b)[2], half_t) {
  shim::products_8x8x4(d, a, b);
}

template <bool TRANSPOSED = false>
void load_matrices(uint32 (&to)[4], const void* row, int beyond = 0) {
  shim::load_matrices(to, 4, TRANSPOSED, static_cast<const unsigned char*>(row) + beyond);
}
template <bool TRANSPOSED = false>
void load_matrices(uint32 (&to)[2], const void* row) {
  shim::load_matrices(to, 2, TRANSPOSED, row);
}

template <int BYTES>
void copy_async_few(void* to, const void* from, int valid) {
  shim::copy_async(to, from, valid, BYTES);
}
DEVICE void copy_async(void* to, const void* from, int valid = 16) { shim::copy_async(to, from, valid, 16); }
DEVICE void copy_async_once(void* to, const void* from, int valid = 16) { shim::copy_async(to, from, valid, 16); }
DEVICE void commit_copies() { shim::commit_copies(); }
template <int GROUPS>
void wait_copies() {
  shim::wait_copies(GROUPS);
}

DEVICE uint64 matrix_at(const void* rows, int k) {
  if (reinterpret_cast<uintptr_t>(rows) % 1024 != 0) shim::fail("a matrix at %p, which is not on 1024 bytes", rows);
  return reinterpret_cast<uintptr_t>(rows) + k * 2;
}
template <int N, typename X>
void wgmma_16(float (&d)[N], uint64 a, uint64 b, X type) {
  shim::warpgroup_product(d, N, a, b, shim::is_brain(type));
}
DEVICE void wgmma_begin() {}
DEVICE void wgmma_commit() { shim::commit_products(); }
template <int GROUPS>
void wgmma_wait() {
  shim::wait_products(GROUPS);
  sync_warp();  // its lanes wait together
}
template <int N>
void wgmma_border(float (&)[N]) {}

// ---- Arrivals and boxes. What `map` points to is shim::HostMap.
DEVICE void begin_arrivals(uint64* word, int count) { shim::begin_arrivals(word, count); }
DEVICE void show_arrivals() {}
DEVICE void arrive_at(uint64* word) { shim::arrive_once(word, 0); }
DEVICE void arrive_expecting(uint64* word, int bytes) { shim::arrive_once(word, bytes); }
DEVICE void wait_arrivals(uint64* word, uint32 parity) { shim::wait_arrivals(word, parity); }
DEVICE void copy_box(void* to, const void* map, int column, int row, uint64* word) {
  shim::copy_box(to, map, column, row, word);
}
DEVICE void copy_bytes(void* to, const void* from, int bytes, uint64* word) { shim::copy_bytes(to, from, bytes, word); }

enum : bool { GRIDS_OVERLAP = true };
DEVICE void wait_for_previous_grid() { shim::wait_for_previous_grid(); }
DEVICE void begin_grid() { wait_for_previous_grid(); }
DEVICE void start_next_grid() {}
