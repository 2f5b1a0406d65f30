// linear_act_mul_t90a: out = X(X(act(gate)) * X(up)), gate | up = X(x W^T + bias), for up to 8 tokens on Hopper.
//
// weight (2 width, depth) X, as its map in boxes of 8 rows, and bias (2 width) X or null: gate rows, then up rows; out
//   (tokens, width) X; activation as in activation.cuh. The other arguments, launch and assumptions as in linear_t90a.cu,
//   with rows = 16 ceil(width / 8) and H = 16 there.
// bound: 4 width depth bytes.
// tiers: t90a
#include "linear_ring.cuh"

template <typename X>
DEVICE void gated_by_ring(const X* x, const void* weight, const X* bias, X* out, int tokens, int width, int depth,
                          int activation, int stages) {
  const Gated<X> to = {bias, out, width, activation};
  linear_ring(RingOperands<X>{x, weight, tokens, depth, 16, stages}, to);
}

KERNEL(256)
void linear_act_mul_t90a_f16(const half_t* x, const void* weight, const half_t* bias, half_t* out, int tokens,
                             int width, int depth, int activation, int stages) {
  gated_by_ring(x, weight, bias, out, tokens, width, depth, activation, stages);
}

KERNEL(256)
void linear_act_mul_t90a_bf16(const bfloat_t* x, const void* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                              int width, int depth, int activation, int stages) {
  gated_by_ring(x, weight, bias, out, tokens, width, depth, activation, stages);
}
