// Attention of up to 8 queries at one position over one head's keys by one warp, with the matrix instructions of t80.
//
// Scores S (queries, keys) = q k^T, queries being 8 of the 16 rows; out^T (dimensions, queries) = v^T P^T. S in the
// layout of a product's d is P^T in the layout of its b, so nothing moves between lanes. A sum does not care for the
// order of its terms, nor does out^T for the order of its rows: so that every lane takes pieces of 16 bytes straight
// into its fragments, the terms are permuted alike in q and k, and the rows are undone when they are stored.
// Weights are rounded to X before they meet the values, the sum of weights is not. Codes of a cache of C = e4m3_t are
// expanded in registers; their values' scales go into the weights, which are rounded to bf16 whatever X is.
//
// On their way from memory, tiles are in a ring. Every lane copies what it will read itself, so that a lane waits for
// its own copies and for nobody else.
//
// Lane 4 g + t, in steps of 32 dimensions: of q and k, dimensions 8 t.. of query g and of keys g and g + 8; in blocks
// of 64: of v, dimensions 8 g.. of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
#pragma once

#include "attention_splits.cuh"

DEVICE uint32 lower_halves(uint32 first, uint32 second) { return chosen_bytes(first, second, 0x5410); }
DEVICE uint32 upper_halves(uint32 first, uint32 second) { return chosen_bytes(first, second, 0x7632); }

// Eight elements of a cache, as copied. Where they are not `there`, zeros.
template <typename C>
struct Eight {
  Words4 words;

  static DEVICE void copy(void* to, const C* from, bool there) { copy_async_once(to, from, there ? 16 : 0); }
  DEVICE void load(const void* from) { words = load_words4(from); }
  template <typename X>
  DEVICE Words4 elements() const {
    return words;
  }
};
template <>
struct Eight<e4m3_t> {
  Words2 words;

  static DEVICE void copy(void* to, const e4m3_t* from, bool there) { copy_async_few<8>(to, from, there ? 8 : 0); }
  DEVICE void load(const void* from) { words = load_words2(from); }
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

// The scales of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a tile, or of their values: two pieces of 8 bytes.
template <typename C>
struct TileScales {
  static DEVICE void copy(unsigned char*, const Pages<C>&, int64) {}
  DEVICE void load(const unsigned char*, int, int) {}
  DEVICE float times(float value, int) const { return value; }
};
template <>
struct TileScales<e4m3_t> {
  enum : int { PIECE = 8 * WARP };

  float at[4];

  static DEVICE void copy(unsigned char* to, const Pages<e4m3_t>& pages, int64 row) {
    UNROLL
    for (int i = 0; i < 2; ++i) copy_async_few<8>(to + i * PIECE, pages.scales + row + lane_index() % 4 * 2 + 8 * i, 8);
  }
  // Those of keys beside lowest..highest may be anything, and count as 0.
  DEVICE void load(const unsigned char* from, int lowest, int highest) {
    UNROLL
    for (int i = 0; i < 4; i += 2) {
      const int key = lane_index() % 4 * 2 + i * 4;
      const Words2 pair = load_words2(from + i / 2 * PIECE);
      UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        const bool there = key + odd >= lowest && key + odd <= highest;
        at[i + odd] = there ? float_of(pair.word[odd]) * Stored<e4m3_t>::UNIT : 0.0f;
      }
    }
  }
  DEVICE float times(float value, int i) const { return value * at[i]; }
};

// A warp's tiles between their copying and their use, in stages that go round. `ahead` tiles are on their way or there.
// The tile after them goes into the stage of the one that was used before them, and not before the next is used: so
// from its last use of a split until the next one's first, a warp has a stage to leave results in.
template <int WIDTH, typename C>
struct Ring {
  enum : int {
    KEYS = 2 * WIDTH / 32,  // pieces of a lane
    VALUES = 4 * WIDTH / 64,
    PIECES = KEYS + VALUES,
    PIECE = WARP * sizeof(Eight<C>),                    // bytes
    SCALES = PIECES * PIECE,                            // where they begin
    STAGE = SCALES + Stored<C>::SCALED * 4 * 8 * WARP,  // bytes
    MOST_STAGES = 4,
  };

  unsigned char* memory;  // of the warp
  int bytes, stages;
  int ahead = 0, next = 0, oldest = 0;  // the latter two: where in memory

  DEVICE Ring(unsigned char* of_block, int stages)
      : memory(of_block + warp_index() * stages * STAGE), bytes(stages * STAGE), stages(stages) {}

  static DEVICE int own() { return lane_index() * int(sizeof(Eight<C>)); }
  DEVICE int after(int stage) const { return stage + STAGE == bytes ? 0 : stage + STAGE; }

