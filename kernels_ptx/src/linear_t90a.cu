// linear_t90a: out = X(x W^T + bias) for up to 8 tokens on Hopper: the bits of linear.cu with S = 1.
//
// x (tokens, depth) X; bias (rows) X or null; out (tokens, rows) X. weight (rows, depth) X is given as its map
//   (Device.matrix_map) in boxes of H rows.
// launch: grid (B), block 256. H (tall), from 1 to 16, is a tile's rows; B from 1 to ceil(rows / H): block b has tiles b,
//   b + B, and so on. P (stages), from 2 to 12, are those of a ring, 16 KB of shared memory each. None changes a bit.
//   dynamic shared bytes: 9216 + 16384 P + tokens (128 ceil(depth / 64) + 16), opted in. More than half of a multiprocessor's
//   keeps blocks of a grid apart, on a multiprocessor each.
// bound: 2 rows depth bytes.
// assumes: 1 <= tokens <= 8; depth is a multiple of 8; out overlaps nothing; x and weight start on 16 bytes.
// tiers: t90a
#include "linear_ring.cuh"

template <typename X>
DEVICE void rounded_by_ring(const X* x, const void* weight, const X* bias, X* out, int tokens, int rows, int depth,
                            int tall, int stages) {
  const Plain<Rounded<X>> to = {{bias}, out, rows};
  linear_ring(RingOperands<X>{x, weight, tokens, depth, tall, stages}, to);
}

KERNEL(256)
void linear_t90a_f16(const half_t* x, const void* weight, const half_t* bias, half_t* out, int tokens, int rows,
                     int depth, int tall, int stages) {
  rounded_by_ring(x, weight, bias, out, tokens, rows, depth, tall, stages);
}

KERNEL(256)
void linear_t90a_bf16(const bfloat_t* x, const void* weight, const bfloat_t* bias, bfloat_t* out, int tokens, int rows,
                      int depth, int tall, int stages) {
  rounded_by_ring(x, weight, bias, out, tokens, rows, depth, tall, stages);
}
