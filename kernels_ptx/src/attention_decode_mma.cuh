// Attention of up to 8 queries at one position over one head's keys by one warp, with the matrix instructions of t80.
//
// Scores S^T (keys, queries) = k q^T; out^T (dimensions, queries) = v^T P^T: keys, then dimensions are the 16 rows of a
// product, queries its 8 columns. S^T in the layout of d, its weights in pairs, is turned by eights into P^T in the layout
// of b. A sum does not care for the order of its terms, nor does out^T for the order of its rows: so that every lane loads
// 16 bytes straight into its fragments, the terms are permuted alike in q and k, and the rows are undone when they are
// stored. Weights are rounded to X before they meet the values, the sum of weights is not. Codes of a cache of C = e4m3_t
// are expanded in registers; their values' scales go into the weights, which are rounded to bf16 whatever X is.
//
// Lane 4 g + t, in steps of 32 dimensions: of q and k, dimensions 8 t.. of query g and of keys g and g + 8; in blocks
// of 64: of v, dimensions 8 g.. of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9. Scores and state: of queries 2 t and 2 t + 1.
#pragma once

#include "attention_splits.cuh"

DEVICE uint32 lower_halves(uint32 first, uint32 second) { return chosen_bytes(first, second, 0x5410); }
DEVICE uint32 upper_halves(uint32 first, uint32 second) { return chosen_bytes(first, second, 0x7632); }

// Eight elements of a cache, as loaded: from shared memory, or from the cache itself, where they are read once.
template <typename C>
struct Eight {
  Words4 words;

  template <bool SHARED>
  DEVICE void load(const C* from) {
    words = SHARED ? load_words4(from) : load_words4_once(from);
  }
  template <typename X>
  DEVICE Words4 elements() const {
    return words;
  }
};
template <>
struct Eight<e4m3_t> {
  Words2 words;

  template <bool SHARED>
  DEVICE void load(const e4m3_t* from) {
    words = SHARED ? load_words2(from) : load_words2_once(from);
  }
  template <typename X>
  DEVICE Words4 elements() const {
    return expanded<X>(words);
  }
};

// Element i of both, the first's in the lower half.
template <typename M, typename C>
DEVICE uint32 pair_of(const Eight<C>& first, const Eight<C>& second, int i) {
  const uint32 a = first.words.word[i / 2], b = second.words.word[i / 2];
  return i % 2 ? upper_halves(a, b) : lower_halves(a, b);
}
template <typename M>
DEVICE uint32 pair_of(const Eight<e4m3_t>& first, const Eight<e4m3_t>& second, int i) {
  const uint32 codes = chosen_bytes(first.words.word[i / 4], second.words.word[i / 4], 0x4000 + i % 4 * 0x1010);
  return expanded_pair(codes, M());
}

// A tile's keys or its values: rows of head_dim elements and, of codes, the scale of each. Rows lowest..highest count.
template <typename C>
struct Tile {
  const C* rows;
  const float* scales;
  int head_dim, lowest, highest;

  // Whether all of it counts, and is as wide as it may be: then a lane's places are one address and constants.
  DEVICE bool is_plain(int width) const { return lowest == 0 && highest == KEY_TILE - 1 && head_dim == width; }
  // Of a row that counts.
  DEVICE const C* row(int number) const { return rows + larger_int(lowest, smaller_int(number, highest)) * head_dim; }
};

template <typename C>
DEVICE Tile<C> tile_of(const Pages<C>& pages, int64 row, int lowest, int highest) {
  return {pages.cache + row * pages.head_dim, pages.scales + row, pages.head_dim, lowest, highest};
}

// The scales of keys g and g + 8 of a tile, or of their values.
template <typename C>
struct TileScales {
  DEVICE void load(const Tile<C>&) {}
  DEVICE float times(float value, int) const { return value; }
};
template <>
struct TileScales<e4m3_t> {
  float at[2];