  // Where the lane's pieces of the next tile go, and that it has started copying them. A tile that is none counts too.
  DEVICE unsigned char* stage_to_fill() const { return memory + next + own(); }
  DEVICE void filled() {
    commit_copies();
    next = after(next);
    ++ahead;
  }

  // Where the lane's pieces of the oldest tile are, once they are there; for when the ring is full. And that it has used
  // them.
  DEVICE const unsigned char* stage_to_use() const {
    if (stages > 2) {  // comparisons of equality would become a jump by a table
      if (stages > 3) {
        wait_copies<MOST_STAGES - 1>();
      } else {
        wait_copies<2>();
      }
    } else if (stages > 1) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    return memory + oldest + own();
  }
  DEVICE void used() {
    oldest = after(oldest);
    --ahead;
  }
};

// The softmax of some keys for 8 queries: `largest` and `sum` of query g, `out` of queries 2 t and 2 t + 1.
template <int WIDTH>
struct Found {
  enum : int { BLOCKS = WIDTH / 64 };

  float largest, sum;
  float out[BLOCKS][4][4];

  DEVICE void clear() {
    largest = minus_infinity();
    sum = 0.0f;
    UNROLL
    for (int i = 0; i < 16 * BLOCKS; ++i) out[i / 16][i / 4 % 4][i % 4] = 0.0f;
  }

  // Of query g, what queries 2 t (odd 0) and 2 t + 1 are multiplied by. Lane 4 g has it first.
  static DEVICE float of_pair(float value, int odd) { return shuffle(value, lane_index() % 4 * 8 + 4 * odd); }

  DEVICE void rescale(float factor) {
    const float even = of_pair(factor, 0), odd = of_pair(factor, 1);
    UNROLL
    for (int i = 0; i < 16 * BLOCKS; ++i) out[i / 16][i / 4 % 4][i % 4] *= i % 2 ? odd : even;
  }

  // Keys behind those so far, as `merged` does it.
  DEVICE void add(const Found& next) {
    const float highest = larger(largest, next.largest), base = base_of(highest);
    const float old = power_of_two(largest - base), fresh = power_of_two(next.largest - base);
    largest = highest;
    sum = sum * old + next.sum * fresh;
    const float olds[2] = {of_pair(old, 0), of_pair(old, 1)}, freshes[2] = {of_pair(fresh, 0), of_pair(fresh, 1)};
    UNROLL
    for (int i = 0; i < 16 * BLOCKS; ++i) {
      float& own = out[i / 16][i / 4 % 4][i % 4];
      own = own * olds[i % 2] + next.out[i / 16][i / 4 % 4][i % 4] * freshes[i % 2];
    }
  }
};

// head_dim <= WIDTH, a multiple of 8.
template <int WIDTH, typename X, typename C>
struct MmaRows {
  enum : int { STEPS = WIDTH / 32, BLOCKS = WIDTH / 64, FITS = WIDTH <= 128 };  // FITS: queries in registers
  using M = typename Mixed<X, C>::Type;
  using Stages = Ring<WIDTH, C>;

  const X* queries;
  Words4 query[STEPS];
  Found<WIDTH> found;  // until `end` its sum is only that of this lane's keys

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

  // Start copying the lane's pieces of the tile at `row`. Keys beside lowest..highest and dimensions beyond head_dim
  // become zeros: a value's weight there is 0, and so is the query.
  static DEVICE void copy(const Pages<C>& pages, int64 row, int lowest, int highest, unsigned char* to) {
    const C* keys = pages.cache + row * pages.head_dim;
    const C* values = keys + pages.to_values * pages.head_dim;
    TileScales<C>::copy(to + Stages::SCALES, pages, row);
    TileScales<C>::copy(to + Stages::SCALES + 2 * 8 * WARP, pages, pages.to_values + row);
    // Where the tile's rows are all there and as wide as they may be, a lane's places are two addresses and constants.
    if (lowest == 0 && highest == KEY_TILE - 1 && pages.head_dim == WIDTH) {
      const C *own_keys = keys + g() * WIDTH + 8 * t(), *own_values = values + 2 * t() * WIDTH + 8 * g();
      UNROLL
      for (int i = 0; i < Stages::KEYS; ++i) {
        Eight<C>::copy(to + i * Stages::PIECE, own_keys + key_of(i) * WIDTH + i / 2 * 32, true);
      }
      UNROLL
      for (int i = 0; i < Stages::VALUES; ++i) {
        Eight<C>::copy(to + (Stages::KEYS + i) * Stages::PIECE, own_values + value_of(i) * WIDTH + i / 4 * 64, true);
      }
    } else {
      copy_edge(keys, values, pages.head_dim, lowest, highest, to);
    }
  }

