// The body of attention_decode.cu and attention_decode_e4m3.cu, over the cache's element C.
#pragma once

#include "attention_fma.cuh"
#include "attention_splits.cuh"
#include "attention_work.cuh"
#if TIER >= 80
#include "attention_decode_mma.cuh"
#endif

// ---- Rounds. Both methods take the splits of a block in rounds, and leave Partials of their warps.

template <int WIDTH, int N, typename X, typename C = X>
struct FmaMethod {
  enum : int { PARTIALS = WARPS * ROWS * Partials<WIDTH>::STRIDE };  // floats that it needs to leave them in

  const Pages<C>& pages;
  Walk<false> walk;
  const X* queries;
  int rows;

  DEVICE FmaMethod(const Pages<C>& pages, const Splits& splits, int first, int last, unsigned char*, int)
      : pages(pages), walk(splits, first, last) {}

  static DEVICE float* room(float* partials, unsigned char*) { return partials; }

  DEVICE void fetch(int) {}

  DEVICE void take(const X* q, int count, int head_dim, X* put) {
    put_queries<WIDTH>(q, head_dim, count, head_dim, put, thread_index(), thread_count());
    sync_block();
    queries = put;
    rows = count;
  }

  DEVICE int splits_of_round() const { return walk.splits_of_round(); }

  DEVICE void round(float scale, const Partials<WIDTH>& to) {
    const int begin = walk.splits.begin_of(walk.split());
    const Sight all = {walk.end - 1, 0, 0};
    if (lane_index() == 0) to.begins[warp_index()] = warp_index() * ROWS * to.STRIDE;
    NO_UNROLL
    for (int from = 0; from < rows; from += FMA_ROWS) {
      FmaRows<WIDTH, N, X, C> state(queries + from * WIDTH, smaller_int(FMA_ROWS, rows - from));
      NO_UNROLL
      for (int tile = walk.tile; tile < walk.end; tile += WARPS * KEY_TILE) {
        state.tile(pages, tile, larger_int(begin, tile), smaller_int(walk.end, tile + KEY_TILE), all, scale);
      }
      state.merge_groups();
      if (lane_index() < state.LANES) leave(state, warp_index() * ROWS + from, to);
    }
    walk.next_round();
  }

  static DEVICE void leave(const FmaRows<WIDTH, N, X, C>& state, int at, const Partials<WIDTH>& to) {
    UNROLL
    for (int row = 0; row < FMA_ROWS; ++row) {
      to.largest[at + row] = state.largest[row];
      to.sum[at + row] = state.sum[row];
      UNROLL
      for (int i = 0; i < state.DIMENSIONS; ++i) {
        to.out[(at + row) * to.STRIDE + state.dimension(i)] = state.out[row][i];
      }
    }
  }
};

#if TIER >= 80
template <int WIDTH, typename X, typename C = X>
struct MmaMethod {
  using Rows = MmaRows<WIDTH, X, C>;
  using Stages = Ring<WIDTH, C>;
  enum : int { PARTIALS = 4 };  // none: they are left in the ring
  static_assert(ROWS * Partials<WIDTH>::STRIDE * 4 <= Stages::STAGE, "a warp's results fit into a stage");

  const Pages<C>& pages;
  Walk<Rows::FITS> to_fetch, to_use;
  int block;  // of the tile to fetch
  Ring<WIDTH, C> ring;
  Rows state;

  DEVICE MmaMethod(const Pages<C>& pages, const Splits& splits, int first, int last, unsigned char* memory, int stages)
      : pages(pages), to_fetch(splits, first, last), to_use(to_fetch), ring(memory, stages) {
    find_next();
  }

  static DEVICE float* room(float*, unsigned char* ring) { return reinterpret_cast<float*>(ring); }

  // To where the walk has a tile. Its block is read now, and used when the next tile is fetched.
  DEVICE void find_next() {
    to_fetch.seek();
    if (to_fetch.has_tile()) block = pages.block_of(to_fetch.tile);
  }

