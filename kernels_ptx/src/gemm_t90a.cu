// gemm_t90a: out = X(x W^T + bias) for many tokens on Hopper. _n128 and _n256 give the same bits where tiles are not cut.
//
// x (tokens, depth) X; weight (rows, depth) X; bias (rows) X or null; out (tokens, rows) X.
// workspace: what cut tiles leave, f32; counters: a u32 a cut tile, 0 before the first launch and after every one.
// launch: grid whole + (tiles - whole) parts, block 256; T tokens a tile, 32, 64, 128 or 256, as the entry's name says;
//   tiles = ceil(tokens / T) ceil(rows / 128). The tiles from `whole` on are cut into `parts`. Dynamic shared bytes: n128,
//   n256 197632; n32 103424; n64 99328.
//   n128, n256: parts is at most 16 and ceil(depth / 64); workspace: 512 T parts bytes a cut tile.
//   n32 and n64 have the bits of linear.cu; splits is its S, parts is 1, 2, 4 or 8 and changes no bit, and where splits is
//   more than 1 all tiles are cut; workspace: 4096 T splits bytes a cut tile.
//   Blocks that share a tile wait for each other: they are the grid's last, and all of them run at once.
//   x and weight are given as maps (Device.matrix_map): of x in boxes of T rows, of the weight in boxes of 64.
// bound: 2 tokens rows depth FLOPs, or the bytes of the weight.
// assumes: depth is a multiple of 8; x, weight and out start on 16 bytes; residual and out overlap nothing else.
// spills: at most 32 bytes
// tiers: t90a
#include "gemm_wgmma.cuh"
#include "linear_wgmma.cuh"

template <int TOKENS, typename X>
DEVICE void wide_rounded(const void* x, const void* weight, const X* bias, X* out, int tokens, int rows, int depth,
                         int whole, int parts, float* workspace, uint32* counters) {
  const Plain<Rounded<X>> to = {{bias}, out, rows};
  gemm<SlotRows<128, TOKENS>, X>(Matrices{x, weight, tokens, depth}, Cut{whole, parts}, Meeting{workspace, counters},
                                 to);
}

KERNEL(256)
void gemm_t90a_f16_n128(const void* x, const void* weight, const half_t* bias, half_t* out, int tokens, int rows,
                        int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_rounded<128, half_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace, counters);
}

KERNEL(256)
void gemm_t90a_f16_n256(const void* x, const void* weight, const half_t* bias, half_t* out, int tokens, int rows,
                        int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_rounded<256, half_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace, counters);
}

KERNEL(256)
void gemm_t90a_bf16_n128(const void* x, const void* weight, const bfloat_t* bias, bfloat_t* out, int tokens, int rows,
                         int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_rounded<128, bfloat_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace, counters);
}

KERNEL(256)
void gemm_t90a_bf16_n256(const void* x, const void* weight, const bfloat_t* bias, bfloat_t* out, int tokens, int rows,
                         int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_rounded<256, bfloat_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace, counters);
}

template <int TOKENS, typename X>
DEVICE void in_parts_rounded(const void* x, const void* weight, const X* bias, X* out, int tokens, int rows, int depth,
                             int splits, int whole, int parts, float* workspace, uint32* counters) {
  const Plain<Rounded<X>> to = {{bias}, out, rows};
  linear_parts<TOKENS, X>(Matrices{x, weight, tokens, depth}, splits, Cut{whole, parts}, Meeting{workspace, counters},
                          to);
}

KERNEL(512)
void gemm_t90a_f16_n64(const void* x, const void* weight, const half_t* bias, half_t* out, int tokens, int rows,
                       int depth, int splits, int whole, int parts, float* workspace, uint32* counters) {
  in_parts_rounded<64, half_t>(x, weight, bias, out, tokens, rows, depth, splits, whole, parts, workspace, counters);
}

KERNEL(512)
void gemm_t90a_bf16_n64(const void* x, const void* weight, const bfloat_t* bias, bfloat_t* out, int tokens, int rows,
                        int depth, int splits, int whole, int parts, float* workspace, uint32* counters) {
  in_parts_rounded<64, bfloat_t>(x, weight, bias, out, tokens, rows, depth, splits, whole, parts, workspace, counters);
}

KERNEL(512)
void gemm_t90a_f16_n32(const void* x, const void* weight, const half_t* bias, half_t* out, int tokens, int rows,
                       int depth, int splits, int whole, int parts, float* workspace, uint32* counters) {
  in_parts_rounded<32, half_t>(x, weight, bias, out, tokens, rows, depth, splits, whole, parts, workspace, counters);
}

KERNEL(512)
void gemm_t90a_bf16_n32(const void* x, const void* weight, const bfloat_t* bias, bfloat_t* out, int tokens, int rows,
                        int depth, int splits, int whole, int parts, float* workspace, uint32* counters) {
  in_parts_rounded<32, bfloat_t>(x, weight, bias, out, tokens, rows, depth, splits, whole, parts, workspace, counters);
}
