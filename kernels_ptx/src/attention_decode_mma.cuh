// Attention of up to 8 queries at one position over one head's keys by one warp, with the matrix instructions of t80.
//
// Scores S (queries, keys) = q k^T, queries being 8 of the 16 rows; out^T (dimensions, queries) = v^T P^T. S in the
// layout of a product's d is P^T in the layout of its b, so nothing moves between lanes. A sum does not care for the
// order of its terms, nor does out^T for the order of its rows: so that every lane loads 16 bytes from global memory
// straight into its fragments, the terms are permuted alike in q and k, and the rows are undone when they are stored.
// Weights are rounded to X before they meet the values, the sum of weights is not. Codes of a cache of C = e4m3_t are
// expanded in registers; their values' scales go into the weights, which are rounded to bf16 whatever X is.
//
// Lane 4 g + t, in steps of 32 dimensions: of q and k, dimensions 8 t.. of query g and of keys g and g + 8; in blocks
// of 64: of v, dimensions 8 g.. of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
#pragma once

#include "attention.cuh"

DEVICE uint32 lower_halves(uint32 first, uint32 second) { return chosen_bytes(first, second, 0x5410); }
DEVICE uint32 upper_halves(uint32 first, uint32 second) { return chosen_bytes(first, second, 0x7632); }

// Eight elements of a cache, as loaded.
template <typename C>
struct Eight {
  Words4 words;

  DEVICE void load(const C* from) { words = load_words4_once(from); }
  template <typename X>
  DEVICE Words4 elements() const {
    return words;
  }
};
template <>
struct Eight<e4m3_t> {
  Words2 words;

  DEVICE void load(const e4m3_t* from) { words = load_words2_once(from); }
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

// The scales of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a tile, or of their values.
template <typename C>
struct TileScales {
  DEVICE void load(const Pages<C>&, int64, int, int) {}
  DEVICE float times(float value, int) const { return value; }
};
template <>
struct TileScales<e4m3_t> {
  float at[4];

  // Of the tile at `row`; those beside lowest..highest may be anything, and count as 0.
  DEVICE void load(const Pages<e4m3_t>& pages, int64 row, int lowest, int highest) {
    UNROLL
    for (int i = 0; i < 4; i += 2) {
      const int key = lane_index() % 4 * 2 + i * 4;
      const Words2 pair = load_words2(pages.scales + row + key);
      UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        const bool there = key + odd >= lowest && key + odd <= highest;
        at[i + odd] = there ? float_of(pair.word[odd]) * Stored<e4m3_t>::UNIT : 0.0f;
      }
    }
  }
  DEVICE float times(float value, int i) const { return value * at[i]; }
};