  DEVICE void fetch_tile() {
    if (to_fetch.has_tile()) {
      const int64 row = pages.row_in(block, to_fetch.tile);
      Rows::copy(pages, row, to_fetch.lowest(), to_fetch.highest(), ring.stage_to_fill());
      to_fetch.next_tile();
      find_next();
    }
    ring.filled();
  }

  // As many tiles as there is room for, of those that lie before key `known`. All of the ring, unless the warp has none in
  // the first round: then it needs a stage to leave that in.
  DEVICE void fetch(int known) {
    const int most = to_use.has_tile() ? ring.stages : ring.stages - 1;
    NO_UNROLL
    while (ring.ahead < most && (!to_fetch.has_tile() || to_fetch.tile + KEY_TILE <= known)) fetch_tile();
  }

  DEVICE void take(const X* q, int rows, int head_dim, X* put) { state.take(q, rows, head_dim, put); }

  DEVICE int splits_of_round() const { return to_use.splits_of_round(); }

  // A warp that has a split alone merges its shares as merge_warps merges those of four.
  DEVICE void round(float scale, const Partials<WIDTH>& to) {
    Found<WIDTH> split;
    split.clear();
    bool behind = false;
    NO_UNROLL
    do {
      take_share(scale);
      if (behind) {
        split.add(state.found);
      } else {
        split = state.found;
      }
      behind = true;
    } while (to_use.next_share());
    leave(split, to);
    to_use.next_round();
  }

  DEVICE void take_share(float scale) {
    state.found.clear();
    NO_UNROLL
    for (; to_use.has_tile(); to_use.next_tile()) {
      if (ring.ahead < ring.stages) fetch_tile();
      state.tile(ring.stage_to_use(), to_use.lowest(), to_use.highest(), scale);
      ring.used();
    }
    state.end();
  }

  // Into the stage that is filled next.
  DEVICE void leave(const Found<WIDTH>& split, const Partials<WIDTH>& to) const {
    const int g = Rows::g(), t = Rows::t(), row = warp_index() * ROWS + g;
    float* rows = reinterpret_cast<float*>(ring.memory + ring.next);
    sync_warp();  // all lanes have read what they had there
    if (lane_index() == 0) to.begins[warp_index()] = int(rows - to.out);
    to.largest[row] = split.largest;
    to.sum[row] = split.sum;
    UNROLL
    for (int i = 0; i < 4 * Rows::BLOCKS; ++i) {  // of a query, four dimensions
      const int block = i / 4, odd = i / 2 % 2, pair = i % 2 * 2;
      const float (&found)[4][4] = split.out[block];
      const Pack<float, 4> own = {
          {found[pair][odd], found[pair][2 + odd], found[pair + 1][odd], found[pair + 1][2 + odd]}};
      store(rows + (2 * t + odd) * to.STRIDE + 64 * block + 8 * g + 2 * pair, own);
    }
  }
};
#endif

// ---- A block

struct DecodeArguments {
  float* workspace;
  uint32* counters;
  AttentionShape shape;
  int stages;
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
  unsigned char* ring;
};

// Splits that a block has done at a time: one by all its warps, or one a warp.
struct Round {
  int first, count, number;
};

// The splits' results go to the workspace or, if the block is alone, into its total, and after the last split out. A
// thread keeps to its own pairs of `total`; the largest scores and the sums are doubled, since all threads of a row
// read them.
template <int WIDTH, typename X>
DEVICE void end_round(const Room<WIDTH, X>& room, bool alone, const Round& round, int splits, int rows,
                      const Workspace& workspace, X* out) {
  const Words4 begins = load_words4(room.partials.begins);
  const float* before = room.states + round.number % 2 * 2 * ROWS;
  float* after = room.states + (round.number + 1) % 2 * 2 * ROWS;
  NO_UNROLL
  for (int i = 0; Share<WIDTH>::row(i) < rows; ++i) {
    if (!Share<WIDTH>::has(i, rows, workspace.head_dim)) continue;
    const int row = Share<WIDTH>::row(i), dimension = Share<WIDTH>::dimension(i);
    float* own = room.total + row * WIDTH + dimension;
    Softmax all = {before[2 * row], before[2 * row + 1], {own[0], own[1]}};
    NO_UNROLL
    for (int j = 0; j < round.count; ++j) {
      const Softmax found = round.count == 1 ? merge_warps(room.partials, begins, row, dimension)
                                             : room.partials.of(j, room.partials.begins[j], row, dimension);
      if (!alone) {
        keep(workspace, row, round.first + j, dimension, found);
      } else {
        all = round.first + j > 0 ? merged(all, found) : found;
      }
    }
    if (!alone) continue;
    own[0] = all.out[0];
    own[1] = all.out[1];
    if (dimension == 0) {
      after[2 * row] = all.largest;
      after[2 * row + 1] = all.sum;
    }
    X* to = out + row * workspace.head_dim + dimension;
    if (round.first + round.count == splits) store_pair(to, all.out[0] / all.sum, all.out[1] / all.sum);
  }
}

