// Attention of 64 queries of one head by 4 warps, with the matrix instructions of t80, after FlashAttention-2 (Dao
// 2023): keys pass in tiles of 64, softmax states and results stay in registers, weights go from one product to the
// next there.
//
// A warp has 16 queries. Tiles of queries, keys and values lie in shared memory, rows padded by 16 bytes so that the
// eight rows of a matrix are in different banks. While a tile is scored its values are on their way, while they are
// mixed the next tile's keys. Tiles begin at multiples of 64 of the positions, and a query's bits do not depend on
// tiles that it does not see: so they do not depend on how a prompt is cut into chunks. Weights are rounded to X before
// they meet the values, the sum of weights is not.
#pragma once

#include "attention.cuh"

enum : int { TILE = 64, TILE_WARPS = 4 };

// head_dim <= WIDTH, a multiple of 8.
template <int WIDTH, typename X>
struct Tiles {
  enum : int { STRIDE = WIDTH + 8, FITS = WIDTH <= 128 };  // FITS: the queries, in registers

  X *queries, *keys, *values;  // (TILE, STRIDE)

  DEVICE explicit Tiles(unsigned char* shared)
      : queries(reinterpret_cast<X*>(shared)), keys(queries + TILE * STRIDE), values(keys + TILE * STRIDE) {}

  // row_of(row) gives the row's address, or null: then it becomes zero, as all rows do from head_dim on. `anything` is
  // an address that zeros are not read from. Eight lanes copy 128 bytes of a row at a time.
  template <typename RowOf>
  static DEVICE void copy(X* to, const X* anything, int head_dim, RowOf row_of) {
    enum : int { LANES = 8, AT_ONCE = TILE_WARPS * WARP / LANES };
    const int first_row = thread_index() / LANES, first_column = thread_index() % LANES * WIDE;
    UNROLL
    for (int i = 0; i < TILE / AT_ONCE; ++i) {
      const X* from = row_of(first_row + i * AT_ONCE);
      UNROLL
      for (int j = 0; j < WIDTH; j += LANES * WIDE) {
        const int column = first_column + j;
        const bool there = from != nullptr && column < head_dim;
        X* place = to + (first_row + i * AT_ONCE) * STRIDE + column;
        if (column < WIDTH) copy_async(place, there ? from + column : anything, there ? 16 : 0);
      }
    }
    commit_copies();
  }

  // Where this lane's row of a (16, 16) part's four matrices is in the first part, the upper matrices first or the left
  // ones; and how many bytes beyond it is another part's.
  static DEVICE const X* upper_first(const X* tile) {
    return tile + lane_index() % 16 * STRIDE + lane_index() / 16 * 8;
  }
  static DEVICE const X* left_first(const X* tile) {
    return tile + (lane_index() / 16 * 8 + lane_index() % 8) * STRIDE + lane_index() / 8 % 2 * 8;
  }
  static DEVICE int part(int row, int column) { return (row * STRIDE + column) * 16 * int(sizeof(X)); }
};

// The state of a warp's queries. Lane 4 g + t holds, of queries g and g + 8, columns 2 t and 2 t + 1 of every eight.
template <int WIDTH, typename X>
struct TileRows {
  enum : int { STEPS = WIDTH / 16 };
  using Room = Tiles<WIDTH, X>;
  using Scores = float[TILE / 8][4];

  uint32 query[Room::FITS ? STEPS : 1][4];
  float out[WIDTH / 8][4];
  float largest[2], sum[2];  // of queries g and g + 8; the sum is only that of this lane's keys

