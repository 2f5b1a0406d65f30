// gemm: out = X(x W^T + bias) for many tokens. gemm_X_tile64 and gemm_X_tile128 give the same bits.
//
// x (tokens, depth) X; weight (rows, depth) X; bias (rows) X or null; out (tokens, rows) X.
// launch: grid (ceil(tokens / S), ceil(rows / S)), block 128; S is 64 or 128, as the entry's name says: 128 where that
//   makes blocks enough for the GPU. Dynamic shared bytes: t80 49152, t70 none.
// bound: 2 tokens rows depth FLOPs.
// assumes: out overlaps nothing; x, weight and out start on 16 bytes. Any depth works, but one that is no multiple of 8
//   is read element by element.
// tiers: t70 t80
#include "gemm.cuh"

template <int SIDE, typename X>
DEVICE void gemm_rounded(const X* x, const X* weight, const X* bias, X* out, int tokens, int rows, int depth) {
  const Plain<Rounded<X>> to = {{bias}, out, rows};
  gemm<SIDE>(Operands<X>{x, weight, tokens, depth}, to);
}

KERNEL(128)
void gemm_f16_tile64(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens, int rows,
                     int depth) {
  gemm_rounded<64>(x, weight, bias, out, tokens, rows, depth);
}

KERNEL(128)
void gemm_f16_tile128(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens, int rows,
                      int depth) {
  gemm_rounded<128>(x, weight, bias, out, tokens, rows, depth);
}

KERNEL(128)
void gemm_bf16_tile64(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                      int rows, int depth) {
  gemm_rounded<64>(x, weight, bias, out, tokens, rows, depth);
}

KERNEL(128)
void gemm_bf16_tile128(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                       int rows, int depth) {
  gemm_rounded<128>(x, weight, bias, out, tokens, rows, depth);
}
