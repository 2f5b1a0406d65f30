// add: out = X(x + y), the residual stream.
//
// x, y, out (count) X, of any shape.
// launch: grid (ceil(count / 2048)), block 256, no dynamic shared memory. One thread: 8 consecutive elements.
// bound: 6 count bytes.
// assumes: out may be x or y, and overlaps nothing else; all three start on 16 bytes.
// tiers: t70 t80
#include "element.cuh"

template <int N, typename X>
DEVICE void add_pack(const X* x, const X* y, X* out) {
  const Pack<X, N> left = load<N>(x), right = load<N>(y);
  Pack<X, N> sum;
  UNROLL
  for (int i = 0; i < N; ++i) sum.at[i] = rounded<X>(to_float(left.at[i]) + to_float(right.at[i]));
  store(out, sum);
}

template <typename X>
DEVICE void add(const X* x, const X* y, X* out, int64 count) {
  const int64 begin = (int64(block_x()) * thread_count() + thread_index()) * WIDE;
  if (begin + WIDE <= count) {
    add_pack<WIDE>(x + begin, y + begin, out + begin);
  } else {
    NO_UNROLL
    for (int64 i = begin; i < count; ++i) add_pack<1>(x + i, y + i, out + i);
  }
}

KERNEL(256) void add_f16(const half_t* x, const half_t* y, half_t* out, int64 count) { add(x, y, out, count); }

KERNEL(256) void add_bf16(const bfloat_t* x, const bfloat_t* y, bfloat_t* out, int64 count) { add(x, y, out, count); }