  // Those that do not count may be anything, and count as 0.
  DEVICE void load(const Tile<e4m3_t>& tile) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const int key = lane_index() / 4 + half * 8;
      const bool counts = key >= tile.lowest && key <= tile.highest;
      at[half] = counts ? tile.scales[key] * Stored<e4m3_t>::UNIT : 0.0f;
    }
  }
  DEVICE float times(float value, int half) const { return value * at[half]; }
};

// head_dim <= WIDTH, a multiple of 8.
template <int WIDTH, typename X, typename C>
struct MmaRows {
  enum : int { STEPS = WIDTH / 32, BLOCKS = WIDTH / 64, FITS = WIDTH <= 128 };  // FITS: queries in registers
  using M = typename Mixed<X, C>::Type;

  struct Keys {
    Eight<C> part[STEPS][2];
    TileScales<C> scales;
  };
  struct Values {
    Eight<C> part[BLOCKS][4];
    TileScales<C> scales;
  };

  const X* queries;
  Words4 query[STEPS];
  float out[BLOCKS][4][4];
  float largest[2], sum[2];  // the sums are only those of this lane's keys

  static DEVICE int g() { return lane_index() / 4; }
  static DEVICE int t() { return lane_index() % 4; }

  // In shared memory, (ROWS, WIDTH). Rows where no query was put give results that nobody stores.
  DEVICE Words4 query_part(int step) const { return load_words4(queries + g() * WIDTH + 32 * step + 8 * t()); }