  DEVICE explicit TileRows(const Room& room) {
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
      if constexpr (Room::FITS) load_query(room, step, query[step]);
    }
    UNROLL
    for (int i = 0; i < WIDTH / 2; ++i) out[i / 4][i % 4] = 0.0f;
    UNROLL
    for (int half = 0; half < 2; ++half) {
      largest[half] = minus_infinity();
      sum[half] = 0.0f;
    }
  }

  static DEVICE void load_query(const Room& room, int step, uint32 (&to)[4]) {
    load_matrices(to, room.upper_first(room.queries + warp_index() * 16 * Room::STRIDE), room.part(0, step));
  }

  DEVICE void score(const Room& room, Scores& scores) {
    UNROLL
    for (int i = 0; i < TILE / 2; ++i) scores[i / 4][i % 4] = 0.0f;
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
      if constexpr (!Room::FITS) load_query(room, step, query[0]);
      UNROLL
      for (int i = 0; i < TILE / 16; ++i) {
        uint32 keys[4];
        load_matrices(keys, room.left_first(room.keys), room.part(i, step));
        const uint32 first[2] = {keys[0], keys[1]}, second[2] = {keys[2], keys[3]};
        mma_16816(scores[2 * i], query[Room::FITS ? step : 0], first, X());
        mma_16816(scores[2 * i + 1], query[Room::FITS ? step : 0], second, X());
      }
    }
  }

  // Row 0 of `sight` is the warp's first query.
  static DEVICE void hide(const Sight& sight, int tile, Scores& scores) {
    UNROLL
    for (int i = 0; i < TILE / 2; ++i) {
      const int row = lane_index() / 4 + i % 4 / 2 * 8, key = tile + i / 4 * 8 + lane_index() % 4 * 2 + i % 2;
      if (!sight.sees(row, key)) scores[i / 4][i % 4] = minus_infinity();
    }
  }

  // Scores become weights; the state so far is rescaled. `largest` is kept without the scale, which is positive.
  DEVICE void weigh(float scale, Scores& scores) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      float highest = largest[half];
      UNROLL
      for (int i = 0; i < TILE / 4; ++i) highest = larger(highest, scores[i / 2][2 * half + i % 2]);
      UNROLL
      for (int apart = 1; apart < 4; apart *= 2) highest = larger(highest, shuffle_xor(highest, apart));
      const float base = base_of(highest) * scale;
      const float old = power_of_two(fused_multiply_add(largest[half], scale, -base));
      largest[half] = highest;
      sum[half] *= old;
      UNROLL
      for (int i = 0; i < TILE / 4; ++i) {
        float& weight = scores[i / 2][2 * half + i % 2];
        weight = power_of_two(fused_multiply_add(weight, scale, -base));
        sum[half] += weight;
      }
      UNROLL
      for (int i = 0; i < WIDTH / 4; ++i) out[i / 2][2 * half + i % 2] *= old;
    }
  }

  DEVICE void mix(const Room& room, const Scores& weights) {
    UNROLL
    for (int i = 0; i < TILE / 16; ++i) {
      const float (&left)[4] = weights[2 * i], (&right)[4] = weights[2 * i + 1];
      const uint32 a[4] = {rounded_pair<X>(left[0], left[1]), rounded_pair<X>(left[2], left[3]),
                           rounded_pair<X>(right[0], right[1]), rounded_pair<X>(right[2], right[3])};
      UNROLL
      for (int step = 0; step < STEPS; ++step) {
        uint32 values[4];
        load_matrices<true>(values, room.upper_first(room.values), room.part(i, step));
        const uint32 first[2] = {values[0], values[1]}, second[2] = {values[2], values[3]};
        mma_16816(out[2 * step], a, first, X());
        mma_16816(out[2 * step + 1], a, second, X());
      }
    }
  }

  // The first `rows` of the warp's queries; to: the first one's place.
  DEVICE void store(X* to, int64 stride, int rows, int head_dim) const {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane_index() / 4 + half * 8;
      float all = sum[half] + shuffle_xor(sum[half], 1);
      all += shuffle_xor(all, 2);
      const float scale = 1.0f / all;
      UNROLL
      for (int i = 0; i < WIDTH / 8; ++i) {
        const int column = i * 8 + lane_index() % 4 * 2;
        if (row >= rows || column >= head_dim) continue;
        store_pair(to + row * stride + column, out[i][2 * half] * scale, out[i][2 * half + 1] * scale);
      }
    }
  }
};

// Queries [first, first + rows) of a sequence, `position` the first one's; q and out: its place in them.
template <int WIDTH, typename X>
DEVICE void attend_tiles(const X* q, X* out, int64 stride, int rows, int position, const Pages<X>& pages, int window,
                         float scale) {
  DYNAMIC_SHARED(shared);
  const Tiles<WIDTH, X> room(shared);
  const int head_dim = pages.head_dim, first = first_seen(position, window), end = position + rows;
  const int own_rows = rows - warp_index() * 16, own_position = position + warp_index() * 16;
  const auto copy = [&](X* to, int tile, int64 offset) {
    room.copy(to, pages.cache, head_dim, [&](int row) {
      const int key = tile + row;
      return key >= first && key < end ? pages.key(key) + offset : nullptr;
    });
  };
  room.copy(room.queries, pages.cache, head_dim, [&](int row) { return row < rows ? q + row * stride : nullptr; });
  copy(room.keys, first / TILE * TILE, 0);
  wait_copies<0>();
  sync_block();
  TileRows<WIDTH, X> state(room);
  NO_UNROLL
  for (int tile = first / TILE * TILE; tile < end; tile += TILE) {
    wait_copies<0>();
    sync_block();  // the keys are there, and the values of the tile before are no longer needed
    copy(room.values, tile, pages.to_values);
    typename TileRows<WIDTH, X>::Scores scores;
    state.score(room, scores);
    const bool edge = tile + TILE - 1 > own_position || (window != 0 && tile <= own_position + 15 - window);
    if (edge) state.hide({own_position, 1, window}, tile, scores);
    state.weigh(scale, scores);
    wait_copies<0>();
    sync_block();  // the values are there, and the keys no longer needed
    if (tile + TILE < end) copy(room.keys, tile + TILE, 0);
    state.mix(room, scores);
  }
  state.store(out + warp_index() * 16 * stride, stride, own_rows, head_dim);
}
