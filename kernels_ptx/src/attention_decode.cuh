// The body of attention_decode.cu and attention_decode_e4m3.cu, over the cache's element C.
#pragma once

#include "attention_fma.cuh"
#include "attention_splits.cuh"
#include "attention_work.cuh"
#if TIER >= 90
#include "attention_decode_ring.cuh"
#elif TIER >= 80
#include "attention_decode_mma.cuh"
#endif

// ---- A split, by all warps: every fourth tile is a warp's. Both methods leave Partials of their warps.

// PIECE: neighbouring dimensions of the result that a thread merges, of which head_dim is a multiple.
template <int WIDTH, int N, typename X, typename C = X>
struct FmaMethod {
  enum : int { PIECE = N == WIDE ? 4 : 2 };

  const X* queries;
  int rows;

  DEVICE void begin(const Pages<C>&, const Splits&, int, int, int) {}
  DEVICE void go_on(const Pages<C>&, const Splits&) {}

  DEVICE void take(const X* q, int count, int head_dim, X* put) {
    put_queries<WIDTH>(q, head_dim, count, head_dim, put, thread_index(), thread_count());
    sync_block();
    queries = put;
    rows = count;
  }

  DEVICE void split(const Pages<C>& pages, const Splits& splits, int number, float scale, const Partials<WIDTH>& to) {
    const int first = splits.begin_of(number), end = splits.end_of(number);
    const Sight all = {end - 1, 0, 0};
    NO_UNROLL
    for (int from = 0; from < rows; from += FMA_ROWS) {
      FmaRows<WIDTH, N, X, C> state(queries + from * WIDTH, smaller_int(FMA_ROWS, rows - from));
      NO_UNROLL
      for (int tile = (first / KEY_TILE + warp_index()) * KEY_TILE; tile < end; tile += WARPS * KEY_TILE) {
        state.tile(pages, tile, larger_int(first, tile), smaller_int(end, tile + KEY_TILE), all, scale);
      }
      state.merge_groups();
      if (lane_index() < state.LANES) leave(state, warp_index() * ROWS + from, to);
    }
  }

  static DEVICE void leave(const FmaRows<WIDTH, N, X, C>& state, int at, const Partials<WIDTH>& to) {
    UNROLL
    for (int row = 0; row < FMA_ROWS; ++row) {
      to.largest[at + row] = state.largest[row];
      to.sum[at + row] = state.sum[row];
      UNROLL
      for (int i = 0; i < state.DIMENSIONS; ++i) to.row(at + row)[state.dimension(i)] = state.out[row][i];
    }
  }
};

#if TIER >= 80
template <int WIDTH, typename X, typename C, typename Tiles>
struct MmaMethod {
  enum : int { PIECE = 4 };

  MmaRows<WIDTH, X, C> state;
  Tiles tiles;

  // Of splits [first, end), with which the next calls go on, what lies before key `known` is on its way.
  DEVICE void begin(const Pages<C>& pages, const Splits& splits, int first, int end, int known) {
    tiles.begin(pages, splits, first, end, known);
  }
  DEVICE void go_on(const Pages<C>& pages, const Splits& splits) { tiles.go_on(pages, splits); }
  DEVICE void take(const X* q, int rows, int head_dim, X* put) { state.take(q, rows, head_dim, put); }

  DEVICE void split(const Pages<C>& pages, const Splits& splits, int number, float scale, const Partials<WIDTH>& to) {
    state.clear();
    tiles.split(state, pages, splits, number, scale);
    state.leave(to);
  }
};
#endif

// ---- A block

struct DecodeArguments {
  float* workspace;
  uint32* counters;
  AttentionShape shape;
  const float* scales = nullptr;
};

// Where the queries of a block are: `rows` heads from `head` on; `counter` counts (sequence, kv head, 8 heads).
struct Place {
  int kv_head, head, rows, counter;
};

DEVICE Place place_of_block(int sequence, const AttentionShape& shape) {
  const int group = shape.heads / shape.kv_heads, tiles = (group + ROWS - 1) / ROWS;
  const int first = block_y() % tiles * ROWS, kv_head = block_y() / tiles;
  return {kv_head, kv_head * group + first, smaller_int(ROWS, group - first), sequence * grid_y() + block_y()};
}

// Shared memory.
template <int WIDTH, typename X>
struct Room {
  X* queries;  // (ROWS, WIDTH)
  Partials<WIDTH> partials;
  float* total;   // (ROWS, WIDTH)
  float* states;  // (2, ROWS, 2)
};

