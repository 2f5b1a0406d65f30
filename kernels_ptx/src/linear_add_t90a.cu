// linear_add_t90a: out = X(residual + X(x W^T + bias)) for up to 8 tokens on Hopper.
//
// residual, out (tokens, rows) X, which may be the same. The other arguments, launch and assumptions as in linear_t90a.cu.
// bound: 2 rows depth bytes.
// tiers: t90a
#include "linear_ring.cuh"

template <typename X>
DEVICE void added_by_ring(const X* x, const void* weight, const X* bias, const X* residual, X* out, int tokens,
                          int rows, int depth, int tall, int stages) {
  const Plain<Added<X>> to = {{bias, residual}, out, rows};
  linear_ring(RingOperands<X>{x, weight, tokens, depth, tall, stages}, to);
}

KERNEL(256)
void linear_add_t90a_f16(const half_t* x, const void* weight, const half_t* bias, const half_t* residual, half_t* out,
                         int tokens, int rows, int depth, int tall, int stages) {
  added_by_ring(x, weight, bias, residual, out, tokens, rows, depth, tall, stages);
}

KERNEL(256)
void linear_add_t90a_bf16(const bfloat_t* x, const void* weight, const bfloat_t* bias, const bfloat_t* residual,
                          bfloat_t* out, int tokens, int rows, int depth, int tall, int stages) {
  added_by_ring(x, weight, bias, residual, out, tokens, rows, depth, tall, stages);
}
