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
// spills: at most 40 bytes
#include "attention_fma.cuh"
#include "attention_work.cuh"
#if TIER >= 80
#include "attention_prefill_mma.cuh"
#endif

enum : int { WARP_QUERIES = 16 };

// One warp's queries, a few at a time. `stride` and the rest as in attend_tiles.
template <int WIDTH, int N, typename X>
DEVICE void attend_rows(const X* q, X* out, int64 stride, int rows, int position, const Pages<X>& pages, int window,
                        float scale) {
  using State = FmaRows<WIDTH, N, X>;
  SHARED_ARRAY(X, shared, QUERIES / WARP_QUERIES * FMA_ROWS * WIDTH);
  X* queries = shared + warp_index() * FMA_ROWS * WIDTH;
  const int begin = warp_index() * WARP_QUERIES, end = smaller_int(rows, begin + WARP_QUERIES);
  NO_UNROLL
  for (int from = begin; from < end; from += FMA_ROWS) {
    const int count = smaller_int(FMA_ROWS, end - from);
    sync_warp();  // every lane is done with the queries before
    put_queries<WIDTH>(q + from * stride, stride, count, pages.head_dim, queries, lane_index(), WARP);
    sync_warp();
    State state(queries, count);
    const int first = first_seen(position + from, window), last = position + from + count;
    NO_UNROLL
    for (int tile = first / KEY_TILE * KEY_TILE; tile < last; tile += KEY_TILE) {
      const int tile_end = smaller_int(last, tile + KEY_TILE);
      state.tile(pages, tile, larger_int(first, tile), tile_end, {position + from, 1, window}, scale);
    }
    state.merge_groups();
    if (lane_index() < State::LANES) state.store_rows(out + from * stride, stride, pages.head_dim);
  }
}

#if TIER >= 80
template <int WIDTH, typename X>
struct WideMethod {
  static DEVICE void attend(const X* q, X* out, int64 stride, int rows, int position, const Pages<X>& pages, int window,
                            float scale) {
    attend_tiles<WIDTH>(q, out, stride, rows, position, pages, window, scale);
  }
};
#else
template <int WIDTH, typename X>
struct WideMethod {
  static DEVICE void attend(const X* q, X* out, int64 stride, int rows, int position, const Pages<X>& pages, int window,
                            float scale) {
    attend_rows<WIDTH == 96 ? 128 : WIDTH, WIDE>(q, out, stride, rows, position, pages, window, scale);
  }
};
#endif

template <typename X>
struct AnyMethod {
  static DEVICE void attend(const X* q, X* out, int64 stride, int rows, int position, const Pages<X>& pages, int window,
                            float scale) {
    attend_rows<256, 1>(q, out, stride, rows, position, pages, window, scale);
  }
};

template <typename Method, typename X>
DEVICE void attention_prefill(const X* q, const X* cache, const int* block_tables, const int* work, X* out,
                              const AttentionShape& shape) {
  const int head = block_x();
  const int64 stride = int64(shape.heads) * shape.head_dim;
  int index = block_y();
  PrefillItem item = prefill_item(work, index);
  NO_UNROLL
  while (index < item_count(work)) {
    const Pages<X> pages = pages_of(cache, block_tables, item.sequence, head / (shape.heads / shape.kv_heads), shape);
    const int64 place = item.row * stride + int64(head) * shape.head_dim;
    Method::attend(q + place, out + place, stride, item.rows, item.position, pages, shape.window,
                   shape.scale * log2_e());
    index += grid_y();
    if (index >= item_count(work)) return;
    item = prefill_item(work, index);
    sync_block();  // so that `attend` may begin by writing anything that warps share
  }
}

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
