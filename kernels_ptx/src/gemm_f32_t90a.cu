// gemm_f32_t90a: out = x W^T + bias in float for many tokens on Hopper: logits.
//
// out (tokens, rows) f32; the rest as in gemm_t90a.cu.
// workspace: what cut tiles leave, f32; counters: a u32 a cut tile, 0 before the first launch and after every one.
// launch: grid whole + (tiles - whole) parts; T tokens a tile, as the entry's name says, and P slots: n32, n64 128, n128 and
//   n256 192, t128 and t256 144. Block: 2 P, of t128 and t256 2 T. tiles = ceil(tokens / T) ceil(rows / P); those from
//   `whole` on are cut into `parts`.
//   Dynamic shared bytes: n32 103424; n64 99328; n128, n256 230400; t128, t256 209920.
//   n128, n256, t128, t256: parts is at most 16, of t128 and t256 9, and ceil(depth / 64); workspace: 4 P T parts bytes a
//   cut tile. Slots are the rows of n256's products, tokens those of t256's: the same bits.
//   n32 and n64 have the bits of linear.cu; splits is its S, parts is 1, 2, 4 or 8 and changes no bit, and where splits is
//   more than 1 all tiles are cut; workspace: 4096 T splits bytes a cut tile.
//   Blocks that share a tile wait for each other: they are the grid's last, and all of them run at once.
//   x and weight are given as maps (Device.matrix_map): of x in boxes of T rows, of the weight in boxes of P / 2.
// bound: 2 tokens rows depth FLOPs, or the bytes of the weight.
// assumes: depth is a multiple of 8; x, weight and out start on 16 bytes; residual and out overlap nothing else.
// spills: at most 32 bytes
// tiers: t90a
#include "gemm_wgmma.cuh"
#include "linear_wgmma.cuh"

template <typename Size, typename X>
DEVICE void wide_unrounded(const void* x, const void* weight, const X* bias, float* out, int tokens, int rows,
                           int depth, int whole, int parts, float* workspace, uint32* counters) {
  const Plain<Unrounded<X>> to = {{bias}, out, rows};
  gemm<Size, X>(Matrices{x, weight, tokens, depth}, Cut{whole, parts}, Meeting{workspace, counters}, to);
}

KERNEL(384)
void gemm_f32_t90a_f16_n128(const void* x, const void* weight, const half_t* bias, float* out, int tokens, int rows,
                            int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_unrounded<SlotRows<192, 128>, half_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace,
                                             counters);
}

KERNEL(384)
void gemm_f32_t90a_f16_n256(const void* x, const void* weight, const half_t* bias, float* out, int tokens, int rows,
                            int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_unrounded<SlotRows<192, 256>, half_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace,
                                             counters);
}

KERNEL(384)
void gemm_f32_t90a_bf16_n128(const void* x, const void* weight, const bfloat_t* bias, float* out, int tokens, int rows,
                             int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_unrounded<SlotRows<192, 128>, bfloat_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace,
                                               counters);
}

KERNEL(384)
void gemm_f32_t90a_bf16_n256(const void* x, const void* weight, const bfloat_t* bias, float* out, int tokens, int rows,
                             int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_unrounded<SlotRows<192, 256>, bfloat_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace,
                                               counters);
}

KERNEL(256)
void gemm_f32_t90a_f16_t128(const void* x, const void* weight, const half_t* bias, float* out, int tokens, int rows,
                            int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_unrounded<TokenRows<144, 128>, half_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace,
                                              counters);
}

KERNEL(512)
void gemm_f32_t90a_f16_t256(const void* x, const void* weight, const half_t* bias, float* out, int tokens, int rows,
                            int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_unrounded<TokenRows<144, 256>, half_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace,
                                              counters);
}

KERNEL(256)
void gemm_f32_t90a_bf16_t128(const void* x, const void* weight, const bfloat_t* bias, float* out, int tokens, int rows,
                             int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_unrounded<TokenRows<144, 128>, bfloat_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace,
                                                counters);
}

KERNEL(512)
void gemm_f32_t90a_bf16_t256(const void* x, const void* weight, const bfloat_t* bias, float* out, int tokens, int rows,
                             int depth, int whole, int parts, float* workspace, uint32* counters) {
  wide_unrounded<TokenRows<144, 256>, bfloat_t>(x, weight, bias, out, tokens, rows, depth, whole, parts, workspace,
                                                counters);
}

template <int TOKENS, typename X>
DEVICE void in_parts_unrounded(const void* x, const void* weight, const X* bias, float* out, int tokens, int rows,
                               int depth, int splits, int whole, int parts, float* workspace, uint32* counters) {
  const Plain<Unrounded<X>> to = {{bias}, out, rows};
  linear_parts<TOKENS, X>(Matrices{x, weight, tokens, depth}, splits, Cut{whole, parts}, Meeting{workspace, counters},
                          to);
}

KERNEL(512)
void gemm_f32_t90a_f16_n64(const void* x, const void* weight, const half_t* bias, float* out, int tokens, int rows,
                           int depth, int splits, int whole, int parts, float* workspace, uint32* counters) {
  in_parts_unrounded<64, half_t>(x, weight, bias, out, tokens, rows, depth, splits, whole, parts, workspace, counters);
}

KERNEL(512)
void gemm_f32_t90a_bf16_n64(const void* x, const void* weight, const bfloat_t* bias, float* out, int tokens, int rows,
                            int depth, int splits, int whole, int parts, float* workspace, uint32* counters) {
  in_parts_unrounded<64, bfloat_t>(x, weight, bias, out, tokens, rows, depth, splits, whole, parts, workspace,
                                   counters);
}

KERNEL(512)
void gemm_f32_t90a_f16_n32(const void* x, const void* weight, const half_t* bias, float* out, int tokens, int rows,
                           int depth, int splits, int whole, int parts, float* workspace, uint32* counters) {
  in_parts_unrounded<32, half_t>(x, weight, bias, out, tokens, rows, depth, splits, whole, parts, workspace, counters);
}

KERNEL(512)
void gemm_f32_t90a_bf16_n32(const void* x, const void* weight, const bfloat_t* bias, float* out, int tokens, int rows,
                            int depth, int splits, int whole, int parts, float* workspace, uint32* counters) {
  in_parts_unrounded<32, bfloat_t>(x, weight, bias, out, tokens, rows, depth, splits, whole, parts, workspace,
                                   counters);
}
