// How decoding splits a sequence's keys over blocks, and how their results become one.
//
// A block of WARPS warps takes a split: its warps leave Partials in shared memory. The results of splits are merged
// from the lowest keys upwards, by one block in the end: the same bits, whichever block took which split.
#pragma once

#include "attention.cuh"

// Warps of a block, splits of a sequence at most (a warp's lanes), keys of a split at least: of few sequences always so
// many, that the bits of a row depend on no other.
enum : int { WARPS = 4, MOST_SPLITS = WARP, SMALLEST_CHUNK = 128 };

// Keys [first, end) in `count` parts, cut at the multiples of `chunk`.
struct Splits {
  int first, end, chunk, count;

  DEVICE int begin_of(int split) const { return larger_int(first, (first / chunk + split) * chunk); }
  DEVICE int end_of(int split) const { return smaller_int(end, (first / chunk + split + 1) * chunk); }
};

// At most MOST_SPLITS, as the first and the last may be cut short; of `smallest` keys or, where those were too many, more.
DEVICE Splits splits_of(int kv_length, int window, int smallest) {
  const int first = first_seen(kv_length - 1, window);
  int chunk = smallest;
  while ((kv_length - first - 1) / chunk >= MOST_SPLITS - 1) chunk *= 2;
  return {first, kv_length, chunk, (kv_length - 1) / chunk - first / chunk + 1};
}

// What the warps leave of a split for the block to merge.
template <int WIDTH>
struct Partials {
  enum : int { STRIDE = WIDTH + 4 };  // so that rows begin in different banks

  float *largest, *sum;  // (WARPS, ROWS)
  float* out;            // (WARPS, ROWS, WIDTH), rows STRIDE apart

  DEVICE float* row(int at) const { return out + at * STRIDE; }
  template <int N>
  DEVICE Softmax<N> of(int warp, int query, int dimension) const {
    const int at = warp * ROWS + query;
    return {largest[at], sum[at], load_floats<N>(row(at) + dimension)};
  }
};

template <int N, int WIDTH>
DEVICE Softmax<N> merge_warps(const Partials<WIDTH>& partials, int row, int dimension) {
  Softmax<N> found = partials.template of<N>(0, row, dimension);
  UNROLL
  for (int warp = 1; warp < WARPS; ++warp) found = merged(found, partials.template of<N>(warp, row, dimension));
  return found;
}

// A thread's share of the result: every 128th piece of N neighbouring dimensions, of which it has PIECES at most.
template <int WIDTH, int N>
struct Share {
  enum : int { PIECES = ROWS * WIDTH / N / (WARPS * WARP) };

  static DEVICE int row(int i) { return (i * WARPS * WARP + thread_index()) / (WIDTH / N); }
  static DEVICE int dimension(int i) { return (i * WARPS * WARP + thread_index()) % (WIDTH / N) * N; }
  static DEVICE bool has(int i, int rows, int head_dim) { return row(i) < rows && dimension(i) < head_dim; }
};

// The splits' results in the workspace, of each (sequence, head): out (MOST_SPLITS, head_dim), then the largest score and
// the sum, (MOST_SPLITS, 2).
struct Workspace {
  float* rows;
  int head_dim;

  DEVICE float* row_of(int row) const { return rows + int64(row) * MOST_SPLITS * (head_dim + 2); }
  DEVICE float* out_of(int row, int split) const { return row_of(row) + split * head_dim; }
  DEVICE float* state_of(int row, int split) const { return row_of(row) + MOST_SPLITS * head_dim + split * 2; }
};

// Of the rows from `head` on.
DEVICE Workspace workspace_of(float* workspace, int64 sequence, int head, const AttentionShape& shape) {
  const int64 before = (sequence * shape.heads + head) * MOST_SPLITS;
  return {workspace + before * (shape.head_dim + 2), shape.head_dim};
}

template <int N>
DEVICE void keep(const Workspace& workspace, int row, int split, int dimension, const Softmax<N>& found) {
  store_floats(workspace.out_of(row, split) + dimension, found.out);
  if (dimension != 0) return;
  workspace.state_of(row, split)[0] = found.largest;
  workspace.state_of(row, split)[1] = found.sum;
}

// True in every thread of the block that arrives last; what all others wrote before is then seen. `done` of the
// `count` splits are this block's, whose threads have met since they last wrote: the fence is for all of them.
DEVICE bool arrives_last(uint32* counter, int done, int count) {
  SHARED_ARRAY(int, last, 1);
  if (thread_index() == 0) {
    fence();
    last[0] = int(atomic_add(counter, uint32(done))) + done == count;
    fence();
    if (last[0]) *counter = 0;
  }
  sync_block();
  return last[0] != 0;
}