  // q: (rows, head_dim). put: memory for as many queries as registers have no room for.
  DEVICE void take(const X* q, int rows, int head_dim, X* put) {
    queries = put;
    if (!FITS) {
      put_queries<WIDTH>(q, head_dim, rows, head_dim, put, thread_index(), thread_count());
      sync_block();
      return;
    }
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
      const int dimension = 32 * step + 8 * t();
      const bool there = g() < rows && dimension < head_dim;
      query[step] = there ? load_words4(q + g() * head_dim + dimension) : Words4{};
    }
  }

  DEVICE void clear() {
    UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      largest[odd] = minus_infinity();
      sum[odd] = 0.0f;
    }
    UNROLL
    for (int i = 0; i < 16 * BLOCKS; ++i) out[i / 16][i / 4 % 4][i % 4] = 0.0f;
  }

  // Beyond head_dim, real elements: the query is zero there.
  template <bool SHARED>
  static DEVICE void load_keys(const Tile<C>& tile, Keys& keys) {
    keys.scales.load(tile);
    if (tile.is_plain(WIDTH)) {
      const C* own = tile.rows + g() * WIDTH + 8 * t();
      UNROLL
      for (int i = 0; i < 2 * STEPS; ++i) {
        keys.part[i / 2][i % 2].template load<SHARED>(own + i % 2 * 8 * WIDTH + i / 2 * 32);
      }
      return;
    }
    const C* rows[2] = {tile.row(g()), tile.row(8 + g())};
    UNROLL
    for (int i = 0; i < 2 * STEPS; ++i) {
      const int dimension = smaller_int(32 * (i / 2) + 8 * t(), tile.head_dim - 8);
      keys.part[i / 2][i % 2].template load<SHARED>(rows[i % 2] + dimension);
    }
  }

  // Beyond head_dim, real elements: nobody stores that part of the result.
  template <bool SHARED>
  static DEVICE void load_values(const Tile<C>& tile, Values& values) {
    values.scales.load(tile);
    if (tile.is_plain(WIDTH)) {
      const C* own = tile.rows + 2 * t() * WIDTH + 8 * g();
      UNROLL
      for (int i = 0; i < 4 * BLOCKS; ++i) {
        const int key = i % 2 + i % 4 / 2 * 8;
        values.part[i / 4][i % 4].template load<SHARED>(own + key * WIDTH + i / 4 * 64);
      }
      return;
    }
    const C* rows[4];
    UNROLL
    for (int i = 0; i < 4; ++i) rows[i] = tile.row(2 * t() + i % 2 + i / 2 * 8);
    UNROLL
    for (int i = 0; i < 4 * BLOCKS; ++i) {
      const int dimension = smaller_int(64 * (i / 4) + 8 * g(), tile.head_dim - 8);
      values.part[i / 4][i % 4].template load<SHARED>(rows[i % 4] + dimension);
    }
  }

  // Of key g, then of key g + 8: queries 2 t and 2 t + 1.
  DEVICE void score(const Keys& keys, float (&scores)[4]) const {
    float parts[2][4] = {};  // two chains of products
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
      const Words4 q = FITS ? query[step] : query_part(step);
      const Words4 k[2] = {keys.part[step][0].template elements<X>(), keys.part[step][1].template elements<X>()};
      UNROLL
      for (int pair = 0; pair < 4; pair += 2) {
        const uint32 a[4] = {k[0].word[pair], k[1].word[pair], k[0].word[pair + 1], k[1].word[pair + 1]};
        const uint32 b[2] = {q.word[pair], q.word[pair + 1]};
        mma_16816(parts[pair / 2], a, b, X());
      }
    }
    UNROLL
    for (int i = 0; i < 4; ++i) scores[i] = parts[0][i] + parts[1][i];
  }

  // The tile's scores become the weights of the product; the state so far is rescaled.
  DEVICE void weigh(const float (&scores)[4], const Tile<C>& tile, const TileScales<C>& of_keys,
                    const TileScales<C>& of_values, float scale, uint32 (&weights)[2]) {
    float scaled[4], highest[2] = {largest[0], largest[1]};
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = g() + i / 2 * 8;
      const float score = of_keys.times(scores[i], i / 2) * scale;
      scaled[i] = key >= tile.lowest && key <= tile.highest ? score : minus_infinity();
      highest[i % 2] = larger(highest[i % 2], scaled[i]);
    }
    // As it is in the first few tiles.
    if (lanes_where(!(highest[0] <= largest[0] && highest[1] <= largest[1])) != 0) rescale(highest);
    UNROLL
    for (int i = 0; i < 4; ++i) scaled[i] = power_of_two(scaled[i] - base_of(largest[i % 2]));
    UNROLL
    for (int odd = 0; odd < 2; ++odd) sum[odd] += scaled[odd] + scaled[2 + odd];
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const float first = of_values.times(scaled[2 * half], half), second = of_values.times(scaled[2 * half + 1], half);
      weights[half] = turned_matrix(rounded_pair<M>(first, second));
    }
  }

  // The largest scores become those of all lanes.
  DEVICE void rescale(float (&highest)[2]) {
    float old[2];
    UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      UNROLL
      for (int apart = 4; apart < WARP; apart *= 2) {
        highest[odd] = larger(highest[odd], shuffle_xor(highest[odd], apart));
      }
      old[odd] = power_of_two(largest[odd] - base_of(highest[odd]));
      largest[odd] = highest[odd];
      sum[odd] *= old[odd];
    }
    UNROLL
    for (int i = 0; i < 16 * BLOCKS; ++i) out[i / 16][i / 4 % 4][i % 4] *= old[i % 2];
  }

  // Row g of product i is dimension 8 g + 2 i of the block, row g + 8 the one after it.
  DEVICE void mix(const Values& values, const uint32 (&weights)[2]) {
    UNROLL
    for (int block = 0; block < BLOCKS; ++block) {
      const Eight<C>(&v)[4] = values.part[block];
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32 a[4] = {pair_of<M>(v[0], v[1], 2 * i), pair_of<M>(v[0], v[1], 2 * i + 1),
                             pair_of<M>(v[2], v[3], 2 * i), pair_of<M>(v[2], v[3], 2 * i + 1)};
        mma_16816(out[block][i], a, weights, M());
      }
    }
  }

  // What was found becomes the warp's part of `to`.
  DEVICE void leave(const Partials<WIDTH>& to) const {
    const int row = warp_index() * ROWS + 2 * t();
    UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      float all = sum[odd];
      UNROLL
      for (int apart = 4; apart < WARP; apart *= 2) all += shuffle_xor(all, apart);
      to.largest[row + odd] = largest[odd];  // eight lanes write the same
      to.sum[row + odd] = all;
    }
    UNROLL
    for (int i = 0; i < 4 * BLOCKS; ++i) {  // of a query, four dimensions
      const int block = i / 4, odd = i / 2 % 2, pair = i % 2 * 2;
      const float (&found)[4][4] = out[block];
      float* place = to.row(row + odd) + 64 * block + 8 * g() + 2 * pair;
      store(place,
            Pack<float, 4>{{found[pair][odd], found[pair][2 + odd], found[pair + 1][odd], found[pair + 1][2 + odd]}});
    }
  }
};

