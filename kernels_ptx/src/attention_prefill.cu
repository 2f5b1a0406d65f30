// attention_prefill: out = softmax(scale q k^T) v for the new tokens of some sequences, over the keys that each sees.
//
// q, out (tokens, heads head_dim) X; cache (2, blocks, kv_heads, block_size, head_dim) X, keys then values, those of
// the new tokens among them; block_tables (sequences, max_blocks) i32; work: a list of PrefillItems
// (attention_work.cuh). A token sees its own position and those before it, of them the last `window` (0: all). Tokens
// that are in no item are left alone.
// launch: grid (heads, G), block 128; dynamic shared memory 384 (W + 8) bytes from t80 on for _dW, else none. One block:
//   every Gth item, for one head; G changes no bits. _d64, _d96, _d128, _d256: for head_dim up to that and a multiple of
//   8; _any: for any up to 256.
// bound: 4 heads head_dim operations a (query, key that it sees).
// Weights are rounded to X before they meet the values from t80 on, but for _any; else never. A query's bits do not
// depend on the tokens beside it, nor on how many of the sequence's tokens are new.
// assumes: block_size 16, 32 or 64; head_dim even; scale > 0; out overlaps nothing; all start on 16 bytes.
// tiers: t70 t80
#include "attention_prefill.cuh"

KERNEL(128)
void attention_prefill_d64_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* work,
                               half_t* out, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                               int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<64, half_t>>(q, cache, block_tables, work, out, shape);
}

KERNEL(128)
void attention_prefill_d64_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables, const int* work,
                                bfloat_t* out, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                                int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<64, bfloat_t>>(q, cache, block_tables, work, out, shape);
}

KERNEL(128)
void attention_prefill_d96_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* work,
                               half_t* out, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                               int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<96, half_t>>(q, cache, block_tables, work, out, shape);
}

KERNEL(128)
void attention_prefill_d96_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables, const int* work,
                                bfloat_t* out, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                                int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<96, bfloat_t>>(q, cache, block_tables, work, out, shape);
}

KERNEL(128)
void attention_prefill_d128_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* work,
                                half_t* out, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                                int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<128, half_t>>(q, cache, block_tables, work, out, shape);
}

KERNEL(128)
void attention_prefill_d128_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables, const int* work,
                                 bfloat_t* out, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                                 int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<128, bfloat_t>>(q, cache, block_tables, work, out, shape);
}

KERNEL(128)
void attention_prefill_d256_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* work,
                                half_t* out, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                                int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<256, half_t>>(q, cache, block_tables, work, out, shape);
}

KERNEL(128)
void attention_prefill_d256_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables, const int* work,
                                 bfloat_t* out, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                                 int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<256, bfloat_t>>(q, cache, block_tables, work, out, shape);
}

KERNEL(128)
void attention_prefill_any_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* work,
                               half_t* out, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                               int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<AnyMethod<half_t>>(q, cache, block_tables, work, out, shape);
}

KERNEL(128)
void attention_prefill_any_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables, const int* work,
                                bfloat_t* out, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                                int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<AnyMethod<bfloat_t>>(q, cache, block_tables, work, out, shape);
}