// head_dim <= WIDTH, a multiple of 8.
template <int WIDTH, typename X, typename C>
struct MmaRows {
  enum : int { STEPS = WIDTH / 32, BLOCKS = WIDTH / 64, FITS = WIDTH <= 128 };  // FITS: two tiles in registers
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
  Keys keys;  // of the next tile
  Values values;
  bool loaded = false;      // whether keys and values are there
  float out[BLOCKS][4][4];  // of queries 2 t and 2 t + 1
  float largest, sum;       // of query g; the sum is only that of this lane's keys

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
    largest = minus_infinity();
    sum = 0.0f;
    UNROLL
    for (int block = 0; block < BLOCKS; ++block) {
      UNROLL
      for (int i = 0; i < 16; ++i) out[block][i / 4][i % 4] = 0.0f;
    }
  }

  // Whether the tile's rows are all there and as wide as they may be: then a lane's places are one address and constants.
  static DEVICE bool is_plain(const Pages<C>& pages, int lowest, int highest) {
    return lowest == 0 && highest == KEY_TILE - 1 && pages.head_dim == WIDTH;
  }

  static DEVICE void load_keys(const Pages<C>& pages, int64 row, int lowest, int highest, Keys& keys) {
    const C* tile = pages.cache + row * pages.head_dim;
    keys.scales.load(pages, row, lowest, highest);
    if (is_plain(pages, lowest, highest)) {
      const C* own = tile + g() * WIDTH + 8 * t();
      UNROLL
      for (int i = 0; i < 2 * STEPS; ++i) keys.part[i / 2][i % 2].load(own + i % 2 * 8 * WIDTH + i / 2 * 32);
    } else {
      load_edge_keys(tile, pages.head_dim, lowest, highest, keys);
    }
  }

  // Beyond head_dim, real elements: the query is zero there.
  static DEVICE void load_edge_keys(const C* tile, int head_dim, int lowest, int highest, Keys& keys) {
    const C* rows[2];
    UNROLL
    for (int half = 0; half < 2; ++half) {
      rows[half] = tile + larger_int(lowest, smaller_int(8 * half + g(), highest)) * head_dim;
    }
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
      const int dimension = smaller_int(32 * step + 8 * t(), head_dim - 8);
      UNROLL
      for (int half = 0; half < 2; ++half) keys.part[step][half].load(rows[half] + dimension);
    }
  }

  static DEVICE void load_values(const Pages<C>& pages, int64 row, int lowest, int highest, Values& values) {
    const C* tile = pages.cache + (pages.to_values + row) * pages.head_dim;
    values.scales.load(pages, pages.to_values + row, lowest, highest);
    if (is_plain(pages, lowest, highest)) {
      const C* own = tile + 2 * t() * WIDTH + 8 * g();
      UNROLL
      for (int i = 0; i < 4 * BLOCKS; ++i) {
        const int key = i % 2 + i % 4 / 2 * 8;
        values.part[i / 4][i % 4].load(own + key * WIDTH + i / 4 * 64);
      }
    } else {
      load_edge_values(tile, pages.head_dim, lowest, highest, values);
    }
  }

  // Beyond head_dim, real elements: nobody stores that part of the result.
  static DEVICE void load_edge_values(const C* tile, int head_dim, int lowest, int highest, Values& values) {
    const C* rows[4];
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = 2 * t() + i % 2 + i / 2 * 8;
      rows[i] = tile + larger_int(lowest, smaller_int(key, highest)) * head_dim;
    }
    UNROLL
    for (int block = 0; block < BLOCKS; ++block) {
      const int dimension = smaller_int(64 * block + 8 * g(), head_dim - 8);
      UNROLL
      for (int i = 0; i < 4; ++i) values.part[block][i].load(rows[i] + dimension);
    }
  }

  // Columns 2 t and 2 t + 1 of each half's keys, in scores[half][0] and [1].
  DEVICE void score(const Keys& keys, float (&scores)[2][4]) const {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      UNROLL
      for (int i = 0; i < 4; ++i) scores[half][i] = 0.0f;
    }
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
      const Words4 q = FITS ? query[step] : query_part(step);
      const Words4 k[2] = {keys.part[step][0].template elements<X>(), keys.part[step][1].template elements<X>()};
      UNROLL
      for (int pair = 0; pair < 4; pair += 2) {
        const uint32 a[4] = {q.word[pair], 0, q.word[pair + 1], 0};
        UNROLL
        for (int half = 0; half < 2; ++half) {
          const uint32 b[2] = {k[half].word[pair], k[half].word[pair + 1]};
          mma_16816(scores[half], a, b, X());
        }
      }
    }
  }

  // Scores of keys `lowest`..`highest` of the tile become the weights of the product; the state so far is rescaled.
  DEVICE void weigh(const float (&scores)[2][4], const TileScales<C>& of_keys, const TileScales<C>& of_values,
                    int lowest, int highest, float scale, uint32 (&weights)[2]) {
    float scaled[4], highest_score = largest;
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = 2 * t() + i % 2 + i / 2 * 8;
      const float score = of_keys.times(scores[i / 2][i % 2], i) * scale;
      scaled[i] = key >= lowest && key <= highest ? score : minus_infinity();
      highest_score = larger(highest_score, scaled[i]);
    }
    if (lanes_where(!(highest_score <= largest)) != 0) rescale(highest_score);  // as it is in the first few tiles
    const float base = base_of(largest);
    UNROLL
    for (int i = 0; i < 4; ++i) scaled[i] = power_of_two(scaled[i] - base);
    sum += (scaled[0] + scaled[1]) + (scaled[2] + scaled[3]);
    UNROLL
    for (int i = 0; i < 4; ++i) scaled[i] = of_values.times(scaled[i], i);
    weights[0] = rounded_pair<M>(scaled[0], scaled[1]);
    weights[1] = rounded_pair<M>(scaled[2], scaled[3]);
  }

  // The largest score becomes that of all four lanes of a query.
  DEVICE void rescale(float highest_score) {
    UNROLL
    for (int apart = 1; apart < 4; apart *= 2) highest_score = larger(highest_score, shuffle_xor(highest_score, apart));
    const float old = power_of_two(largest - base_of(highest_score));
    largest = highest_score;
    sum *= old;
    const float even = shuffle(old, 8 * t()), odd = shuffle(old, 8 * t() + 4);  // lanes 4 (2 t) and 4 (2 t + 1)
    UNROLL
    for (int block = 0; block < BLOCKS; ++block) {
      UNROLL
      for (int i = 0; i < 16; ++i) out[block][i / 4][i % 4] *= i % 2 ? odd : even;
    }
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

  // The first of the tiles of the next call of `tiles`, where registers allow.
  DEVICE void load_ahead(const Pages<C>& pages, int tile, int first, int end) {
    if (!FITS) return;
    const int64 row = pages.row(tile);
    const int lowest = larger_int(0, first - tile), highest = smaller_int(KEY_TILE, end - tile) - 1;
    load_keys(pages, row, lowest, highest, keys);
    load_values(pages, row, lowest, highest, values);
    loaded = true;
  }

  // The keys [first, end), the warp's share of them: every `stride`th tile from `tile` on. Where registers allow,
  // values are on their way while keys are scored, and the next tile's keys while values are mixed. A lane whose key is
  // outside reads another, at weight 0.
  DEVICE void tiles(const Pages<C>& pages, int tile, int stride, int first, int end, float scale) {
    if (tile >= end) return;
    int64 row = pages.row(tile);
    int lowest = larger_int(0, first - tile), highest = smaller_int(KEY_TILE, end - tile) - 1;
    if (!loaded) load_keys(pages, row, lowest, highest, keys);
    NO_UNROLL
    while (true) {
      float scores[2][4];
      uint32 weights[2];
      if (FITS && !loaded) load_values(pages, row, lowest, highest, values);
      loaded = false;
      score(keys, scores);
      const TileScales<C> of_keys = keys.scales;
      if (!FITS) load_values(pages, row, lowest, highest, values);
      const int of_lowest = lowest, of_highest = highest;
      tile += stride;
      if (tile < end) {
        row = pages.row(tile);
        lowest = 0;
        highest = smaller_int(KEY_TILE, end - tile) - 1;
        if (FITS) load_keys(pages, row, lowest, highest, keys);
      }
      weigh(scores, of_keys, values.scales, of_lowest, of_highest, scale, weights);
      mix(values, weights);
      if (tile >= end) return;
      if (!FITS) load_keys(pages, row, lowest, highest, keys);
    }
  }

  // The sum over all lanes' keys.
  DEVICE float whole_sum() const {
    const float half = sum + shuffle_xor(sum, 1);
    return half + shuffle_xor(half, 2);
  }
};
