// norm: out = X(weight * X(x / sqrt(mean(x^2) + epsilon))), RMSNorm; statistics in float.
//
// x, out (tokens, hidden) X; weight (hidden) X.
// launch: grid (tokens), block min(1024, 32 ceil(hidden / 256)), no dynamic shared memory. One block: a row.
//   The block's size is part of the result's bits: it follows from hidden alone.
// bound: 4 hidden bytes a token.
// assumes: out may be x, and overlaps nothing else; x, weight and out start on 16 bytes.
// tiers: t70 t80 t90
#include "norm.cuh"

template <int N, typename X>
DEVICE void norm_wide(const X* x, const X* weight, float epsilon, X* out, int hidden) {
  const int64 row = int64(block_x()) * hidden;
  const auto fetch = [&](int column) { return load<N>(x + row + column); };
  norm_row<N>(fetch, x + row, weight, epsilon, out + row, hidden);
}

template <typename X>
DEVICE void norm(const X* x, const X* weight, float epsilon, X* out, int hidden) {
  if (hidden % WIDE == 0) {
    norm_wide<WIDE>(x, weight, epsilon, out, hidden);
  } else {
    norm_wide<1>(x, weight, epsilon, out, hidden);
  }
}

KERNEL(1024) void norm_f16(const half_t* x, const half_t* weight, float epsilon, half_t* out, int hidden) {
  norm(x, weight, epsilon, out, hidden);
}

KERNEL(1024) void norm_bf16(const bfloat_t* x, const bfloat_t* weight, float epsilon, bfloat_t* out, int hidden) {
  norm(x, weight, epsilon, out, hidden);
}
