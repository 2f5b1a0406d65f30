// The names that kernels are written in: with intrinsics_t90.cuh the only file with inline assembly and CUDA built-ins.
//
// A host compiler takes the same names from shim_intrinsics.h, which runs every CUDA thread as a fiber. Blocks are
// one-dimensional. TIER (70, 75, 80, 89, 90) is set by the build; a name exists from the tier that its comment gives.
// The build turns floating-point contraction off: where a fused multiply-add is wanted, it is written.
#pragma once

using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

struct half_t {  // IEEE binary16, as stored
  uint16 bits;
};
struct bfloat_t {  // the upper half of a binary32, as stored
  uint16 bits;
};
struct e4m3_t {  // sign, 4 bits of exponent, 3 of fraction, as stored; no infinity
  unsigned char bits;
};
struct alignas(8) Words2 {
  uint32 word[2];
};
struct alignas(16) Words4 {
  uint32 word[4];
};

// Enumerators, because a constexpr variable would be emitted into every PTX.
enum : int { WARP = 32 };
enum : uint32 { ALL_LANES = 0xffffffffu };

#ifndef __CUDACC__
#include "shim_intrinsics.h"
#else

// An entry for blocks of at most `threads`. The 1 stops ptxas from spilling registers to fit more blocks on an SM.
#define KERNEL(threads) extern "C" __global__ __launch_bounds__(threads, 1)
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")  // loops that mostly run once: left alone, they become four times the PTX
// Shared memory of a fixed size, aligned for vectors, and what the launch asks for beyond it.
#define SHARED_ARRAY(type, name, count) __shared__ __align__(16) type name[count]
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

// The first multiple of `bytes`, a power of two, in shared memory.
DEVICE unsigned char* aligned_shared(unsigned char* memory, uint32 bytes) {
  return memory + (-uint32(__cvta_generic_to_shared(memory)) & (bytes - 1));
}

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int thread_count() { return blockDim.x; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE int block_z() { return blockIdx.z; }
DEVICE int grid_x() { return gridDim.x; }
DEVICE int grid_y() { return gridDim.y; }
DEVICE int grid_z() { return gridDim.z; }

// ---- Barriers. `threads` of a numbered barrier (1..15) counts those that wait and those that only arrive.
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp(uint32 lanes = ALL_LANES) { __syncwarp(lanes); }
DEVICE void barrier_wait(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- Between the lanes of a warp; all of `lanes` must take part. T has 32 or 64 bits.
template <typename T>
DEVICE T shuffle(T value, int source, uint32 lanes = ALL_LANES) {
  return __shfl_sync(lanes, value, source);
}
template <typename T>
DEVICE T shuffle_xor(T value, int lane_bits, uint32 lanes = ALL_LANES) {
  return __shfl_xor_sync(lanes, value, lane_bits);
}
DEVICE uint32 lanes_where(bool holds, uint32 lanes = ALL_LANES) { return __ballot_sync(lanes, holds); }

// ---- Memory. Vector addresses are multiples of the vector's bytes.
DEVICE Words4 load_words4(const void* address) {
  const uint4 got = *static_cast<const uint4*>(address);
  return {{got.x, got.y, got.z, got.w}};
}
DEVICE void store_words4(void* address, Words4 value) {
  *static_cast<uint4*>(address) = {value.word[0], value.word[1], value.word[2], value.word[3]};
}
DEVICE Words2 load_words2(const void* address) {
  const uint2 got = *static_cast<const uint2*>(address);
  return {{got.x, got.y}};
}
DEVICE void store_words2(void* address, Words2 value) {
  *static_cast<uint2*>(address) = {value.word[0], value.word[1]};
}
// Of global memory that is read once: it takes no room in L1. Stays behind a wait for the grid that wrote it.
DEVICE Words4 load_words4_once(const void* address) {
  Words4 got;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(got.word[0]), "=r"(got.word[1]), "=r"(got.word[2]), "=r"(got.word[3])
               : "l"(__cvta_generic_to_global(address)));
  return got;
}
DEVICE Words2 load_words2_once(const void* address) {
  Words2 got;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(got.word[0]), "=r"(got.word[1])
               : "l"(__cvta_generic_to_global(address)));
  return got;
}

// ---- Between blocks: what was written before a release is seen after the acquire that reads it.
DEVICE uint32 load_acquire(const uint32* address) {
  uint32 got;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(got) : "l"(__cvta_generic_to_global(address)) : "memory");
  return got;
}
DEVICE void store_release(uint32* address, uint32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}
DEVICE void fence() { __threadfence(); }
// Fetches what is there into this multiprocessor's cache, if it can.
DEVICE void prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(address)));
}
// Until other blocks have brought the word to `least` or more, as by an acquire.
DEVICE void wait_until(const uint32* address, uint32 least) {
  while (load_acquire(address) < least) {
  }
}

// T is int, uint32 or uint64: integers only, since the order of float atomics is not fixed. Each gives the old value.
template <typename T>
DEVICE T atomic_add(T* address, T value) {
  return atomicAdd(address, value);
}
template <typename T>
DEVICE T atomic_max(T* address, T value) {
  return atomicMax(address, value);
}
template <typename T>
DEVICE T atomic_compare_swap(T* address, T expected, T value) {
  return atomicCAS(address, expected, value);
}

