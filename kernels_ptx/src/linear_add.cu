// linear_add: out = X(residual + X(x W^T + bias)) for up to 64 tokens.
//
// residual, out (tokens, rows) X; the other arguments, launch, bound and assumptions as in linear.cu.
// assumes: out may be the residual, and overlaps nothing else.
// tiers: t70 t80 t90
#include "linear.cuh"

template <int EIGHTS, typename X>
DEVICE void linear_added(const X* x, const X* weight, const X* bias, const X* residual, X* out, int tokens, int rows,
                         int depth, float* workspace, uint32* counters) {
  const Plain<Added<X>> to = {{bias, residual}, out, rows};
  linear<EIGHTS>(Operands<X>{x, weight, tokens, depth}, Meeting{workspace, counters}, to);
}

KERNEL(256)
void linear_add_f16_m8(const half_t* x, const half_t* weight, const half_t* bias, const half_t* residual, half_t* out,
                       int tokens, int rows, int depth, float* workspace, uint32* counters) {
  linear_added<1>(x, weight, bias, residual, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_add_f16_m16(const half_t* x, const half_t* weight, const half_t* bias, const half_t* residual, half_t* out,
                        int tokens, int rows, int depth, float* workspace, uint32* counters) {
  linear_added<2>(x, weight, bias, residual, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_add_f16_m32(const half_t* x, const half_t* weight, const half_t* bias, const half_t* residual, half_t* out,
                        int tokens, int rows, int depth, float* workspace, uint32* counters) {
  linear_added<4>(x, weight, bias, residual, out, tokens, rows, depth, workspace, counters);
}

KERNEL(384)
void linear_add_f16_m64(const half_t* x, const half_t* weight, const half_t* bias, const half_t* residual, half_t* out,
                        int tokens, int rows, int depth, float* workspace, uint32* counters) {
  linear_added<8>(x, weight, bias, residual, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_add_bf16_m8(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, const bfloat_t* residual,
                        bfloat_t* out, int tokens, int rows, int depth, float* workspace, uint32* counters) {
  linear_added<1>(x, weight, bias, residual, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_add_bf16_m16(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, const bfloat_t* residual,
                         bfloat_t* out, int tokens, int rows, int depth, float* workspace, uint32* counters) {
  linear_added<2>(x, weight, bias, residual, out, tokens, rows, depth, workspace, counters);
}

KERNEL(256)
void linear_add_bf16_m32(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, const bfloat_t* residual,
                         bfloat_t* out, int tokens, int rows, int depth, float* workspace, uint32* counters) {
  linear_added<4>(x, weight, bias, residual, out, tokens, rows, depth, workspace, counters);
}

KERNEL(384)
void linear_add_bf16_m64(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, const bfloat_t* residual,
                         bfloat_t* out, int tokens, int rows, int depth, float* workspace, uint32* counters) {
  linear_added<8>(x, weight, bias, residual, out, tokens, rows, depth, workspace, counters);
}
