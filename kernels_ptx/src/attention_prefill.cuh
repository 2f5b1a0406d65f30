// The body of attention_prefill.cu and attention_prefill_e4m3.cu, over the cache's element C.
#pragma once

#include "attention_fma.cuh"
#include "attention_work.cuh"
#if TIER >= 80
#include "attention_prefill_mma.cuh"
#endif

enum : int { WARP_QUERIES = 16 };

// One warp's queries, a few at a time. `stride` and the rest as in attend_tiles.
template <int WIDTH, int N, typename X, typename C>
DEVICE void attend_rows(const X* q, X* out, int64 stride, int rows, int position, const Pages<C>& pages, int window,
                        float scale) {
  using State = FmaRows<WIDTH, N, X, C>;
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
template <int WIDTH, typename X, typename C = X>
struct WideMethod {
  static DEVICE void attend(const X* q, X* out, int64 stride, int rows, int position, const Pages<C>& pages, int window,
                            float scale) {
    attend_tiles<WIDTH>(q, out, stride, rows, position, pages, window, scale);
  }
};
#else
template <int WIDTH, typename X, typename C = X>
struct WideMethod {
  static DEVICE void attend(const X* q, X* out, int64 stride, int rows, int position, const Pages<C>& pages, int window,
                            float scale) {
    attend_rows<WIDTH == 96 ? 128 : WIDTH, WIDE>(q, out, stride, rows, position, pages, window, scale);
  }
};
#endif

template <typename X, typename C = X>
struct AnyMethod {
  static DEVICE void attend(const X* q, X* out, int64 stride, int rows, int position, const Pages<C>& pages, int window,
                            float scale) {
    attend_rows<256, 1>(q, out, stride, rows, position, pages, window, scale);
  }
};

template <typename Method, typename X, typename C>
DEVICE void attention_prefill(const X* q, const C* cache, const int* block_tables, const int* work, X* out,
                              const AttentionShape& shape, const float* scales = nullptr) {
  const int head = block_x();
  const int64 stride = int64(shape.heads) * shape.head_dim;
  int index = block_y();
  PrefillItem item = prefill_item(work, index);
  NO_UNROLL
  while (index < item_count(work)) {
    const int kv_head = head / (shape.heads / shape.kv_heads);
    const Pages<C> pages = pages_of(cache, scales, block_tables, item.sequence, kv_head, shape);
    const int64 place = item.row * stride + int64(head) * shape.head_dim;
    Method::attend(q + place, out + place, stride, item.rows, item.position, pages, shape.window,
                   shape.scale * log2_e());
    index += grid_y();
    if (index >= item_count(work)) return;
    item = prefill_item(work, index);
    sync_block();  // so that `attend` may begin by writing anything that warps share
  }
}
