// More of intrinsics.cuh, for t90 and t90a: products of warpgroups and the copy engine. A host compiler takes all of
// them from shim_intrinsics.h.
#pragma once

#include "intrinsics.cuh"

#ifdef __CUDACC__
// ---- Matrix products of a warpgroup, four neighbouring warps, t90a: d += a b^T for 64 rows of a and 32, 64, 128, 144 or 256 of b, each with
// 16 elements of the depth in shared memory. Rows are 128 bytes, eight of them on a multiple of 1024; the 16-byte piece p
// of row r lies at p ^ r % 8.
// Where rows begin, `k` elements (a multiple of 16) into their 128 bytes.
DEVICE uint64 matrix_at(const void* rows, int k) {
  const uint64 address = uint32(__cvta_generic_to_shared(rows)) + k * 2;
  return (address & 0x3ffffu) >> 4 | 1ull << 16 | 64ull << 32 |
         1ull << 62;  // eight rows in 1024 bytes, swizzled by 128
}

// d: of rows 16 w + g and 8 on (w the warp of four, lane 4 g + t), columns 8 j + 2 t and 2 t + 1, at 4 j..4 j + 3. The sums
// are those of mma_16816 to the bit, where both have the same sets of sixteen (measured: benchmarks/LOG.md).
#define WGMMA_FOUR(i) "+f"(d[4 * (i)]), "+f"(d[4 * (i) + 1]), "+f"(d[4 * (i) + 2]), "+f"(d[4 * (i) + 3])
#define WGMMA_32(i)                                                                               \
  WGMMA_FOUR(8 * (i)), WGMMA_FOUR(8 * (i) + 1), WGMMA_FOUR(8 * (i) + 2), WGMMA_FOUR(8 * (i) + 3), \
      WGMMA_FOUR(8 * (i) + 4), WGMMA_FOUR(8 * (i) + 5), WGMMA_FOUR(8 * (i) + 6), WGMMA_FOUR(8 * (i) + 7)
#define WGMMA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_64                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_128                                                                          \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_NAMES_72 "%64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA(type, name)                                                                                             \
  DEVICE void wgmma_16(float (&d)[16], uint64 a, uint64 b, type) {                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." name "." name " {" WGMMA_NAMES_16                      \
                 "}, %16, %17, 1, 1, 1, 0, 0;"                                                                        \
                 : WGMMA_FOUR(0), WGMMA_FOUR(1), WGMMA_FOUR(2), WGMMA_FOUR(3)                                         \
                 : "l"(a), "l"(b));                                                                                   \
  }                                                                                                                   \
  DEVICE void wgmma_16(float (&d)[32], uint64 a, uint64 b, type) {                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {" WGMMA_NAMES_32                      \
                 "}, %32, %33, 1, 1, 1, 0, 0;"                                                                        \
                 : WGMMA_32(0)                                                                                        \
                 : "l"(a), "l"(b));                                                                                   \
  }                                                                                                                   \
  DEVICE void wgmma_16(float (&d)[64], uint64 a, uint64 b, type) {                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " {" WGMMA_NAMES_32 ", " WGMMA_NAMES_64 \
                 "}, %64, %65, 1, 1, 1, 0, 0;"                                                                        \
                 : WGMMA_32(0), WGMMA_32(1)                                                                           \
                 : "l"(a), "l"(b));                                                                                   \
  }                                                                                                                   \
  DEVICE void wgmma_16(float (&d)[72], uint64 a, uint64 b, type) {                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n144k16.f32." name "." name " {" WGMMA_NAMES_32 ", " WGMMA_NAMES_64 \
                 ", " WGMMA_NAMES_72 "}, %72, %73, 1, 1, 1, 0, 0;"                                                    \
                 : WGMMA_32(0), WGMMA_32(1), WGMMA_FOUR(16), WGMMA_FOUR(17)                                           \
                 : "l"(a), "l"(b));                                                                                   \
  }                                                                                                                   \
  DEVICE void wgmma_16(float (&d)[128], uint64 a, uint64 b, type) {                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." name "." name " {" WGMMA_NAMES_32 ", " WGMMA_NAMES_64 \
                 ", " WGMMA_NAMES_128 "}, %128, %129, 1, 1, 1, 0, 0;"                                                 \
                 : WGMMA_32(0), WGMMA_32(1), WGMMA_32(2), WGMMA_32(3)                                                 \
                 : "l"(a), "l"(b));                                                                                   \
  }
WGMMA(half_t, "f16")
WGMMA(bfloat_t, "bf16")

// Before the first product, and before registers of d that others wrote are added to.
DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// At most `GROUPS` younger groups are unfinished: those before have read their matrices and written d.
template <int GROUPS>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// Other instructions on d stay on their side of this: it goes before the first product, and behind the last wait.
template <int N>
DEVICE void wgmma_border(float (&d)[N]) {
  UNROLL
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// ---- Arrivals, t90: a word of shared memory on which threads wait until `count` others have come, and all bytes that they
// expect. Its first phase has parity 0; when all has arrived the next one begins, with the other parity.
DEVICE uint32 shared_address(const void* address) { return uint32(__cvta_generic_to_shared(address)); }
DEVICE void begin_arrivals(uint64* word, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(word)), "r"(count) : "memory");
}
// Behind begin_arrivals and before the block meets: so that the copy engine sees the words.
DEVICE void show_arrivals() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive_at(uint64* word) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(word)) : "memory");
}
DEVICE void arrive_expecting(uint64* word, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(word)), "r"(bytes)
               : "memory");
}
DEVICE void wait_arrivals(uint64* word, uint32 parity) {
  uint32 done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred all;\nmbarrier.try_wait.parity.shared::cta.b64 all, [%1], %2;\nselp.u32 %0, 1, 0, all;\n}"
        : "=r"(done)
        : "r"(shared_address(word)), "r"(parity)
        : "memory");
  }
}

// A box of a matrix of 16-bit elements by the copy engine: 64 columns of some rows, both from `column` and `row` on, zeros
// where the matrix ends; laid out as products of a warpgroup want it, on 1024 bytes. `map` describes the matrix and the
// box (Device.tensor_map). Its bytes arrive at `word`.
DEVICE void copy_box(void* to, const void* map, int column, int row, uint64* word) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(word))
      : "memory");
}

// Bytes from global to shared memory by the copy engine, both on 16 bytes and a multiple of 16. They arrive at `word`.
DEVICE void copy_bytes(void* to, const void* from, int bytes, uint64* word) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(word))
               : "memory");
}
#endif  // __CUDACC__
