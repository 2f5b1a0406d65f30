// Attention of 64 queries of one head by 4 warps, with the matrix instructions of t80, after FlashAttention-2 (Dao
// 2023): keys pass in tiles of 64, softmax states and results stay in registers, weights go from one product to the
// next there.
//
// A warp has 16 queries. Tiles of queries, keys and values lie in shared memory, rows padded by 16 bytes so that the
// eight rows of a matrix are in different banks. While a tile is scored its values are on their way, while they are
// mixed the next tile's keys. Tiles begin at multiples of 64 of the positions, and a query's bits do not depend on
// tiles that it does not see: so they do not depend on how a prompt is cut into chunks. Weights are rounded to X before
// they meet the values, the sum of weights is not.
//
// Codes of a cache of C = e4m3_t are copied to where their elements are to be, eight to each 16 bytes, and expanded
// there by the thread that copied them; a row's scale lies in its padding. Scores and weights are multiplied by the
// scales, and weights rounded to bf16 whatever X is.
#pragma once

#include "attention.cuh"

enum : int { TILE = 64, TILE_WARPS = 4 };

// head_dim <= WIDTH, a multiple of 8.
template <int WIDTH, typename X, typename C>
struct Tiles {
  enum : int { STRIDE = WIDTH + 8, FITS = WIDTH <= 128 };  // FITS: the queries, in registers

  X *queries, *keys, *values;  // (TILE, STRIDE)

  DEVICE explicit Tiles(unsigned char* shared)
      : queries(reinterpret_cast<X*>(shared)), keys(queries + TILE * STRIDE), values(keys + TILE * STRIDE) {}

  enum : int { LANES = 8, AT_ONCE = TILE_WARPS * WARP / LANES };  // that copy a row, rows that are copied at a time

  // row_of(row) gives the row's address, or null: then it becomes zero, as all rows do from head_dim on. `anything` is
  // an address that zeros are not read from. Each lane copies eight elements at a time.
  template <typename E, typename RowOf>
  static DEVICE void copy(X* to, const E* anything, int head_dim, RowOf row_of) {
    const int first_row = thread_index() / LANES, first_column = thread_index() % LANES * WIDE;
    UNROLL
    for (int i = 0; i < TILE / AT_ONCE; ++i) {
      const E* from = row_of(first_row + i * AT_ONCE);
      UNROLL
      for (int j = 0; j < WIDTH; j += LANES * WIDE) {
        const int column = first_column + j;
        const bool there = from != nullptr && column < head_dim;
        X* place = to + (first_row + i * AT_ONCE) * STRIDE + column;
        if (column < WIDTH) copy_eight(place, there ? from + column : anything, there);
      }
    }
    commit_copies();
  }
  static DEVICE void copy_eight(X* to, const X* from, bool there) { copy_async(to, from, there ? 16 : 0); }
  static DEVICE void copy_eight(X* to, const e4m3_t* from, bool there) { copy_async_few<8>(to, from, there ? 8 : 0); }

  // Scales, with the next copy: address_of(row) gives the row's, or null.
  template <typename AddressOf>
  static DEVICE void copy_scales(X* to, const float* anything, AddressOf address_of) {
    const int row = thread_index();
    if (row >= TILE) return;
    const float* from = address_of(row);
    copy_async_few<4>(to + row * STRIDE + WIDTH, from != nullptr ? from : anything, from != nullptr ? 4 : 0);
  }
  static DEVICE float scale_of(const X* tile, int row) {
    return *reinterpret_cast<const float*>(tile + row * STRIDE + WIDTH);
  }

