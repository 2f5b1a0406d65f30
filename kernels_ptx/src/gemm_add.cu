// gemm_add: out = X(residual + X(x W^T + bias)) for many tokens.
//
// residual, out (tokens, rows) X; the other arguments, launch, bound and assumptions as in gemm.cu.
// assumes: out may be the residual, and overlaps nothing else.
// tiers: t70 t80
#include "gemm.cuh"

template <int SIDE, typename X>
DEVICE void gemm_added(const X* x, const X* weight, const X* bias, const X* residual, X* out, int tokens, int rows,
                       int depth) {
  const Plain<Added<X>> to = {{bias, residual}, out, rows};
  gemm<SIDE>(Operands<X>{x, weight, tokens, depth}, to);
}

KERNEL(128)
void gemm_add_f16_tile64(const half_t* x, const half_t* weight, const half_t* bias, const half_t* residual, half_t* out,
                         int tokens, int rows, int depth) {
  gemm_added<64>(x, weight, bias, residual, out, tokens, rows, depth);
}

KERNEL(128)
void gemm_add_f16_tile128(const half_t* x, const half_t* weight, const half_t* bias, const half_t* residual,
                          half_t* out, int tokens, int rows, int depth) {
  gemm_added<128>(x, weight, bias, residual, out, tokens, rows, depth);
}

KERNEL(128)
void gemm_add_bf16_tile64(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, const bfloat_t* residual,
                          bfloat_t* out, int tokens, int rows, int depth) {
  gemm_added<64>(x, weight, bias, residual, out, tokens, rows, depth);
}

KERNEL(128)
void gemm_add_bf16_tile128(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, const bfloat_t* residual,
                           bfloat_t* out, int tokens, int rows, int depth) {
  gemm_added<128>(x, weight, bias, residual, out, tokens, rows, depth);
}
