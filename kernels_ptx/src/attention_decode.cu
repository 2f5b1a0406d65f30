// attention_decode: out = softmax(scale q k^T) v for the last token of every sequence, over the keys that it sees.
//
// q, out (sequences, heads head_dim) X; cache (2, blocks, kv_heads, block_size, head_dim) X, keys then values;
// block_tables (sequences, max_blocks) i32; kv_lengths (sequences) i32, the query is at position kv_length - 1 and sees
// the last `window` positions (0: all); a sequence of length 0 gets zeros.
// workspace: sequences heads 32 (head_dim + 2) f32; counters: sequences kv_heads ceil(heads / kv_heads / 8) u32, zero
// before the first launch, and zero again after each. Both belong to one launch at a time.
// launch: grid (G, kv_heads ceil(heads / kv_heads / 8), sequences), block 128, no dynamic shared memory. G is any of
//   1..32 and changes no bits: about ceil(8 SMs / (y z)) fills the GPU, and more than the splits of max_blocks
//   block_size keys (`splits_of`) do nothing. _d64, _d128, _d256: the largest head_dim that the entry takes.
// bound: 4 kv_heads head_dim bytes a key that is seen.
// A sequence's keys are split at multiples of a chunk that depends on how many keys it sees alone; the last block of a
// (sequence, 8 heads) merges the splits in order. So the bits of a sequence depend on no other, nor on the grid.
// Weights are rounded to X before they meet the values from t80 on, where head_dim is a multiple of 8; else never.
// assumes: block_size 16, 32 or 64; head_dim even; scale > 0; out overlaps nothing; all start on 16 bytes.
// tiers: t70 t80
#include "attention_fma.cuh"
#include "attention_splits.cuh"
#if TIER >= 80
#include "attention_decode_mma.cuh"
#endif

// ---- A split, warp by warp. Both methods leave Partials, and prepare what all splits share.

template <int WIDTH, int N, typename X>
struct FmaMethod {
  const X* queries;
  int rows;

  DEVICE FmaMethod(const X* q, int rows, int head_dim, X* shared) : queries(shared), rows(rows) {
    FmaRows<WIDTH, N, X>::put(q, head_dim, rows, head_dim, shared, thread_index(), thread_count());
    sync_block();
  }

  DEVICE void split(const Pages<X>& pages, int first, int end, float scale, const Partials<WIDTH>& to) {
    FmaRows<WIDTH, N, X> state(queries, rows);
    const Sight all = {end - 1, 0, 0};
    NO_UNROLL
    for (int tile = (first / KEY_TILE + warp_index()) * KEY_TILE; tile < end; tile += WARPS * KEY_TILE) {
      state.tile(pages, tile, larger_int(first, tile), smaller_int(end, tile + KEY_TILE), all, scale);
    }
    state.merge_groups();
    if (lane_index() >= state.LANES) return;
    UNROLL
    for (int row = 0; row < ROWS; ++row) {
      const int at = warp_index() * ROWS + row;
      to.largest[at] = state.largest[row];
      to.sum[at] = state.sum[row];
      UNROLL
      for (int i = 0; i < state.DIMENSIONS; ++i) to.out[at * WIDTH + state.dimension(i)] = state.out[row][i];
    }
  }
};

#if TIER >= 80
template <int WIDTH, typename X>
struct MmaMethod {
  MmaRows<WIDTH, X> state;

  DEVICE MmaMethod(const X* q, int rows, int head_dim, X*) { state.load_queries(q, rows, head_dim); }

  DEVICE void split(const Pages<X>& pages, int first, int end, float scale, const Partials<WIDTH>& to) {
    state.clear();
    const int tile = (first / KEY_TILE + warp_index()) * KEY_TILE;
    state.tiles(pages, tile, WARPS * KEY_TILE, first, end, scale);
    const int g = state.g(), t = state.t(), row = warp_index() * ROWS;
    to.largest[row + g] = state.largest;
    to.sum[row + g] = state.whole_sum();
    UNROLL
    for (int block = 0; block < state.BLOCKS; ++block) {
      UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        float* out = to.out + (row + 2 * t + odd) * WIDTH + 64 * block + 8 * g;
        UNROLL
        for (int i = 0; i < 4; ++i) {
          out[2 * i] = state.out[block][i][odd];
          out[2 * i + 1] = state.out[block][i][2 + odd];
        }
      }
    }
  }
};
#endif

