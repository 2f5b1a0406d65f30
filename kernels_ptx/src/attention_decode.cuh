// The body of attention_decode.cu and attention_decode_e4m3.cu, over the cache's element C.
#pragma once

#include "attention_fma.cuh"
#include "attention_splits.cuh"
#include "attention_work.cuh"
#if TIER >= 80
#include "attention_decode_mma.cuh"
#endif

// ---- A split, by all warps: every fourth tile is a warp's. Both methods leave Partials of their warps.

template <int WIDTH, int N, typename X, typename C = X>
struct FmaMethod {
  enum : bool { TAKES_WHOLE = false };

  const X* queries;
  int rows;

  DEVICE void load_ahead(const Pages<C>&, int, int, int, int) {}
  DEVICE void whole(const Pages<C>&, int, int, float, const Partials<WIDTH>&) {}

  DEVICE void take(const X* q, int count, int head_dim, X* put) {
    put_queries<WIDTH>(q, head_dim, count, head_dim, put, thread_index(), thread_count());
    sync_block();
    queries = put;
    rows = count;
  }

  DEVICE void split(const Pages<C>& pages, int first, int end, float scale, const Partials<WIDTH>& to) {
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
template <int WIDTH, typename X, typename C = X>
struct MmaMethod {
  using Rows = MmaRows<WIDTH, X, C>;
  enum : bool { TAKES_WHOLE = Rows::FITS };

  Rows state;

  static DEVICE int first_tile(int first, int share) { return (first / KEY_TILE + share) * KEY_TILE; }

  // Of share `share` of the split [first, end), with which the next call begins, what lies before key `known`.
  DEVICE void load_ahead(const Pages<C>& pages, int first, int end, int share, int known) {
    const int tile = first_tile(first, share);
    if (tile < end && tile + KEY_TILE <= known) state.load_ahead(pages, tile, first, end);
  }

  DEVICE void take(const X* q, int rows, int head_dim, X* put) { state.take(q, rows, head_dim, put); }

  DEVICE void share_of(const Pages<C>& pages, int first, int end, int share, float scale) {
    state.clear();
    state.tiles(pages, first_tile(first, share), WARPS * KEY_TILE, first, end, scale);
  }

  DEVICE void split(const Pages<C>& pages, int first, int end, float scale, const Partials<WIDTH>& to) {
    share_of(pages, first, end, warp_index(), scale);
    leave(to, false);
  }

  // A split by this warp alone, with the bits that all warps and merge_warps give it.
  DEVICE void whole(const Pages<C>& pages, int first, int end, float scale, const Partials<WIDTH>& to) {
    NO_UNROLL
    for (int share = 0; share < WARPS; ++share) {
      share_of(pages, first, end, share, scale);
      if (share + 1 < WARPS) load_ahead(pages, first, end, share + 1, end + KEY_TILE);
      leave(to, share > 0);
    }
  }

  // What was found becomes the warp's part of `to`, or goes behind what is there as `merged` does it.
  DEVICE void leave(const Partials<WIDTH>& to, bool behind) const {
    const int g = Rows::g(), t = Rows::t(), row = warp_index() * ROWS;
    float largest = state.largest, sum = state.whole_sum(), old[2] = {}, fresh[2] = {};  // of queries 2 t and 2 t + 1
    if (behind) {
      const float before = to.largest[row + g], highest = larger(before, largest), base = base_of(highest);
      const float of_before = power_of_two(before - base), of_found = power_of_two(largest - base);
      largest = highest;
      sum = to.sum[row + g] * of_before + sum * of_found;
      UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        old[odd] = shuffle(of_before, 8 * t + 4 * odd);
        fresh[odd] = shuffle(of_found, 8 * t + 4 * odd);
      }
    }
    sync_warp();  // four lanes have read what each of them writes
    to.largest[row + g] = largest;
    to.sum[row + g] = sum;
    UNROLL
    for (int i = 0; i < 4 * Rows::BLOCKS; ++i) {  // of a query, four dimensions
      const int block = i / 4, odd = i / 2 % 2, pair = i % 2 * 2;
      const float (&found)[4][4] = state.out[block];
      float* out = to.row(row + 2 * t + odd) + 64 * block + 8 * g + 2 * pair;
      Pack<float, 4> own = {{found[pair][odd], found[pair][2 + odd], found[pair + 1][odd], found[pair + 1][2 + odd]}};
      if (behind) {
        const Pack<float, 4> before = load<4>(out);
        UNROLL
        for (int j = 0; j < 4; ++j) own.at[j] = before.at[j] * old[odd] + own.at[j] * fresh[odd];
      }
      store(out, own);
    }
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
      const Softmax found =
          round.count == 1 ? merge_warps(room.partials, row, dimension) : room.partials.of(j, row, dimension);
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
  const auto is_wide = [&](int split) { return Method::TAKES_WHOLE && item.end - split >= WARPS; };
  const auto own_split = [&](int split) { return is_wide(split) ? split + warp_index() : split; };
  Method method;
  const int ahead = own_split(item.first), share = is_wide(item.first) ? 0 : warp_index();
  method.load_ahead(pages, splits.begin_of(ahead), splits.end_of(ahead), share, item.kv_length - item.fresh);
  wait_for_previous_grid();
  method.take(q + row, place.rows, shape.head_dim, room.queries);
  Round round = {item.first, 0, 0};
  NO_UNROLL
  for (; round.first < item.end; round.first += round.count, ++round.number) {
    const int split = own_split(round.first);
    round.count = is_wide(round.first) ? WARPS : 1;
    if (round.count == 1) {
      method.split(pages, splits.begin_of(split), splits.end_of(split), scale, room.partials);
    } else {
      method.whole(pages, splits.begin_of(split), splits.end_of(split), scale, room.partials);
    }
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
  SHARED_ARRAY(float, warps_out, WARPS * ROWS * Partials<WIDTH>::STRIDE);
  SHARED_ARRAY(float, warps_states, 2 * WARPS * ROWS);
  SHARED_ARRAY(float, total, ROWS* WIDTH);
  SHARED_ARRAY(float, states, 2 * ROWS * 2);
  const Room<WIDTH, X> room = {queries, {warps_states, warps_states + WARPS * ROWS, warps_out}, total, states};
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