  // The keys of the lane's pieces, from g and from 2 t on.
  static DEVICE int key_of(int i) { return i % 2 * 8; }
  static DEVICE int value_of(int i) { return i % 2 + i % 4 / 2 * 8; }

  static DEVICE void copy_edge(const C* keys, const C* values, int head_dim, int lowest, int highest,
                               unsigned char* to) {
    NO_UNROLL
    for (int piece = 0; piece < Stages::PIECES; ++piece) {
      const bool of_keys = piece < Stages::KEYS;
      const int i = of_keys ? piece : piece - Stages::KEYS;
      const int key = of_keys ? g() + key_of(i) : 2 * t() + value_of(i);
      const int dimension = of_keys ? 8 * t() + i / 2 * 32 : 8 * g() + i / 4 * 64;
      const bool there = key >= lowest && key <= highest && dimension < head_dim;
      Eight<C>::copy(to + piece * Stages::PIECE, (of_keys ? keys : values) + key * head_dim + dimension, there);
    }
  }

  static DEVICE Eight<C> piece_of(const unsigned char* stage, int place) {
    Eight<C> piece;
    piece.load(stage + place * Stages::PIECE);
    return piece;
  }

  // Columns 2 t and 2 t + 1 of each half's keys, in scores[half][0] and [1].
  DEVICE void score(const unsigned char* stage, float (&scores)[2][4]) const {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      UNROLL
      for (int i = 0; i < 4; ++i) scores[half][i] = 0.0f;
    }
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
      const Words4 q = FITS ? query[step] : query_part(step);
      const Words4 k[2] = {piece_of(stage, 2 * step).template elements<X>(),
                           piece_of(stage, 2 * step + 1).template elements<X>()};
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
  DEVICE void weigh(const float (&scores)[2][4], const unsigned char* stage, int lowest, int highest, float scale,
                    uint32 (&weights)[2]) {
    TileScales<C> of_keys, of_values;
    of_keys.load(stage + Stages::SCALES, lowest, highest);
    of_values.load(stage + Stages::SCALES + 2 * 8 * WARP, lowest, highest);
    float scaled[4], highest_score = found.largest;
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = 2 * t() + i % 2 + i / 2 * 8;
      const float score = of_keys.times(scores[i / 2][i % 2], i) * scale;
      scaled[i] = key >= lowest && key <= highest ? score : minus_infinity();
      highest_score = larger(highest_score, scaled[i]);
    }
    UNROLL
    for (int apart = 1; apart < 4; apart *= 2) highest_score = larger(highest_score, shuffle_xor(highest_score, apart));
    const float base = base_of(highest_score), old = power_of_two(found.largest - base);
    found.largest = highest_score;
    UNROLL
    for (int i = 0; i < 4; ++i) scaled[i] = power_of_two(scaled[i] - base);
    found.sum = found.sum * old + ((scaled[0] + scaled[1]) + (scaled[2] + scaled[3]));
    UNROLL
    for (int i = 0; i < 4; ++i) scaled[i] = of_values.times(scaled[i], i);
    weights[0] = rounded_pair<M>(scaled[0], scaled[1]);
    weights[1] = rounded_pair<M>(scaled[2], scaled[3]);
    if (lanes_where(old != 1.0f) != 0) found.rescale(old);  // mostly not, after a few tiles
  }

  // Row g of product i is dimension 8 g + 2 i of the block, row g + 8 the one after it.
  DEVICE void mix(const unsigned char* stage, const uint32 (&weights)[2]) {
    UNROLL
    for (int block = 0; block < BLOCKS; ++block) {
      Eight<C> v[4];
      UNROLL
      for (int i = 0; i < 4; ++i) v[i] = piece_of(stage, Stages::KEYS + 4 * block + i);
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32 a[4] = {pair_of<M>(v[0], v[1], 2 * i), pair_of<M>(v[0], v[1], 2 * i + 1),
                             pair_of<M>(v[2], v[3], 2 * i), pair_of<M>(v[2], v[3], 2 * i + 1)};
        mma_16816(found.out[block][i], a, weights, M());
      }
    }
  }

  DEVICE void tile(const unsigned char* stage, int lowest, int highest, float scale) {
    float scores[2][4];
    uint32 weights[2];
    score(stage, scores);
    weigh(scores, stage, lowest, highest, scale, weights);
    mix(stage, weights);
  }

  // The sum over all lanes' keys.
  DEVICE void end() {
    found.sum += shuffle_xor(found.sum, 1);
    found.sum += shuffle_xor(found.sum, 2);
  }
};