  // What this thread copied, once that is there, as elements of M.
  template <typename M>
  static DEVICE void expand(X* tile) {
    NO_UNROLL
    for (int i = 0; i < TILE / AT_ONCE; ++i) {
      UNROLL
      for (int j = 0; j < WIDTH; j += LANES * WIDE) {
        const int row = thread_index() / LANES + i * AT_ONCE, column = thread_index() % LANES * WIDE + j;
        if (column >= WIDTH) continue;
        X* place = tile + row * STRIDE + column;
        store_words4(place, expanded<M>(load_words2(place)));
      }
    }
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
template <int WIDTH, typename X, typename C>
struct TileRows {
  enum : int { STEPS = WIDTH / 16 };
  using Room = Tiles<WIDTH, X, C>;
  using Scores = float[TILE / 8][4];
  using M = typename Mixed<X, C>::Type;

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

  // By the scales of a tile's rows, if it has such.
  static DEVICE void scale_by(const X* tile, Scores& scores) {
    if constexpr (!Stored<C>::SCALED) return;
    UNROLL
    for (int i = 0; i < TILE / 4; ++i) {
      const float scale = Room::scale_of(tile, i / 2 * 8 + lane_index() % 4 * 2 + i % 2);
      scores[i / 2][i % 2] *= scale;
      scores[i / 2][2 + i % 2] *= scale;
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
      // A tile that shows nothing larger changes no bit: the product's rounding must not come back as a factor.
      const float old = highest == largest[half] ? 1.0f : power_of_two(fused_multiply_add(largest[half], scale, -base));
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
      const uint32 a[4] = {rounded_pair<M>(left[0], left[1]), rounded_pair<M>(left[2], left[3]),
                           rounded_pair<M>(right[0], right[1]), rounded_pair<M>(right[2], right[3])};
      UNROLL
      for (int step = 0; step < STEPS; ++step) {
        uint32 values[4];
        load_matrices<true>(values, room.upper_first(room.values), room.part(i, step));
        const uint32 first[2] = {values[0], values[1]}, second[2] = {values[2], values[3]};
        mma_16816(out[2 * step], a, first, M());
        mma_16816(out[2 * step + 1], a, second, M());
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
      const float scale = float(Stored<C>::UNIT) / all;
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
template <int WIDTH, typename X, typename C>
DEVICE void attend_tiles(const X* q, X* out, int64 stride, int rows, int position, const Pages<C>& pages, int window,
                         float scale) {
  using State = TileRows<WIDTH, X, C>;
  DYNAMIC_SHARED(shared);
  const Tiles<WIDTH, X, C> room(shared);
  const int head_dim = pages.head_dim, first = first_seen(position, window), end = position + rows;
  const int own_rows = rows - warp_index() * 16, own_position = position + warp_index() * 16;
  const auto copy = [&](X* to, int tile, int64 offset) {
    const auto there = [&](int row) { return tile + row >= first && tile + row < end; };
    if constexpr (Stored<C>::SCALED) {
      room.copy_scales(to, pages.scales,
                       [&](int row) { return there(row) ? pages.scales + (pages.row(tile + row) + offset) : nullptr; });
    }
    room.copy(to, pages.cache, head_dim, [&](int row) {
      return there(row) ? pages.cache + offset * head_dim + pages.row(tile + row) * head_dim : nullptr;
    });
  };
  room.copy(room.queries, q, head_dim, [&](int row) { return row < rows ? q + row * stride : nullptr; });
  copy(room.keys, first / TILE * TILE, 0);
  wait_copies<0>();
  sync_block();
  State state(room);
  NO_UNROLL
  for (int tile = first / TILE * TILE; tile < end; tile += TILE) {
    wait_copies<0>();
    if constexpr (Stored<C>::SCALED) room.template expand<X>(room.keys);
    sync_block();  // the keys are there, and the values of the tile before are no longer needed
    copy(room.values, tile, pages.to_values);
    typename State::Scores scores;
    state.score(room, scores);
    state.scale_by(room.keys, scores);
    const bool edge = tile + TILE - 1 > own_position || (window != 0 && tile <= own_position + 15 - window);
    if (edge) state.hide({own_position, 1, window}, tile, scores);
    state.weigh(scale * float(Stored<C>::UNIT), scores);
    wait_copies<0>();
    if constexpr (Stored<C>::SCALED) room.template expand<typename State::M>(room.values);
    sync_block();  // the values are there, and the keys no longer needed
    if (tile + TILE < end) copy(room.keys, tile + TILE, 0);
    state.scale_by(room.values, scores);
    state.mix(room, scores);
  }
  state.store(out + warp_index() * 16 * stride, stride, own_rows, head_dim);
}
