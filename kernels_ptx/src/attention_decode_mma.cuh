// Attention of up to 8 queries at one position over one head's keys by one warp, with the matrix instructions of t80.
//
// Scores S (queries, keys) = q k^T, queries being 8 of the 16 rows; out^T (dimensions, queries) = v^T P^T. S in the
// layout of a product's d is P^T in the layout of its b, so nothing moves between lanes. A sum does not care for the
// order of its terms, nor does out^T for the order of its rows: so that every lane loads 16 bytes from global memory
// straight into its fragments, the terms are permuted alike in q and k, and the rows are undone when they are stored.
// Weights are rounded to X before they meet the values, the sum of weights is not.
//
// Lane 4 g + t, in steps of 32 dimensions: of q and k, dimensions 8 t.. of query g and of keys g and g + 8; in blocks
// of 64: of v, dimensions 8 g.. of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
#pragma once

#include "attention.cuh"

DEVICE uint32 lower_halves(uint32 first, uint32 second) { return (first & 0xffffu) | second << 16; }
DEVICE uint32 upper_halves(uint32 first, uint32 second) { return first >> 16 | (second & 0xffff0000u); }

// head_dim <= WIDTH, a multiple of 8.
template <int WIDTH, typename X>
struct MmaRows {
  enum : int { STEPS = WIDTH / 32, BLOCKS = WIDTH / 64, FITS = WIDTH <= 128 };  // FITS: two tiles in registers
  using Keys = Words4[STEPS][2];

  const X* queries;
  Words4 query[STEPS];
  float out[BLOCKS][4][4];  // of queries 2 t and 2 t + 1
  float largest, sum;       // of query g; the sum is only that of this lane's keys

  static DEVICE int g() { return lane_index() / 4; }
  static DEVICE int t() { return lane_index() % 4; }

  // queries: in shared memory, (ROWS, WIDTH). Rows where no query was put give results that nobody stores.
  DEVICE Words4 query_part(int step) const { return load_words4(queries + g() * WIDTH + 32 * step + 8 * t()); }

  DEVICE MmaRows(const X* queries) : queries(queries) {
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
      if (FITS) query[step] = query_part(step);
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

  // Beyond head_dim, real elements: the query is zero there.
  static DEVICE void load_keys(const X* tile, int lowest, int highest, int head_dim, Keys& keys) {
    const X* rows[2];
    UNROLL
    for (int half = 0; half < 2; ++half) {
      rows[half] = tile + larger_int(lowest, smaller_int(8 * half + g(), highest)) * head_dim;
    }
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
      const int dimension = smaller_int(32 * step + 8 * t(), head_dim - 8);
      UNROLL
      for (int half = 0; half < 2; ++half) keys[step][half] = load_words4_once(rows[half] + dimension);
    }
  }

