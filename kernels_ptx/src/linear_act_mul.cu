// linear_act_mul: out = X(X(act(gate)) * up), gate | up = X(x W^T + bias), for up to 64 tokens; act of activation.cuh.
//
// weight (2 width, depth) X and bias (2 width) X or null: gate rows, then up rows; out (tokens, width) X. The other
//   arguments, launch and assumptions as in linear.cu, with rows = 16 ceil(width / 8) there.
// bound: 4 width depth bytes.
// tiers: t70 t80 t90
#include "linear.cuh"

template <int EIGHTS, typename X>
DEVICE void linear_gated(const X* x, const X* weight, const X* bias, X* out, int tokens, int width, int depth,
                         int activation, float* workspace, uint32* counters) {
  const Gated<X> to = {bias, out, width, activation};
  linear<EIGHTS>(Operands<X>{x, weight, tokens, depth}, Meeting{workspace, counters}, to);
}

KERNEL(256)
void linear_act_mul_f16_m8(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens,
                           int width, int depth, int activation, float* workspace, uint32* counters) {
  linear_gated<1>(x, weight, bias, out, tokens, width, depth, activation, workspace, counters);
}

KERNEL(256)
void linear_act_mul_f16_m16(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens,
                            int width, int depth, int activation, float* workspace, uint32* counters) {
  linear_gated<2>(x, weight, bias, out, tokens, width, depth, activation, workspace, counters);
}

KERNEL(256)
void linear_act_mul_f16_m32(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens,
                            int width, int depth, int activation, float* workspace, uint32* counters) {
  linear_gated<4>(x, weight, bias, out, tokens, width, depth, activation, workspace, counters);
}

KERNEL(384)
void linear_act_mul_f16_m64(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens,
                            int width, int depth, int activation, float* workspace, uint32* counters) {
  linear_gated<8>(x, weight, bias, out, tokens, width, depth, activation, workspace, counters);
}

KERNEL(256)
void linear_act_mul_bf16_m8(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                            int width, int depth, int activation, float* workspace, uint32* counters) {
  linear_gated<1>(x, weight, bias, out, tokens, width, depth, activation, workspace, counters);
}

KERNEL(256)
void linear_act_mul_bf16_m16(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                             int width, int depth, int activation, float* workspace, uint32* counters) {
  linear_gated<2>(x, weight, bias, out, tokens, width, depth, activation, workspace, counters);
}

KERNEL(256)
void linear_act_mul_bf16_m32(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                             int width, int depth, int activation, float* workspace, uint32* counters) {
  linear_gated<4>(x, weight, bias, out, tokens, width, depth, activation, workspace, counters);
}

KERNEL(384)
void linear_act_mul_bf16_m64(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                             int width, int depth, int activation, float* workspace, uint32* counters) {
  linear_gated<8>(x, weight, bias, out, tokens, width, depth, activation, workspace, counters);
}
