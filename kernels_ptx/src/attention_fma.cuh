// Attention of up to 4 queries over one head's keys by one warp, with multiplications in float: for GPUs and head
// dimensions that the matrix instructions do not serve. Weights are not rounded to X before they meet the values.
//
// Groups of LANES lanes take a key each, and each lane some of its dimensions; the queries share what was loaded.
#pragma once

#include "attention.cuh"

// Queries of a warp.
enum : int { FMA_ROWS = 4 };

// head_dim <= WIDTH, a power of two. N = 8: head_dim is a multiple of 8, and a lane's dimensions lie side by side.
// C: the cache's element.
template <int WIDTH, int N, typename X, typename C>
struct FmaRows {
  enum : int { LANES = N == WIDE ? WIDTH / WIDE : WARP, GROUPS = WARP / LANES, DIMENSIONS = WIDTH / LANES };
  enum : int { AT_ONCE = N == WIDE ? 4 : 1 };  // keys that a group of lanes takes at a time
  using Dimensions = float[DIMENSIONS];

  const X* queries;  // in shared memory, (rows, WIDTH), zero from head_dim on
  int rows;
  float largest[FMA_ROWS], sum[FMA_ROWS], out[FMA_ROWS][DIMENSIONS];

  static DEVICE int dimension(int i) { return N == WIDE ? lane_index() % LANES * WIDE + i : lane_index() + i * WARP; }

  DEVICE FmaRows(const X* queries, int rows) : queries(queries), rows(rows) {
    UNROLL
    for (int row = 0; row < FMA_ROWS; ++row) {
      largest[row] = minus_infinity();
      sum[row] = 0.0f;
      UNROLL
      for (int i = 0; i < DIMENSIONS; ++i) out[row][i] = 0.0f;
    }
  }

  static DEVICE Pack<C, WIDE> load_wide(const C* from) {
    if constexpr (Stored<C>::SCALED) {
      return load_codes(from);
    } else {
      return load<WIDE>(from);
    }
  }

  static DEVICE void load_row(const C* row, int head_dim, Dimensions& to) {
    if constexpr (N == WIDE) {
      // Beyond head_dim, real elements: the query is zero there, and nobody stores that part of the result.
      const Pack<C, WIDE> pack = load_wide(row + smaller_int(dimension(0), head_dim - WIDE));
      UNROLL
      for (int i = 0; i < WIDE; ++i) to[i] = to_float(pack.at[i]);
    } else {
      UNROLL
      for (int i = 0; i < DIMENSIONS; ++i) to[i] = dimension(i) < head_dim ? to_float(row[dimension(i)]) : 0.0f;
    }
  }

  DEVICE float score(int row, const Dimensions& key) const {
    const X* query = queries + row * WIDTH;
    float score = 0.0f;
    if constexpr (N == WIDE) {
      const Pack<X, WIDE> pack = load<WIDE>(query + dimension(0));
      UNROLL
      for (int i = 0; i < WIDE; ++i) score = fused_multiply_add(to_float(pack.at[i]), key[i], score);
    } else {
      UNROLL
      for (int i = 0; i < DIMENSIONS; ++i) score = fused_multiply_add(to_float(query[dimension(i)]), key[i], score);
    }
    UNROLL
    for (int apart = LANES / 2; apart > 0; apart /= 2) score += shuffle_xor(score, apart);
    return score;
  }

  // Every lane knows the scores of its group's keys. units: what the values are to be multiplied by.
  DEVICE void take(int row, const float (&scores)[AT_ONCE], const Dimensions (&values)[AT_ONCE],
                   const float (&units)[AT_ONCE]) {
    float highest = largest[row];
    UNROLL
    for (int u = 0; u < AT_ONCE; ++u) highest = larger(highest, scores[u]);
    const float base = base_of(highest), old = power_of_two(largest[row] - base);
    float weights[AT_ONCE];
    largest[row] = highest;
    sum[row] *= old;
    UNROLL
    for (int u = 0; u < AT_ONCE; ++u) {
      weights[u] = power_of_two(scores[u] - base);
      sum[row] += weights[u];
      if constexpr (Stored<C>::SCALED) weights[u] *= units[u];
    }
    UNROLL
    for (int i = 0; i < DIMENSIONS; ++i) {
      float mixed = out[row][i] * old;
      UNROLL
      for (int u = 0; u < AT_ONCE; ++u) mixed = fused_multiply_add(weights[u], values[u][i], mixed);
      out[row][i] = mixed;
    }
  }