// ---- Numbers.
DEVICE uint32 bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(uint32 bits) { return __uint_as_float(bits); }
// Four bytes of the eight of `low` and `high`, 0 the lowest of `low`: each half-byte of `selector` names one.
DEVICE uint32 chosen_bytes(uint32 low, uint32 high, uint32 selector) { return __byte_perm(low, high, selector); }
DEVICE float half_value(uint16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
DEVICE uint16 half_bits(float value) {  // to nearest even
  uint16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#if TIER >= 80
#define NATIVE_BFLOAT
DEVICE uint16 bfloat_bits(float value) {  // to nearest even; NaN becomes 0x7fff
  uint16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#define NATIVE_PAIRS  // of elements, the first in the lower half of a register
DEVICE uint32 pair_bits(float first, float second, half_t) {
  uint32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
DEVICE uint32 pair_bits(float first, float second, bfloat_t) {
  uint32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
DEVICE uint32 multiply_pairs(uint32 a, uint32 b, bfloat_t) {  // to nearest even, subnormals as they are
  uint32 product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}
#endif
#if TIER >= 89
#define NATIVE_E4M3  // to nearest even, at most 448; NaN becomes 0x7f. The first in the lower byte
DEVICE uint32 e4m3_pair(float first, float second) {
  uint16 bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
  return bits;
}
#endif
DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE double fused_multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }
DEVICE int64 nearest_integer(double value) { return __double2ll_rn(value); }  // ties to even
DEVICE float square_root(float value) { return __fsqrt_rn(value); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }  // the number, where one is NaN
DEVICE float reciprocal(float value) {                         // at most 1 ulp off
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DEVICE float exponential(float value) { return expf(value); }          // at most 2 ulp off
DEVICE float hyperbolic_tangent(float value) { return tanhf(value); }  // at most 2 ulp off
DEVICE float error_function(float value) { return erff(value); }       // at most 2 ulp off
DEVICE float logarithm(float value) { return logf(value); }            // natural, at most 1 ulp off
DEVICE double logarithm(double value) { return log(value); }           // natural, at most 1 ulp off
DEVICE float power_of_two(float value) {                               // 2 ulp; results below 2^-126 become 0
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}

// ---- Matrix products of a warp, d += a b, in the fragment layouts of the PTX manual ("Matrix Fragments for mma").
#define MMA_16816(type, name)                                                            \
  DEVICE void mma_16816(float (&d)[4], const uint32(&a)[4], const uint32(&b)[2], type) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                  \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"  \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));    \
  }
#define MMA_1688(type, name)                                                 \
  DEVICE void mma_1688(float (&d)[4], const uint32(&a)[2], uint32 b, type) { \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." name "." name       \
                 ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"  \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])            \
                 : "r"(a[0]), "r"(a[1]), "r"(b));                            \
  }

// Four 8x8x4 products, one for each quad pair; from t80 on an emulation, and slow.
DEVICE void mma_884(float (&d)[8], const uint32 (&a)[2], const uint32 (&b)[2], half_t) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
      "{%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
}

#if TIER >= 75
MMA_1688(half_t, "f16")

// N 8x8 matrices of 16-bit elements from shared memory; lane 8 i + r gives the 16-byte row r of matrix i, or the bytes
// `beyond` it: a constant there takes no register.
template <bool TRANSPOSED = false>
DEVICE void load_matrices(uint32 (&to)[4], const void* row, int beyond = 0) {
  const uint32 address = uint32(__cvta_generic_to_shared(row)) + beyond;
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
}
template <bool TRANSPOSED = false>
DEVICE void load_matrices(uint32 (&to)[2], const void* row) {
  const uint32 address = __cvta_generic_to_shared(row);
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
  }
}
#endif

#if TIER >= 75
// An 8x8 matrix of 16-bit elements, of which lane 4 g + t has 2 t and 2 t + 1 of row g, turned about its diagonal.
DEVICE uint32 turned_matrix(uint32 pair) {
  uint32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}
#endif

#if TIER >= 80
MMA_16816(half_t, "f16")
MMA_16816(bfloat_t, "bf16")
MMA_1688(bfloat_t, "bf16")

// 16 bytes from global to shared memory, the first `valid` of them read and the others 0, without waiting. They are
// there, for this thread, once wait_copies<N>() has returned and at most N younger groups were committed.
DEVICE void copy_async(void* to, const void* from, int valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from)), "r"(valid)
               : "memory");
}
// The same from memory that is read once and from front to back: L2 fetches whole 128-byte lines ahead.
DEVICE void copy_async_once(void* to, const void* from, int valid = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(uint32(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from)), "r"(valid)
               : "memory");
}
// The same of 4 or 8 bytes.
template <int BYTES>
DEVICE void copy_async_few(void* to, const void* from, int valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(uint32(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from)), "n"(BYTES), "r"(valid)
               : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS>
DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
#endif

// ---- Programmatic dependent launch, t90; a lower tier waits for the whole grid before it, so these do nothing there.
enum : bool { GRIDS_OVERLAP = TIER >= 90 };
DEVICE void wait_for_previous_grid() {
#if TIER >= 90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void start_next_grid() {
#if TIER >= 90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// What every kernel of a decode step begins with. Whatever comes before it may touch nothing that another grid writes.
DEVICE void begin_grid() {
  start_next_grid();
  wait_for_previous_grid();
}
#endif  // __CUDACC__

DEVICE int lane_index() { return thread_index() % WARP; }
DEVICE int warp_index() { return thread_index() / WARP; }
DEVICE int warp_count() { return thread_count() / WARP; }
