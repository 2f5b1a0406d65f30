// add_norm: sum = X(x + y); out = X(weight * X(sum / sqrt(mean(sum^2) + epsilon))): add and norm, with their roundings.
//
// x, y, sum, out (tokens, hidden) X; weight (hidden) X.
// launch: grid (tokens), block min(1024, 32 ceil(hidden / 256)), no dynamic shared memory. One block: a row.
//   The block's size is part of the result's bits: it follows from hidden alone, as in norm, whose bits these are.
// bound: 8 hidden bytes a token.
// assumes: sum may be x or y, out overlaps nothing that is still read; all start on 16 bytes.
// tiers: t70 t80 t90
#include "norm.cuh"

template <int N, typename X>
DEVICE void add_norm_wide(const X* x, const X* y, const X* weight, float epsilon, X* sum, X* out, int hidden) {
  const int64 row = int64(block_x()) * hidden;
  const auto fetch = [&](int column) {
    const Pack<X, N> left = load<N>(x + row + column), right = load<N>(y + row + column);
    Pack<X, N> total;
    UNROLL
    for (int i = 0; i < N; ++i) total.at[i] = rounded<X>(to_float(left.at[i]) + to_float(right.at[i]));
    store(sum + row + column, total);
    return total;
  };
  norm_row<N>(fetch, sum + row, weight, epsilon, out + row, hidden);
}

template <typename X>
DEVICE void add_norm(const X* x, const X* y, const X* weight, float epsilon, X* sum, X* out, int hidden) {
  if (hidden % WIDE == 0) {
    add_norm_wide<WIDE>(x, y, weight, epsilon, sum, out, hidden);
  } else {
    add_norm_wide<1>(x, y, weight, epsilon, sum, out, hidden);
  }
}

KERNEL(1024)
void add_norm_f16(const half_t* x, const half_t* y, const half_t* weight, float epsilon, half_t* sum, half_t* out,
                  int hidden) {
  add_norm(x, y, weight, epsilon, sum, out, hidden);
}

KERNEL(1024)
void add_norm_bf16(const bfloat_t* x, const bfloat_t* y, const bfloat_t* weight, float epsilon, bfloat_t* sum,
                   bfloat_t* out, int hidden) {
  add_norm(x, y, weight, epsilon, sum, out, hidden);
}