// A split's result goes to the workspace or, if the block is alone, into its total, and after the last split out. A
// thread keeps to its own pieces of `total`; the largest scores and the sums are doubled, since all threads of a row
// read them.
template <int N, int WIDTH, typename X>
DEVICE void end_split(const Room<WIDTH, X>& room, bool alone, int split, int splits, int rows,
                      const Workspace& workspace, X* out) {
  using Own = Share<WIDTH, N>;
  const float* before = room.states + split % 2 * 2 * ROWS;
  float* after = room.states + (split + 1) % 2 * 2 * ROWS;
  NO_UNROLL
  for (int i = 0; Own::row(i) < rows; ++i) {
    if (!Own::has(i, rows, workspace.head_dim)) continue;
    const int row = Own::row(i), dimension = Own::dimension(i);
    Softmax<N> all = merge_warps<N>(room.partials, row, dimension);
    if (!alone) {
      keep(workspace, row, split, dimension, all);
      continue;
    }
    float* own = room.total + row * WIDTH + dimension;
    if (split > 0) all = merged(Softmax<N>{before[2 * row], before[2 * row + 1], load_floats<N>(own)}, all);
    if (split + 1 < splits) {
      store_floats(own, all.out);
      if (dimension != 0) continue;
      after[2 * row] = all.largest;
      after[2 * row + 1] = all.sum;
    } else {
      store_elements(out + row * workspace.head_dim + dimension, all.out, all.sum);
    }
  }
}

// The item's splits. If those are all of the sequence's, nothing goes through the workspace. Before the previous grid
// has ended, only what earlier steps and begin_step wrote is read: the product before that grid waited for them.
template <typename Method, int WIDTH, typename X, typename C>
DEVICE void decode(const X* q, const C* cache, const int* block_tables, const DecodeItem& item, int smallest,
                   const DecodeArguments& given, const Room<WIDTH, X>& room, X* out) {
  const AttentionShape& shape = given.shape;
  const Place place = place_of_block(item.sequence, shape);
  const Pages<C> pages = pages_of(cache, given.scales, block_tables, item.sequence, place.kv_head, shape);
  const Splits splits = splits_of(item.kv_length, shape.window, smallest);
  const Workspace workspace = workspace_of(given.workspace, item.sequence, place.head, shape);
  const int64 row = (int64(item.row) * shape.heads + place.head) * shape.head_dim;
  const bool alone = item.end - item.first == splits.count;
  const float scale = shape.scale * log2_e();
  Method method;
  method.begin(pages, splits, item.first, item.end, item.kv_length - item.fresh);
  wait_for_previous_grid();
  method.go_on(pages, splits);
  method.take(q + row, place.rows, shape.head_dim, room.queries);
  NO_UNROLL
  for (int split = item.first; split < item.end; ++split) {
    method.split(pages, splits, split, scale, room.partials);
    sync_block();
    end_split<Method::PIECE>(room, alone, split, splits.count, place.rows, workspace, out + row);
    sync_block();
  }
  start_next_grid();  // not before: its blocks would crowd on the SMs that this one leaves free
  if (alone || !arrives_last(given.counters + place.counter, item.end - item.first, splits.count)) return;
  merge_splits<WIDTH, Method::PIECE>(workspace, place.rows, splits.count, room.partials.out, out + row);
}

template <typename Method, int WIDTH, typename X, typename C>
DEVICE void attention_decode(const X* q, const C* cache, const int* block_tables, const int* work, X* out,
                             const DecodeArguments& given) {
  SHARED_ARRAY(X, queries, ROWS * WIDTH);
  SHARED_ARRAY(float, warps_out, WARPS * ROWS * Partials<WIDTH>::STRIDE);
  SHARED_ARRAY(float, warps_states, 2 * WARPS * ROWS);
  SHARED_ARRAY(float, total, ROWS* WIDTH);
  SHARED_ARRAY(float, states, 2 * ROWS * 2);
  const Room<WIDTH, X> room = {queries, {warps_states, warps_states + WARPS * ROWS, warps_out}, total, states};
  const DecodeItem item = decode_item(work, block_x());
  const int smallest = smallest_chunk(work);
  if (block_x() < item_count(work)) return decode<Method>(q, cache, block_tables, item, smallest, given, room, out);
  wait_for_previous_grid();  // so that the end of this grid is the end of all before it
}

#if TIER >= 90
template <int WIDTH, typename X, typename C>
struct TilesOf {
  using Type = EitherTiles<WIDTH, X, C>;
};
template <typename X, typename C>
struct TilesOf<256, X, C> {  // a ring would have no room on every GPU
  using Type = HeldTiles<256, X, C>;
};
template <int WIDTH, typename X, typename C = X>
using WideMethod = MmaMethod<WIDTH, X, C, typename TilesOf<WIDTH, X, C>::Type>;
#elif TIER >= 80
template <int WIDTH, typename X, typename C = X>
using WideMethod = MmaMethod<WIDTH, X, C, HeldTiles<WIDTH, X, C> >;
#else
template <int WIDTH, typename X, typename C = X>
using WideMethod = FmaMethod<WIDTH, WIDE, X, C>;
#endif
