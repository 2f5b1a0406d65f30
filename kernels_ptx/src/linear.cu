// linear: out = X(x W^T + bias) for up to 64 tokens: linear_X_m8 takes up to 8, and so on.
//
// x (tokens, depth) X; weight (rows, depth) X; bias (rows) X or null; out (tokens, rows) X; workspace f32;
//   counters u32.
// launch: grid (B, S), B = ceil(rows / (16 R)), block 256. T is 8, 16, 32 or 64, as the entry's name says.
//   R, the 16-row tiles of a block, is 1 or 2 and changes no bit. 2 halves how often x is read; 1 gives more blocks.
//   S, the parts of the depth, does change bits, so it must follow from rows and depth alone:
//   S = max(1, min(8, ceil(96 / ceil(rows / 16)), floor(depth / 2048))).
//   dynamic shared bytes: t80 4096 P min(6, floor(24 / P)) with P = 2 R + T / 8, at most 98304, opted in; t70 64 R T. More
//   keeps blocks apart: a grid of no more blocks than there are multiprocessors then has one on each.
//   workspace: 64 R T S B bytes; counters: B words, 0 before the first launch and again after every one. Neither is
//   touched where S is 1. Launches that may run at the same time must not share them.
//   The m64 entries allow blocks of 384 only so that ptxas stops at 168 registers; it then takes 128 or fewer, so that
//   two blocks of 256 fit on an SM. A bound of 512 makes it spill on sm_120.
// bound: 2 rows depth bytes.
// assumes: 1 <= tokens <= T; out overlaps nothing; x, weight and workspace start on 16 bytes. Any depth works, but one
//   that is no multiple of 8 is read element by element.
// tiers: t70 t80 t90
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

KERNEL(384)
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

KERNEL(384)
void linear_bf16_m64(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                     int rows, int depth, float* workspace, uint32* counters) {
  linear_rounded<8>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}
