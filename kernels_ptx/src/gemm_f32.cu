// gemm_f32: out = x W^T + bias in float for many tokens: logits.
//
// out (tokens, rows) f32; the other arguments, launch, bound and assumptions as in gemm.cu.
// tiers: t70 t80
#include "gemm.cuh"

template <int SIDE, typename X>
DEVICE void gemm_unrounded(const X* x, const X* weight, const X* bias, float* out, int tokens, int rows, int depth) {
  const Plain<Unrounded<X>> to = {{bias}, out, rows};
  gemm<SIDE>(Operands<X>{x, weight, tokens, depth}, to);
}

KERNEL(128)
void gemm_f32_f16_tile64(const half_t* x, const half_t* weight, const half_t* bias, float* out, int tokens, int rows,
                         int depth) {
  gemm_unrounded<64>(x, weight, bias, out, tokens, rows, depth);
}

KERNEL(128)
void gemm_f32_f16_tile128(const half_t* x, const half_t* weight, const half_t* bias, float* out, int tokens, int rows,
                          int depth) {
  gemm_unrounded<128>(x, weight, bias, out, tokens, rows, depth);
}

KERNEL(128)
void gemm_f32_bf16_tile64(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, float* out, int tokens,
                          int rows, int depth) {
  gemm_unrounded<64>(x, weight, bias, out, tokens, rows, depth);
}

KERNEL(128)
void gemm_f32_bf16_tile128(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, float* out, int tokens,
                           int rows, int depth) {
  gemm_unrounded<128>(x, weight, bias, out, tokens, rows, depth);
}
