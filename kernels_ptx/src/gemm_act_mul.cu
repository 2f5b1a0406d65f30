// gemm_act_mul: out = X(X(act(gate)) * up), gate | up = X(x W^T + bias), for many tokens; act as in activation.cuh.
//
// weight (2 width, depth) X and bias (2 width) X or null: gate rows, then up rows; out (tokens, width) X. The other
//   arguments, launch and assumptions as in gemm.cu, with the grid (ceil(tokens / S), ceil(2 width / S)).
// bound: 4 tokens width depth FLOPs.
// tiers: t70 t80
#include "gemm.cuh"

template <int SIDE, typename X>
DEVICE void gemm_gated(const X* x, const X* weight, const X* bias, X* out, int tokens, int width, int depth,
                       int activation) {
  const Gated<X> to = {bias, out, width, activation};
  gemm<SIDE>(Operands<X>{x, weight, tokens, depth}, to);
}

KERNEL(128)
void gemm_act_mul_f16_tile64(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens,
                             int width, int depth, int activation) {
  gemm_gated<64>(x, weight, bias, out, tokens, width, depth, activation);
}

KERNEL(128)
void gemm_act_mul_f16_tile128(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens,
                              int width, int depth, int activation) {
  gemm_gated<128>(x, weight, bias, out, tokens, width, depth, activation);
}

KERNEL(128)
void gemm_act_mul_bf16_tile64(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out,
                              int tokens, int width, int depth, int activation) {
  gemm_gated<64>(x, weight, bias, out, tokens, width, depth, activation);
}

KERNEL(128)
void gemm_act_mul_bf16_tile128(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out,
                               int tokens, int width, int depth, int activation) {
  gemm_gated<128>(x, weight, bias, out, tokens, width, depth, activation);
}