// The first key of the warp's first tile of a split whose first key this is; every fourth tile is its own.
DEVICE int first_tile(int first) { return (first / KEY_TILE + warp_index()) * KEY_TILE; }

// A warp's tiles, straight into registers: where there is room, values are on their way while keys are scored, and the
// next tile's keys while weights are made and values mixed.
template <int WIDTH, typename X, typename C>
struct HeldTiles {
  using Rows = MmaRows<WIDTH, X, C>;

  typename Rows::Keys keys;  // of the next tile
  typename Rows::Values values;
  bool loaded = false;  // whether keys and values are there

  // Of splits [first, last), with the first of which the next call of `split` begins, what lies before key `known`.
  DEVICE void begin(const Pages<C>& pages, const Splits& splits, int first, int, int known) {
    const int begin = splits.begin_of(first), end = splits.end_of(first), at = first_tile(begin);
    if (!Rows::FITS || at >= end || at + KEY_TILE > known) return;
    const int64 row = pages.row(at);
    const int lowest = larger_int(0, begin - at), highest = smaller_int(KEY_TILE, end - at) - 1;
    Rows::template load_keys<false>(tile_of(pages, row, lowest, highest), keys);
    Rows::template load_values<false>(tile_of(pages, pages.to_values + row, lowest, highest), values);
    loaded = true;
  }
  DEVICE void go_on(const Pages<C>&, const Splits&) {}

  DEVICE void split(Rows& rows, const Pages<C>& pages, const Splits& splits, int number, float scale) {
    const int first = splits.begin_of(number), end = splits.end_of(number);
    int at = first_tile(first);
    if (at >= end) return;
    int64 row = pages.row(at);
    Tile<C> tile = tile_of(pages, row, larger_int(0, first - at), smaller_int(KEY_TILE, end - at) - 1);
    if (!loaded) Rows::template load_keys<false>(tile, keys);
    NO_UNROLL
    while (true) {
      float scores[4];
      uint32 weights[2];
      const Tile<C> of_values = tile_of(pages, pages.to_values + row, tile.lowest, tile.highest);
      if (Rows::FITS && !loaded) Rows::template load_values<false>(of_values, values);
      loaded = false;
      rows.score(keys, scores);
      const TileScales<C> of_keys = keys.scales;
      if (!Rows::FITS) Rows::template load_values<false>(of_values, values);
      at += WARPS * KEY_TILE;
      if (at < end) {
        row = pages.row(at);
        tile = tile_of(pages, row, 0, smaller_int(KEY_TILE, end - at) - 1);
        if (Rows::FITS) Rows::template load_keys<false>(tile, keys);
      }
      rows.weigh(scores, of_values, of_keys, values.scales, scale, weights);
      rows.mix(values, weights);
      if (at >= end) return;
      if (!Rows::FITS) Rows::template load_keys<false>(tile, keys);
    }
  }
};
