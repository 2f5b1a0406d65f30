// linear: out = X(x W^T + bias) for up to 64 tokens. linear_X_m8 takes up to 8 of them, and so on; none takes more.
//
// x (tokens, depth) X; weight (rows, depth) X; bias (rows) X, or null; out (tokens, rows) X; workspace f32 and counters
//   u32 are touched only where S > 1.
// launch: grid (ceil(rows / (16 R)), S), block 256; T = 8, 16, 32 or 64 as the entry's name says.
//   R is 1 or 2, as the launcher likes: 2 where there are blocks enough, since a block reads all of x. Bits are the
//   same. S, the parts of the depth, is part of the result's bits, so it must follow from rows and depth alone. Where
//   16-row
//     tiles are too few for the GPU: S = max(1, min(8, ceil(256 / ceil(rows / 16)), floor(depth / 2048))).
//   dynamic shared memory, t80: 4096 P min(6, floor(24 / P)), P = 2 R + T / 8: up to 96 KB, so opted in;
//     t70: 64 R T bytes.
//   workspace: 64 R T S ceil(rows / (16 R)) bytes; counters: ceil(rows / (16 R)) words, 0 before the first launch and
//   after
//     every one. Launches that may overlap must not share them.
// bound: 2 rows depth bytes.
// assumes: 1 <= tokens <= T; out overlaps nothing; x, weight and workspace start on 16 bytes. The fast path is for a
// depth
//   that is a multiple of 8; others are read element by element.
// tiers: t70 t80
#include "linear.cuh"

template <int EIGHTS, typename X>
DEVICE void linear_rounded(const X* x, const X* weight, const X* bias, X* out, int tokens, int rows, int depth,
                           float* workspace, uint32* counters) {
  const Plain<Rounded<X>> to = {{bias}, out, rows};
  linear<EIGHTS>(Operands<X>{x, weight, tokens, depth}, Meeting{workspace, counters}, to);
}

KERNEL(256)
void linear_f16_m8(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens, int rows,
                   int depth, float* workspace, uint32* counters) {
  linear_rounded<1>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_f16_m16(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens, int rows,
                    int depth, float* workspace, uint32* counters) {
  linear_rounded<2>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_f16_m32(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens, int rows,
                    int depth, float* workspace, uint32* counters) {
  linear_rounded<4>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_f16_m64(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens, int rows,
                    int depth, float* workspace, uint32* counters) {
  linear_rounded<8>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_bf16_m8(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                    int rows, int depth, float* workspace, uint32* counters) {
  linear_rounded<1>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_bf16_m16(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                     int rows, int depth, float* workspace, uint32* counters) {
  linear_rounded<2>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_bf16_m32(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                     int rows, int depth, float* workspace, uint32* counters) {
  linear_rounded<4>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_bf16_m64(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                     int rows, int depth, float* workspace, uint32* counters) {
  linear_rounded<8>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}
