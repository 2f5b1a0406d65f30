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
  DEVICE Softmax of(int warp, int query, int dimension) const {
    const int at = warp * ROWS + query;
    return {largest[at], sum[at], {row(at)[dimension], row(at)[dimension + 1]}};
  }
};

template <int WIDTH>
DEVICE Softmax merge_warps(const Partials<WIDTH>& partials, int row, int dimension) {
  Softmax found = partials.of(0, row, dimension);
  UNROLL
  for (int warp = 1; warp < WARPS; ++warp) found = merged(found, partials.of(warp, row, dimension));
  return found;
}

// A thread's share of the result: every 128th pair of dimensions, of which it has PAIRS at most.
template <int WIDTH>
struct Share {
  enum : int { PAIRS = ROWS * WIDTH / 2 / (WARPS * WARP) };

  static DEVICE int row(int i) { return (i * WARPS * WARP + thread_index()) / (WIDTH / 2); }
  static DEVICE int dimension(int i) { return (i * WARPS * WARP + thread_index()) % (WIDTH / 2) * 2; }
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

DEVICE void keep(const Workspace& workspace, int row, int split, int dimension, const Softmax& found) {
  float* out = workspace.out_of(row, split) + dimension;
  store_words2(out, {{bits_of(found.out[0]), bits_of(found.out[1])}});
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
  const int split = lane_index();
  NO_UNROLL
  for (int row = warp_index(); row < rows; row += WARPS) {
    const float* state = workspace.state_of(row, split);
    const float own = split < count ? state[0] : minus_infinity();
    if (split < count) sums[row * MOST_SPLITS + split] = state[1];
    float largest = own;
    UNROLL
    for (int apart = 1; apart < WARP; apart *= 2) {
      const float lower = shuffle(largest, split - apart);
      if (split >= apart) largest = larger(largest, lower);
    }
    const float before = shuffle(largest, split - 1), base = base_of(largest);
    factors[(row * MOST_SPLITS + split) * 2] = power_of_two((split == 0 ? minus_infinity() : before) - base);
    factors[(row * MOST_SPLITS + split) * 2 + 1] = power_of_two(own - base);
  }
}

// A thread's share of AHEAD splits from `split` on; behind the last one, of the last again.
template <int WIDTH, int PAIRS, int AHEAD>
DEVICE void load_parts(const Workspace& workspace, int rows, int count, int split, Words2 (&parts)[PAIRS][AHEAD]) {
  UNROLL
  for (int i = 0; i < PAIRS * AHEAD; ++i) {
    const int pair = i / AHEAD, at = smaller_int(split + i % AHEAD, count - 1);
    if (!Share<WIDTH>::has(pair, rows, workspace.head_dim)) continue;
    parts[pair][i % AHEAD] = load_words2(workspace.out_of(Share<WIDTH>::row(pair), at) + Share<WIDTH>::dimension(pair));
  }
}

// All splits from the workspace, in order; `scratch` holds 3 ROWS MOST_SPLITS floats of shared memory.
template <int WIDTH, typename X>
DEVICE void merge_splits(const Workspace& workspace, int rows, int count, float* scratch, X* out) {
  enum : int { PAIRS = Share<WIDTH>::PAIRS, AHEAD = PAIRS > 4 ? 4 : 8 };
  float *factors = scratch, *sums = scratch + 2 * ROWS * MOST_SPLITS;
  Words2 parts[PAIRS][AHEAD];
  load_parts<WIDTH>(workspace, rows, count, 0, parts);  // on their way while the factors are found
  merge_factors(workspace, rows, count, factors, sums);
  sync_block();
  Softmax total[PAIRS];
  UNROLL
  for (int i = 0; i < PAIRS; ++i) total[i] = {};
  NO_UNROLL
  for (int split = 0; split < count; split += AHEAD) {
    if (split > 0) load_parts<WIDTH>(workspace, rows, count, split, parts);
    UNROLL
    for (int i = 0; i < PAIRS * AHEAD; ++i) {
      const int pair = i / AHEAD, at = split + i % AHEAD;
      if (!Share<WIDTH>::has(pair, rows, workspace.head_dim) || at >= count) continue;
      const int factor = Share<WIDTH>::row(pair) * MOST_SPLITS + at;
      const float old = factors[2 * factor], fresh = factors[2 * factor + 1];
      total[pair].sum = total[pair].sum * old + sums[factor] * fresh;
      total[pair].out[0] = total[pair].out[0] * old + float_of(parts[pair][i % AHEAD].word[0]) * fresh;
      total[pair].out[1] = total[pair].out[1] * old + float_of(parts[pair][i % AHEAD].word[1]) * fresh;
    }
  }
  UNROLL
  for (int i = 0; i < PAIRS; ++i) {
    if (!Share<WIDTH>::has(i, rows, workspace.head_dim)) continue;
    X* to = out + Share<WIDTH>::row(i) * workspace.head_dim + Share<WIDTH>::dimension(i);
    store_pair(to, total[i].out[0] / total[i].sum, total[i].out[1] / total[i].sum);
  }
}
