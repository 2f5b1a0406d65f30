// act_mul: out = X(X(act(gate)) * up); act 0: silu, 1: gelu with tanh (Hendrycks and Gimpel 2016), 2: gelu with erf.
//
// x (tokens, 2 width) X, rows gate | up; out (tokens, width) X.
// launch: grid (tokens, ceil(width / 2048)), block 256, no dynamic shared memory. One block: 2048 elements of a row.
// bound: 6 width bytes a token.
// assumes: activation is 0, 1 or 2; out overlaps nothing; x and out start on 16 bytes.
// tiers: t70 t80
#include "activation.cuh"

template <int N, typename X>
DEVICE void act_mul_row(const X* gate, const X* up, X* out, int width, int activation) {
  const int stride = grid_y() * thread_count() * N;
  NO_UNROLL
  for (int column = (block_y() * thread_count() + thread_index()) * N; column < width; column += stride) {
    const Pack<X, N> gates = load<N>(gate + column), ups = load<N>(up + column);
    float active[N];
    Pack<X, N> product;
    UNROLL
    for (int i = 0; i < N; ++i) active[i] = to_float(gates.at[i]);
    activate(active, activation);
    UNROLL
    for (int i = 0; i < N; ++i) {
      product.at[i] = rounded<X>(to_float(rounded<X>(active[i])) * to_float(ups.at[i]));
    }
    store(out + column, product);
  }
}

template <typename X>
DEVICE void act_mul(const X* x, X* out, int width, int activation) {
  const X* gate = x + int64(block_x()) * 2 * width;
  X* row = out + int64(block_x()) * width;
  if (width % WIDE == 0) {
    act_mul_row<WIDE>(gate, gate + width, row, width, activation);
  } else {
    act_mul_row<1>(gate, gate + width, row, width, activation);
  }
}

KERNEL(256) void act_mul_f16(const half_t* x, half_t* out, int width, int activation) {
  act_mul(x, out, width, activation);
}

KERNEL(256) void act_mul_bf16(const bfloat_t* x, bfloat_t* out, int width, int activation) {
  act_mul(x, out, width, activation);
}
