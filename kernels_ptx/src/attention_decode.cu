// attention_decode: out = softmax(scale q k^T) v, token by token, over the keys that each sees.
//
// q, out (tokens, heads head_dim) X; cache (2, blocks, kv_heads, block_size, head_dim) X, keys then values;
// block_tables (sequences, max_blocks) i32; work: a list of DecodeItems (attention_work.cuh), all splits of a row once:
// its query is at position kv_length - 1 and sees the last `window` positions (0: all). A row without items gets
// nothing. Of the rows of one sequence, only one may have several items.
// workspace: sequences heads 32 (head_dim + 2) f32; counters: sequences kv_heads ceil(heads / kv_heads / 8) u32, zero
// before the first launch, and zero again after each. Both belong to one launch at a time.
// launch: grid (G, kv_heads ceil(heads / kv_heads / 8)), block 128, no dynamic shared memory. One block: an item, for
//   8 heads at most that share keys; those beyond the list do nothing. _d64, _d128, _d256: for head_dim up to that and a
//   multiple of 8; _any: for any up to 256.
// bound: 4 kv_heads head_dim bytes a key that is seen.
// A query's keys are split at multiples of a chunk that depends on how many keys it sees alone; the last block of a
// (sequence, 8 heads) merges the splits in order. So the bits of a row depend on no other, nor on the items.
// Weights are rounded to X before they meet the values from t80 on, but for _any; else never.
// assumes: block_size 16, 32 or 64; head_dim even; scale > 0; kv_length >= 1; no more items than G; out overlaps
//   nothing; all start on 16 bytes.
// tiers: t70 t80 t90
#include "attention_decode.cuh"

KERNEL(128)
void attention_decode_d64_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* work,
                              half_t* out, float* workspace, uint32* counters, int heads, int kv_heads, int head_dim,
                              int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape};
  attention_decode<WideMethod<64, half_t>, 64>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_d64_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables, const int* work,
                               bfloat_t* out, float* workspace, uint32* counters, int heads, int kv_heads, int head_dim,
                               int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape};
  attention_decode<WideMethod<64, bfloat_t>, 64>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_d128_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* work,
                               half_t* out, float* workspace, uint32* counters, int heads, int kv_heads, int head_dim,
                               int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape};
  attention_decode<WideMethod<128, half_t>, 128>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_d128_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables, const int* work,
                                bfloat_t* out, float* workspace, uint32* counters, int heads, int kv_heads,
                                int head_dim, int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape};
  attention_decode<WideMethod<128, bfloat_t>, 128>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_d256_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* work,
                               half_t* out, float* workspace, uint32* counters, int heads, int kv_heads, int head_dim,
                               int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape};
  attention_decode<WideMethod<256, half_t>, 256>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_d256_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables, const int* work,
                                bfloat_t* out, float* workspace, uint32* counters, int heads, int kv_heads,
                                int head_dim, int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape};
  attention_decode<WideMethod<256, bfloat_t>, 256>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_any_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* work,
                              half_t* out, float* workspace, uint32* counters, int heads, int kv_heads, int head_dim,
                              int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape};
  attention_decode<FmaMethod<256, 1, half_t>, 256>(q, cache, block_tables, work, out, given);
}

KERNEL(128)
void attention_decode_any_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables, const int* work,
                               bfloat_t* out, float* workspace, uint32* counters, int heads, int kv_heads, int head_dim,
                               int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  const DecodeArguments given = {workspace, counters, shape};
  attention_decode<FmaMethod<256, 1, bfloat_t>, 256>(q, cache, block_tables, work, out, given);
}