  // Beyond head_dim, real elements: nobody stores that part of the result.
  static DEVICE void load_values(const X* tile, int lowest, int highest, int head_dim, Words4 (&values)[BLOCKS][4]) {
    const X* rows[4];
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = 2 * t() + i % 2 + i / 2 * 8;
      rows[i] = tile + larger_int(lowest, smaller_int(key, highest)) * head_dim;
    }
    UNROLL
    for (int block = 0; block < BLOCKS; ++block) {
      const int dimension = smaller_int(64 * block + 8 * g(), head_dim - 8);
      UNROLL
      for (int i = 0; i < 4; ++i) values[block][i] = load_words4_once(rows[i] + dimension);
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
      UNROLL
      for (int pair = 0; pair < 4; pair += 2) {
        const uint32 a[4] = {q.word[pair], 0, q.word[pair + 1], 0};
        UNROLL
        for (int half = 0; half < 2; ++half) {
          const uint32 b[2] = {keys[step][half].word[pair], keys[step][half].word[pair + 1]};
          mma_16816(scores[half], a, b, X());
        }
      }
    }
  }

  // Scores of keys `lowest`..`highest` of the tile become the weights of the product; the state so far is rescaled.
  DEVICE void weigh(const float (&scores)[2][4], int lowest, int highest, float scale, uint32 (&weights)[2]) {
    float scaled[4], highest_score = largest;
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = 2 * t() + i % 2 + i / 2 * 8;
      scaled[i] = key >= lowest && key <= highest ? scores[i / 2][i % 2] * scale : minus_infinity();
      highest_score = larger(highest_score, scaled[i]);
    }
    UNROLL
    for (int apart = 1; apart < 4; apart *= 2) highest_score = larger(highest_score, shuffle_xor(highest_score, apart));
    const float base = base_of(highest_score), old = power_of_two(largest - base);
    largest = highest_score;
    UNROLL
    for (int i = 0; i < 4; ++i) scaled[i] = power_of_two(scaled[i] - base);
    sum = sum * old + ((scaled[0] + scaled[1]) + (scaled[2] + scaled[3]));
    weights[0] = rounded_pair<X>(scaled[0], scaled[1]);
    weights[1] = rounded_pair<X>(scaled[2], scaled[3]);
    const float even = shuffle(old, 8 * t()), odd = shuffle(old, 8 * t() + 4);  // lanes 4 (2 t) and 4 (2 t + 1)
    UNROLL
    for (int block = 0; block < BLOCKS; ++block) {
      UNROLL
      for (int i = 0; i < 16; ++i) out[block][i / 4][i % 4] *= i % 2 ? odd : even;
    }
  }

  // Row g of product i is dimension 8 g + 2 i of the block, row g + 8 the one after it.
  DEVICE void mix(const Words4 (&values)[BLOCKS][4], const uint32 (&weights)[2]) {
    UNROLL
    for (int block = 0; block < BLOCKS; ++block) {
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32 v[4] = {values[block][0].word[i], values[block][1].word[i], values[block][2].word[i],
                             values[block][3].word[i]};
        const uint32 a[4] = {lower_halves(v[0], v[1]), upper_halves(v[0], v[1]), lower_halves(v[2], v[3]),
                             upper_halves(v[2], v[3])};
        mma_16816(out[block][i], a, weights, X());
      }
    }
  }

  // The keys [first, end), the warp's share of them: every `stride`th tile from `tile` on. Where registers allow,
  // values are on their way while keys are scored, and the next tile's keys while values are mixed. A lane whose key is
  // outside reads another, at weight 0.
  DEVICE void tiles(const Pages<X>& pages, int tile, int stride, int first, int end, float scale) {
    const int head_dim = pages.head_dim;
    if (tile >= end) return;
    const X* at = pages.key(tile);
    int lowest = larger_int(0, first - tile), highest = smaller_int(KEY_TILE, end - tile) - 1;
    Keys keys;
    load_keys(at, lowest, highest, head_dim, keys);
    NO_UNROLL
    while (true) {
      Words4 values[BLOCKS][4];
      float scores[2][4];
      uint32 weights[2];
      if (FITS) load_values(at + pages.to_values, lowest, highest, head_dim, values);
      score(keys, scores);
      if (!FITS) load_values(at + pages.to_values, lowest, highest, head_dim, values);
      weigh(scores, lowest, highest, scale, weights);
      tile += stride;
      if (tile < end) {
        at = pages.key(tile);
        lowest = 0;
        highest = smaller_int(KEY_TILE, end - tile) - 1;
        if (FITS) load_keys(at, lowest, highest, head_dim, keys);
      }
      mix(values, weights);
      if (tile >= end) return;
      if (!FITS) load_keys(at, lowest, highest, head_dim, keys);
    }
  }

  // The sum over all lanes' keys.
  DEVICE float whole_sum() const {
    const float half = sum + shuffle_xor(sum, 1);
    return half + shuffle_xor(half, 2);
  }
};