// ---- A block

struct DecodeArguments {
  float* workspace;
  uint32* counters;
  AttentionShape shape;
};

// Where the queries of a block are: `rows` heads from `head` on; `item` counts (sequence, kv head, 8 heads).
struct Place {
  int sequence, kv_head, head, rows, item;
};

DEVICE Place place_of_block(const AttentionShape& shape) {
  const int group = shape.heads / shape.kv_heads, tiles = (group + ROWS - 1) / ROWS;
  const int first = block_y() % tiles * ROWS, kv_head = block_y() / tiles;
  const int rows = smaller_int(ROWS, group - first);
  return {block_z(), kv_head, kv_head * group + first, rows, block_z() * grid_y() + block_y()};
}

// Shared memory.
template <int WIDTH, typename X>
struct Room {
  X* queries;  // (ROWS, WIDTH)
  Partials<WIDTH> partials;
  float* total;   // (ROWS, WIDTH)
  float* states;  // (2, ROWS, 2)
};

// One block does all splits, and nothing goes through the workspace. A thread reads its own pairs of the total again;
// the largest scores and the sums are doubled, since all threads of a row read them.
template <int WIDTH, typename Method, typename X>
DEVICE void decode_alone(Method& method, const Pages<X>& pages, const Splits& splits, int rows, float scale,
                         const Room<WIDTH, X>& room, X* out) {
  NO_UNROLL
  for (int split = 0; split < splits.count; ++split) {
    method.split(pages, splits.begin_of(split), splits.end_of(split), scale, room.partials);
    sync_block();
    const float* before = room.states + split % 2 * 2 * ROWS;
    float* after = room.states + (split + 1) % 2 * 2 * ROWS;
    UNROLL
    for (int i = 0; i < Share<WIDTH>::PAIRS; ++i) {
      if (!Share<WIDTH>::has(i, rows, pages.head_dim)) continue;
      const int row = Share<WIDTH>::row(i), dimension = Share<WIDTH>::dimension(i);
      float* own = room.total + row * WIDTH + dimension;
      Softmax all = no_keys();
      if (split > 0) all = {before[2 * row], before[2 * row + 1], {own[0], own[1]}};
      merge(all, merge_warps(room.partials, row, dimension));
      own[0] = all.out[0];
      own[1] = all.out[1];
      if (dimension == 0) {
        after[2 * row] = all.largest;
        after[2 * row + 1] = all.sum;
      }
      if (split == splits.count - 1) {
        store_pair(out + row * pages.head_dim + dimension, all.out[0] / all.sum, all.out[1] / all.sum);
      }
    }
    sync_block();
  }
}

template <int WIDTH, typename Method, typename X>
DEVICE void decode_together(Method& method, const Pages<X>& pages, const Splits& splits, const Place& place,
                            const DecodeArguments& given, const Room<WIDTH, X>& room, X* out) {
  const Workspace workspace = workspace_of(given.workspace, place.sequence, place.head, given.shape);
  int done = 0;
  NO_UNROLL
  for (int split = block_x(); split < splits.count; split += grid_x(), ++done) {
    const float scale = given.shape.scale * log2_e();
    method.split(pages, splits.begin_of(split), splits.end_of(split), scale, room.partials);
    sync_block();
    UNROLL
    for (int i = 0; i < Share<WIDTH>::PAIRS; ++i) {
      if (!Share<WIDTH>::has(i, place.rows, pages.head_dim)) continue;
      const int row = Share<WIDTH>::row(i), dimension = Share<WIDTH>::dimension(i);
      keep(workspace, row, split, dimension, merge_warps(room.partials, row, dimension));
    }
    sync_block();
  }
  if (!arrives_last(given.counters + place.item, done, splits.count)) return;
  merge_splits<WIDTH>(workspace, place.rows, splits.count, room.partials.out, out);
}

template <typename Method, int WIDTH, typename X>
DEVICE void decode(const X* q, const Pages<X>& pages, const Splits& splits, const Place& place,
                   const DecodeArguments& given, const Room<WIDTH, X>& room, X* out) {
  Method method(q, place.rows, pages.head_dim, room.queries);
  if (grid_x() == 1 || splits.count == 1) {
    decode_alone(method, pages, splits, place.rows, given.shape.scale * log2_e(), room, out);
  } else {
    decode_together(method, pages, splits, place, given, room, out);
  }
}