// The item's splits. If those are all of the sequence's, nothing goes through the workspace. Before the previous grid
// has ended, only what earlier steps and begin_step wrote is read: the product before that grid waited for them.
template <typename Method, int WIDTH, typename X, typename C>
DEVICE void decode(const X* q, const C* cache, const int* block_tables, const DecodeItem& item,
                   const DecodeArguments& given, const Room<WIDTH, X>& room, X* out) {
  const AttentionShape& shape = given.shape;
  const Place place = place_of_block(item.sequence, shape);
  const Pages<C> pages = pages_of(cache, given.scales, block_tables, item.sequence, place.kv_head, shape);
  const Splits splits = splits_of(item.kv_length, shape.window);
  const Workspace workspace = workspace_of(given.workspace, item.sequence, place.head, shape);
  const int64 row = (int64(item.row) * shape.heads + place.head) * shape.head_dim;
  const bool alone = item.end - item.first == splits.count;
  const float scale = shape.scale * log2_e();
  Method method(pages, splits, item.first, item.end, room.ring, given.stages);
  method.fetch(item.kv_length - item.fresh);
  wait_for_previous_grid();
  method.fetch(item.kv_length + KEY_TILE);
  method.take(q + row, place.rows, shape.head_dim, room.queries);
  Round round = {item.first, 0, 0};
  NO_UNROLL
  for (; round.first < item.end; round.first += round.count, ++round.number) {
    round.count = method.splits_of_round();
    method.round(scale, room.partials);
    sync_block();
    end_round(room, alone, round, splits.count, place.rows, workspace, out + row);
    sync_block();
  }
  start_next_grid();  // not before: its blocks would crowd on the SMs that this one leaves free
  if (alone || !arrives_last(given.counters + place.counter, item.end - item.first, splits.count)) return;
  merge_splits<WIDTH>(workspace, place.rows, splits.count, room.partials.out, out + row);
}

template <typename Method, int WIDTH, typename X, typename C>
DEVICE void attention_decode(const X* q, const C* cache, const int* block_tables, const int* work, X* out,
                             const DecodeArguments& given) {
  SHARED_ARRAY(X, queries, ROWS * WIDTH);
  SHARED_ARRAY(float, warps_out, Method::PARTIALS);
  SHARED_ARRAY(float, warps_states, 2 * WARPS * ROWS);
  SHARED_ARRAY(int, begins, WARPS);
  SHARED_ARRAY(float, total, ROWS* WIDTH);
  SHARED_ARRAY(float, states, 2 * ROWS * 2);
  DYNAMIC_SHARED(ring);
  float* out_of_warps = Method::room(warps_out, ring);
  const Partials<WIDTH> partials = {warps_states, warps_states + WARPS * ROWS, begins, out_of_warps};
  const Room<WIDTH, X> room = {queries, partials, total, states, ring};
  const DecodeItem item = decode_item(work, block_x());
  if (block_x() < item_count(work)) return decode<Method>(q, cache, block_tables, item, given, room, out);
  wait_for_previous_grid();  // so that the end of this grid is the end of all before it
}

#if TIER >= 80
template <int WIDTH, typename X, typename C = X>
using WideMethod = MmaMethod<WIDTH, X, C>;
#else
template <int WIDTH, typename X, typename C = X>
using WideMethod = FmaMethod<WIDTH, WIDE, X, C>;
#endif
