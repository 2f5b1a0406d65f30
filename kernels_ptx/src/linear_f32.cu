// linear_f32: out = x W^T + bias in float for up to 64 tokens: logits.
//
// out (tokens, rows) f32; the other arguments, launch, bound and assumptions as in linear.cu.
// tiers: t70 t80 t90
#include "linear.cuh"

template <int EIGHTS, typename X>
DEVICE void linear_unrounded(const X* x, const X* weight, const X* bias, float* out, int tokens, int rows, int depth,
                             float* workspace, uint32* counters) {
  const Plain<Unrounded<X>> to = {{bias}, out, rows};
  linear<EIGHTS>(Operands<X>{x, weight, tokens, depth}, Meeting{workspace, counters}, to);
}

KERNEL(256)
void linear_f32_f16_m8(const half_t* x, const half_t* weight, const half_t* bias, float* out, int tokens, int rows,
                       int depth, float* workspace, uint32* counters) {
  linear_unrounded<1>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_f32_f16_m16(const half_t* x, const half_t* weight, const half_t* bias, float* out, int tokens, int rows,
                        int depth, float* workspace, uint32* counters) {
  linear_unrounded<2>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_f32_f16_m32(const half_t* x, const half_t* weight, const half_t* bias, float* out, int tokens, int rows,
                        int depth, float* workspace, uint32* counters) {
  linear_unrounded<4>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(384)
void linear_f32_f16_m64(const half_t* x, const half_t* weight, const half_t* bias, float* out, int tokens, int rows,
                        int depth, float* workspace, uint32* counters) {
  linear_unrounded<8>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_f32_bf16_m8(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, float* out, int tokens,
                        int rows, int depth, float* workspace, uint32* counters) {
  linear_unrounded<1>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_f32_bf16_m16(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, float* out, int tokens,
                         int rows, int depth, float* workspace, uint32* counters) {
  linear_unrounded<2>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_f32_bf16_m32(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, float* out, int tokens,
                         int rows, int depth, float* workspace, uint32* counters) {
  linear_unrounded<4>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}

KERNEL(384)
void linear_f32_bf16_m64(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, float* out, int tokens,
                         int rows, int depth, float* workspace, uint32* counters) {
  linear_unrounded<8>(x, weight, bias, out, tokens, rows, depth, workspace, counters);
}
