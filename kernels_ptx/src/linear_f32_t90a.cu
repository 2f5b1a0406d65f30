// linear_f32_t90a: out = x W^T + bias, unrounded, for up to 8 tokens on Hopper.
//
// out (tokens, rows) f32. The other arguments, launch and assumptions as in linear_t90a.cu.
// bound: 2 rows depth bytes.
// tiers: t90a
#include "linear_ring.cuh"

template <typename X>
DEVICE void unrounded_by_ring(const X* x, const void* weight, const X* bias, float* out, int tokens, int rows,
                              int depth, int tall, int stages) {
  const Plain<Unrounded<X>> to = {{bias}, out, rows};
  linear_ring(RingOperands<X>{x, weight, tokens, depth, tall, stages}, to);
}

KERNEL(256)
void linear_f32_t90a_f16(const half_t* x, const void* weight, const half_t* bias, float* out, int tokens, int rows,
                         int depth, int tall, int stages) {
  unrounded_by_ring(x, weight, bias, out, tokens, rows, depth, tall, stages);
}

KERNEL(256)
void linear_f32_t90a_bf16(const bfloat_t* x, const void* weight, const bfloat_t* bias, float* out, int tokens, int rows,
                          int depth, int tall, int stages) {
  unrounded_by_ring(x, weight, bias, out, tokens, rows, depth, tall, stages);
}
