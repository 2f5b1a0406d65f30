// attention_prefill_e4m3: attention_prefill over a cache of codes.
//
// Arguments, launch, and what it assumes as in attention_prefill.cu, but for: cache (2, blocks, kv_heads, block_size,
// head_dim) E4M3 (e4m3.cuh), scales (2, blocks, kv_heads, block_size) f32. Scores are multiplied by the key's scale, and
// weights by the value's before they are rounded, from t80 on, but for _any, to bf16 whatever X is.
// A kernel of its own, so that who has no such cache does not wait for its compilation.
// tiers: t70 t80
// spills: at most 148 bytes
#include "attention_prefill.cuh"

KERNEL(128)
void attention_prefill_e4m3_d64_f16(const half_t* q, const e4m3_t* cache, const float* scales, const int* block_tables,
                                    const int* work, half_t* out, int heads, int kv_heads, int head_dim, int blocks,
                                    int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<64, half_t, e4m3_t>>(q, cache, block_tables, work, out, shape, scales);
}

KERNEL(128)
void attention_prefill_e4m3_d96_f16(const half_t* q, const e4m3_t* cache, const float* scales, const int* block_tables,
                                    const int* work, half_t* out, int heads, int kv_heads, int head_dim, int blocks,
                                    int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<96, half_t, e4m3_t>>(q, cache, block_tables, work, out, shape, scales);
}

KERNEL(128)
void attention_prefill_e4m3_d128_f16(const half_t* q, const e4m3_t* cache, const float* scales, const int* block_tables,
                                     const int* work, half_t* out, int heads, int kv_heads, int head_dim, int blocks,
                                     int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<128, half_t, e4m3_t>>(q, cache, block_tables, work, out, shape, scales);
}

KERNEL(128)
void attention_prefill_e4m3_d256_f16(const half_t* q, const e4m3_t* cache, const float* scales, const int* block_tables,
                                     const int* work, half_t* out, int heads, int kv_heads, int head_dim, int blocks,
                                     int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<256, half_t, e4m3_t>>(q, cache, block_tables, work, out, shape, scales);
}

KERNEL(128)
void attention_prefill_e4m3_any_f16(const half_t* q, const e4m3_t* cache, const float* scales, const int* block_tables,
                                    const int* work, half_t* out, int heads, int kv_heads, int head_dim, int blocks,
                                    int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<AnyMethod<half_t, e4m3_t>>(q, cache, block_tables, work, out, shape, scales);
}

KERNEL(128)
void attention_prefill_e4m3_d64_bf16(const bfloat_t* q, const e4m3_t* cache, const float* scales,
                                     const int* block_tables, const int* work, bfloat_t* out, int heads, int kv_heads,
                                     int head_dim, int blocks, int block_size, int max_blocks, float scale,
                                     int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<64, bfloat_t, e4m3_t>>(q, cache, block_tables, work, out, shape, scales);
}

KERNEL(128)
void attention_prefill_e4m3_d96_bf16(const bfloat_t* q, const e4m3_t* cache, const float* scales,
                                     const int* block_tables, const int* work, bfloat_t* out, int heads, int kv_heads,
                                     int head_dim, int blocks, int block_size, int max_blocks, float scale,
                                     int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<96, bfloat_t, e4m3_t>>(q, cache, block_tables, work, out, shape, scales);
}

KERNEL(128)
void attention_prefill_e4m3_d128_bf16(const bfloat_t* q, const e4m3_t* cache, const float* scales,
                                      const int* block_tables, const int* work, bfloat_t* out, int heads, int kv_heads,
                                      int head_dim, int blocks, int block_size, int max_blocks, float scale,
                                      int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<128, bfloat_t, e4m3_t>>(q, cache, block_tables, work, out, shape, scales);
}

KERNEL(128)
void attention_prefill_e4m3_d256_bf16(const bfloat_t* q, const e4m3_t* cache, const float* scales,
                                      const int* block_tables, const int* work, bfloat_t* out, int heads, int kv_heads,
                                      int head_dim, int blocks, int block_size, int max_blocks, float scale,
                                      int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<WideMethod<256, bfloat_t, e4m3_t>>(q, cache, block_tables, work, out, shape, scales);
}

KERNEL(128)
void attention_prefill_e4m3_any_bf16(const bfloat_t* q, const e4m3_t* cache, const float* scales,
                                     const int* block_tables, const int* work, bfloat_t* out, int heads, int kv_heads,
                                     int head_dim, int blocks, int block_size, int max_blocks, float scale,
                                     int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_prefill<AnyMethod<bfloat_t, e4m3_t>>(q, cache, block_tables, work, out, shape, scales);
}