// The factors that `merge` would give the splits so far and the next one, for all at once: the largest score so far is
// exact in any order. factors: (ROWS, MOST_SPLITS, 2) in shared memory; sums: the splits' sums, (ROWS, MOST_SPLITS).
DEVICE void merge_factors(const Workspace& workspace, int rows, int count, float* factors, float* sums) {
  enum : int { EACH = ROWS / WARPS };
  const int split = lane_index();
  Words2 states[EACH];
  UNROLL
  for (int i = 0; i < EACH; ++i) {
    const int row = warp_index() + i * WARPS;
    if (row < rows && split < count) states[i] = load_words2(workspace.state_of(row, split));
  }
  UNROLL
  for (int i = 0; i < EACH; ++i) {
    const int row = warp_index() + i * WARPS, at = row * MOST_SPLITS + split;
    if (row >= rows) return;
    const float own = split < count ? float_of(states[i].word[0]) : minus_infinity();
    if (split < count) sums[at] = float_of(states[i].word[1]);
    float largest = own;
    UNROLL
    for (int apart = 1; apart < WARP; apart *= 2) {
      const float lower = shuffle(largest, split - apart);
      if (split >= apart) largest = larger(largest, lower);
    }
    const float before = shuffle(largest, split - 1), base = base_of(largest);
    factors[2 * at] = power_of_two((split == 0 ? minus_infinity() : before) - base);
    factors[2 * at + 1] = power_of_two(own - base);
  }
}

// A thread's share of AHEAD splits from `split` on; behind the last one, of the last again.
template <int WIDTH, int N, int PIECES, int AHEAD>
DEVICE void load_parts(const Workspace& workspace, int rows, int count, int split,
                       Pack<float, N> (&parts)[PIECES][AHEAD]) {
  using Own = Share<WIDTH, N>;
  UNROLL
  for (int i = 0; i < PIECES; ++i) {
    if (!Own::has(i, rows, workspace.head_dim)) continue;
    const float* from = workspace.out_of(Own::row(i), 0) + Own::dimension(i);
    UNROLL
    for (int j = 0; j < AHEAD; ++j) {
      parts[i][j] = load_floats<N>(from + smaller_int(split + j, count - 1) * workspace.head_dim);
    }
  }
}

template <typename X>
DEVICE void store_elements(X* to, const Pack<float, 2>& values, float sum) {
  store_pair(to, values.at[0] / sum, values.at[1] / sum);
}
template <typename X>
DEVICE void store_elements(X* to, const Pack<float, 4>& values, float sum) {
  store_words2(to, {{rounded_pair<X>(values.at[0] / sum, values.at[1] / sum),
                     rounded_pair<X>(values.at[2] / sum, values.at[3] / sum)}});
}

// All splits from the workspace, in order; `scratch` holds 3 ROWS MOST_SPLITS floats of shared memory.
template <int WIDTH, int N, typename X>
DEVICE void merge_splits(const Workspace& workspace, int rows, int count, float* scratch, X* out) {
  using Own = Share<WIDTH, N>;
  enum : int { PIECES = Own::PIECES, AHEAD = PIECES > 2 ? 4 : 8 };
  float *factors = scratch, *sums = scratch + 2 * ROWS * MOST_SPLITS;
  Pack<float, N> parts[PIECES][AHEAD];
  load_parts<WIDTH, N>(workspace, rows, count, 0, parts);  // on their way while the factors are found
  merge_factors(workspace, rows, count, factors, sums);
  sync_block();
  Softmax<N> total[PIECES];
  UNROLL
  for (int i = 0; i < PIECES; ++i) total[i] = {};
  NO_UNROLL
  for (int split = 0; split < count; split += AHEAD) {
    if (split > 0) load_parts<WIDTH, N>(workspace, rows, count, split, parts);
    UNROLL
    for (int i = 0; i < PIECES; ++i) {
      if (!Own::has(i, rows, workspace.head_dim)) continue;
      UNROLL
      for (int j = 0; j < AHEAD; ++j) {
        if (split + j >= count) break;
        const int factor = Own::row(i) * MOST_SPLITS + split + j;
        const float old = factors[2 * factor], fresh = factors[2 * factor + 1];
        total[i].sum = total[i].sum * old + sums[factor] * fresh;
        UNROLL
        for (int k = 0; k < N; ++k) total[i].out.at[k] = total[i].out.at[k] * old + parts[i][j].at[k] * fresh;
      }
    }
  }
  UNROLL
  for (int i = 0; i < PIECES; ++i) {
    if (!Own::has(i, rows, workspace.head_dim)) continue;
    store_elements(out + Own::row(i) * workspace.head_dim + Own::dimension(i), total[i].out, total[i].sum);
  }
}
