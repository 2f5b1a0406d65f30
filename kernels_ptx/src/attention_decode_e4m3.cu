// attention_decode_e4m3: attention_decode over a cache of codes.
//
// Arguments, launch, and what it assumes as in attention_decode.cu, but for: cache (2, blocks, kv_heads, block_size,
// head_dim) E4M3 (e4m3.cuh), scales (2, blocks, kv_heads, block_size) f32. Scores are multiplied by the key's scale, and
// weights by the value's before they are rounded, from t80 on, but for _any, to bf16 whatever X is.
// A kernel of its own, so that who has no such cache does not wait for its compilation.
// bound: 2 kv_heads (head_dim + 4) bytes a key that is seen.
// tiers: t70 t80 t90
#include "attention_decode.cuh"

KERNEL(128)
void attention_decode_e4m3_d64_f16(const half_t* q, const e4m3_t* cache, const float* scales, const int* block_tables,
                                   const int* work, half_t* out, float* workspace, uint32* counters, int heads,
                                   int kv_heads, int head_dim, int blocks, int block_size, int max_blocks, float scale,
                                   int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape, scales};
  attention_decode<WideMethod<64, half_t, e4m3_t>, 64>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_e4m3_d64_bf16(const bfloat_t* q, const e4m3_t* cache, const float* scales,
                                    const int* block_tables, const int* work, bfloat_t* out, float* workspace,
                                    uint32* counters, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                                    int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape, scales};
  attention_decode<WideMethod<64, bfloat_t, e4m3_t>, 64>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_e4m3_d128_f16(const half_t* q, const e4m3_t* cache, const float* scales, const int* block_tables,
                                    const int* work, half_t* out, float* workspace, uint32* counters, int heads,
                                    int kv_heads, int head_dim, int blocks, int block_size, int max_blocks, float scale,
                                    int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape, scales};
  attention_decode<WideMethod<128, half_t, e4m3_t>, 128>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_e4m3_d128_bf16(const bfloat_t* q, const e4m3_t* cache, const float* scales,
                                     const int* block_tables, const int* work, bfloat_t* out, float* workspace,
                                     uint32* counters, int heads, int kv_heads, int head_dim, int blocks,
                                     int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape, scales};
  attention_decode<WideMethod<128, bfloat_t, e4m3_t>, 128>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_e4m3_d256_f16(const half_t* q, const e4m3_t* cache, const float* scales, const int* block_tables,
                                    const int* work, half_t* out, float* workspace, uint32* counters, int heads,
                                    int kv_heads, int head_dim, int blocks, int block_size, int max_blocks, float scale,
                                    int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape, scales};
  attention_decode<WideMethod<256, half_t, e4m3_t>, 256>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_e4m3_d256_bf16(const bfloat_t* q, const e4m3_t* cache, const float* scales,
                                     const int* block_tables, const int* work, bfloat_t* out, float* workspace,
                                     uint32* counters, int heads, int kv_heads, int head_dim, int blocks,
                                     int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape, scales};
  attention_decode<WideMethod<256, bfloat_t, e4m3_t>, 256>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_e4m3_any_f16(const half_t* q, const e4m3_t* cache, const float* scales, const int* block_tables,
                                   const int* work, half_t* out, float* workspace, uint32* counters, int heads,
                                   int kv_heads, int head_dim, int blocks, int block_size, int max_blocks, float scale,
                                   int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape, scales};
  attention_decode<FmaMethod<256, 1, half_t, e4m3_t>, 256>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_e4m3_any_bf16(const bfloat_t* q, const e4m3_t* cache, const float* scales,
                                    const int* block_tables, const int* work, bfloat_t* out, float* workspace,
                                    uint32* counters, int heads, int kv_heads, int head_dim, int blocks, int block_size,
                                    int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape, scales};
  attention_decode<FmaMethod<256, 1, bfloat_t, e4m3_t>, 256>(q, cache, block_tables, work, out, given);
}