  // The keys [first, end) of the tile at `tile`, at least one. Keys beside them are never read: a lane whose key is
  // none of them reads another, at weight 0.
  DEVICE void tile(const Pages<C>& pages, int tile, int first, int end, const Sight& sight, float scale) {
    const int64 tile_row = pages.row(tile);
    const C* keys = pages.cache + tile_row * pages.head_dim;
    NO_UNROLL
    for (int batch = 0; batch < KEY_TILE; batch += AT_ONCE * GROUPS) {
      int at[AT_ONCE];
      Dimensions key[AT_ONCE], values[AT_ONCE];
      float scales[AT_ONCE], units[AT_ONCE];
      UNROLL
      for (int u = 0; u < AT_ONCE; ++u) {
        at[u] = tile + batch + u * GROUPS + lane_index() / LANES;
        const int64 row = larger_int(first, smaller_int(at[u], end - 1)) - tile;
        load_row(keys + row * pages.head_dim, pages.head_dim, key[u]);
        load_row(keys + (pages.to_values + row) * pages.head_dim, pages.head_dim, values[u]);
        scales[u] = scale;
        units[u] = 1.0f;
        if constexpr (Stored<C>::SCALED) {
          scales[u] *= pages.scales[tile_row + row];
          units[u] = pages.scales[tile_row + pages.to_values + row];
        }
      }
      UNROLL
      for (int row = 0; row < FMA_ROWS; ++row) {
        if (row >= rows) break;
        float scores[AT_ONCE];
        UNROLL
        for (int u = 0; u < AT_ONCE; ++u) {
          const bool seen = at[u] >= first && at[u] < end && sight.sees(row, at[u]);
          scores[u] = score(row, key[u]) * scales[u];
          if (!seen) scores[u] = minus_infinity();
        }
        take(row, scores, values, units);
      }
    }
  }

  // Merge what the groups of lanes have seen; then all have the same.
  DEVICE void merge_groups() {
    UNROLL
    for (int apart = LANES; apart < WARP; apart *= 2) {
      UNROLL
      for (int row = 0; row < FMA_ROWS; ++row) {
        const float other = shuffle_xor(largest[row], apart), highest = larger(largest[row], other);
        const float base = base_of(highest);
        const float mine = power_of_two(largest[row] - base), theirs = power_of_two(other - base);
        largest[row] = highest;
        sum[row] = sum[row] * mine + shuffle_xor(sum[row], apart) * theirs;
        UNROLL
        for (int i = 0; i < DIMENSIONS; ++i)
          out[row][i] = out[row][i] * mine + shuffle_xor(out[row][i], apart) * theirs;
      }
    }
  }

  // The results, by one group of lanes; to: the first row's place.
  DEVICE void store_rows(X* to, int64 stride, int head_dim) const {
    UNROLL
    for (int row = 0; row < FMA_ROWS; ++row) {
      if (row >= rows) break;
      Pack<X, DIMENSIONS> pack;
      UNROLL
      for (int i = 0; i < DIMENSIONS; ++i) pack.at[i] = rounded<X>(out[row][i] / sum[row]);
      if constexpr (N == WIDE) {
        if (dimension(0) < head_dim) store(to + row * stride + dimension(0), pack);
      } else {
        UNROLL
        for (int i = 0; i < DIMENSIONS; ++i) {
          if (dimension(i) < head_dim) to[row * stride + dimension(i)] = pack.at[i];
        }
      }
    }
  }
};
