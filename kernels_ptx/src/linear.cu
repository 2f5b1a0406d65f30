// linear: out = X(x W^T + bias) for up to 64 tokens: linear_X_m8 takes up to 8, and so on.
//
// x (tokens, depth) X; weight (rows, depth) X; bias (rows) X or null; out (tokens, rows) X; workspace f32;
//   counters u32.
// launch: grid (B, S), block 256. T is 8, 16, 32 or 64, as the entry's name says.
//   R (tiles), how many 16-row tiles are a group, is 1 or 2 and changes no bit. 2 halves how often x is read; 1 gives more
//   groups, G = ceil(rows / (16 R)). B, from 1 to G, changes no bit: block b has groups b, b + B, and so on. Where R T
//   is at most 16, a block that stays has its next weights on their way while it adds up.
//   S, the parts of the depth, does change bits, so it must follow from rows and depth alone:
//   S = max(1, min(8, ceil(256 / ceil(rows / 16)), floor(depth / 2048))).
//   tokens_stay: whether a block keeps its tokens in shared memory for all groups; t80, T <= 32. It changes no bit.
//   dynamic shared bytes: t70 64 R T; t80 4096 (2 R P + D + C T / 8), opted in, with D = R T / 4 if R T <= 16, else 0, and
//   P = min(5, floor((24 - D) / (2 R + T / 8))), the stages of the ring. C is P, or, where tokens stay, the chunks of 32 of
//   a warp's part, 2 ceil(depth / (512 S)). More keeps blocks apart: a grid of no more blocks than there are
//   multiprocessors then has one on each.
//   workspace: 64 R T S G bytes; counters: G words, 0 before the first launch and again after every one. Neither is
//   touched where S is 1. Launches that may run at the same time must not share them.
//   The m64 entries allow blocks of 512 only so that ptxas stops at 128 registers: two blocks of 256 fit on an SM.
// bound: 2 rows depth bytes.
// assumes: 1 <= tokens <= T; out overlaps nothing; x, weight and workspace start on 16 bytes. Any depth works, but one
//   that is no multiple of 8 is read element by element.
// tiers: t70 t80 t90
#include "linear.cuh"

template <int EIGHTS, typename X>
DEVICE void linear_rounded(const X* x, const X* weight, const X* bias, X* out, int tokens, int rows, int depth,
                           int tiles, int tokens_stay, float* workspace, uint32* counters) {
  const Plain<Rounded<X>> to = {{bias}, out, rows};
  linear<EIGHTS>(Operands<X>{x, weight, tokens, depth}, Split{tiles, tokens_stay, {workspace, counters}}, to);
}

KERNEL(256)
void linear_f16_m8(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens, int rows,
                   int depth, int tiles, int tokens_stay, float* workspace, uint32* counters) {
  linear_rounded<1>(x, weight, bias, out, tokens, rows, depth, tiles, tokens_stay, workspace, counters);
}

KERNEL(256)
void linear_f16_m16(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens, int rows,
                    int depth, int tiles, int tokens_stay, float* workspace, uint32* counters) {
  linear_rounded<2>(x, weight, bias, out, tokens, rows, depth, tiles, tokens_stay, workspace, counters);
}

KERNEL(256)
void linear_f16_m32(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens, int rows,
                    int depth, int tiles, int tokens_stay, float* workspace, uint32* counters) {
  linear_rounded<4>(x, weight, bias, out, tokens, rows, depth, tiles, tokens_stay, workspace, counters);
}

KERNEL(512)
void linear_f16_m64(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int tokens, int rows,
                    int depth, int tiles, int tokens_stay, float* workspace, uint32* counters) {
  linear_rounded<8>(x, weight, bias, out, tokens, rows, depth, tiles, tokens_stay, workspace, counters);
}

KERNEL(256)
void linear_bf16_m8(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                    int rows, int depth, int tiles, int tokens_stay, float* workspace, uint32* counters) {
  linear_rounded<1>(x, weight, bias, out, tokens, rows, depth, tiles, tokens_stay, workspace, counters);
}

KERNEL(256)
void linear_bf16_m16(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                     int rows, int depth, int tiles, int tokens_stay, float* workspace, uint32* counters) {
  linear_rounded<2>(x, weight, bias, out, tokens, rows, depth, tiles, tokens_stay, workspace, counters);
}

KERNEL(256)
void linear_bf16_m32(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                     int rows, int depth, int tiles, int tokens_stay, float* workspace, uint32* counters) {
  linear_rounded<4>(x, weight, bias, out, tokens, rows, depth, tiles, tokens_stay, workspace, counters);
}

KERNEL(512)
void linear_bf16_m64(const bfloat_t* x, const bfloat_t* weight, const bfloat_t* bias, bfloat_t* out, int tokens,
                     int rows, int depth, int tiles, int tokens_stay, float* workspace, uint32* counters) {
  linear_rounded<8>(x, weight, bias, out, tokens, rows, depth, tiles, tokens_stay, workspace, counters);
}