template <int WIDTH, typename X>
DEVICE void attention_decode(const X* q, const X* cache, const int* block_tables, const int* kv_lengths, X* out,
                             const DecodeArguments& given) {
  SHARED_ARRAY(X, queries, ROWS * WIDTH);
  SHARED_ARRAY(float, warps_out, WARPS * ROWS * WIDTH);
  SHARED_ARRAY(float, warps_states, 2 * WARPS * ROWS);
  SHARED_ARRAY(float, total, ROWS* WIDTH);
  SHARED_ARRAY(float, states, 2 * ROWS * 2);
  const Room<WIDTH, X> room = {queries, {warps_states, warps_states + WARPS * ROWS, warps_out}, total, states};
  const AttentionShape& shape = given.shape;
  const Place place = place_of_block(shape);
  const int64 row = (int64(place.sequence) * shape.heads + place.head) * shape.head_dim;
  const int kv_length = kv_lengths[place.sequence];
  if (kv_length <= 0) {
    if (block_x() > 0) return;
    for (int i = thread_index(); i < place.rows * shape.head_dim; i += thread_count()) out[row + i] = X{0};
    return;
  }
  const Splits splits = splits_of(kv_length, shape.window);
  if (block_x() >= splits.count) return;
  const Pages<X> pages = pages_of(cache, block_tables, place.sequence, place.kv_head, shape);
  if (shape.head_dim % WIDE != 0) {
    decode<FmaMethod<WIDTH, 1, X>>(q + row, pages, splits, place, given, room, out + row);
  } else {
#if TIER >= 80
    decode<MmaMethod<WIDTH, X>>(q + row, pages, splits, place, given, room, out + row);
#else
    decode<FmaMethod<WIDTH, WIDE, X>>(q + row, pages, splits, place, given, room, out + row);
#endif
  }
}

KERNEL(128)
void attention_decode_d64_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* kv_lengths,
                              half_t* out, float* workspace, uint32* counters, int heads, int kv_heads, int head_dim,
                              int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_decode<64>(q, cache, block_tables, kv_lengths, out, {workspace, counters, shape});
}

KERNEL(128)
void attention_decode_d64_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables, const int* kv_lengths,
                               bfloat_t* out, float* workspace, uint32* counters, int heads, int kv_heads, int head_dim,
                               int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_decode<64>(q, cache, block_tables, kv_lengths, out, {workspace, counters, shape});
}

KERNEL(128)
void attention_decode_d128_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* kv_lengths,
                               half_t* out, float* workspace, uint32* counters, int heads, int kv_heads, int head_dim,
                               int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_decode<128>(q, cache, block_tables, kv_lengths, out, {workspace, counters, shape});
}

KERNEL(128)
void attention_decode_d128_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables,
                                const int* kv_lengths, bfloat_t* out, float* workspace, uint32* counters, int heads,
                                int kv_heads, int head_dim, int blocks, int block_size, int max_blocks, float scale,
                                int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_decode<128>(q, cache, block_tables, kv_lengths, out, {workspace, counters, shape});
}

KERNEL(128)
void attention_decode_d256_f16(const half_t* q, const half_t* cache, const int* block_tables, const int* kv_lengths,
                               half_t* out, float* workspace, uint32* counters, int heads, int kv_heads, int head_dim,
                               int blocks, int block_size, int max_blocks, float scale, int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_decode<256>(q, cache, block_tables, kv_lengths, out, {workspace, counters, shape});
}

KERNEL(128)
void attention_decode_d256_bf16(const bfloat_t* q, const bfloat_t* cache, const int* block_tables,
                                const int* kv_lengths, bfloat_t* out, float* workspace, uint32* counters, int heads,
                                int kv_heads, int head_dim, int blocks, int block_size, int max_blocks, float scale,
                                int window) {
  const AttentionShape shape = {heads, kv_heads, head_dim, blocks, block_size, max_blocks, scale, window};
  attention_decode<256>(q, cache, block_tables, kv_lengths, out, {workspace, counters, shape});
}
