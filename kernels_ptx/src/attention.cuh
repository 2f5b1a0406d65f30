// What every attention kernel shares: where a key lies, which keys a query sees, and how softmax states merge.
//
// Scores are in the domain of powers of two: scale is multiplied by log2(e), and exp2 replaces exp.
#pragma once

#include "e4m3.cuh"

// Keys in the smallest piece that a warp takes, as many lie side by side in every block size; and queries of a warp.
enum : int { KEY_TILE = 16, ROWS = 8 };

DEVICE float minus_infinity() { return float_of(0xff800000u); }

// What all launches of attention are told.
struct AttentionShape {
  int heads, kv_heads, head_dim, blocks, block_size, max_blocks;
  float scale;
  int window;  // 0: none
};

// The keys and values that one head of one sequence has in the cache (2, blocks, kv_heads, block_size, head_dim) of C,
// and their scales (2, blocks, kv_heads, block_size) where C has such.
template <typename C>
struct Pages {
  const C* cache;
  const float* scales;
  const int* table;
  int64 to_values;                         // rows from a key to its value
  int kv_heads, kv_head, head_dim, shift;  // block_size = 1 << shift

  // The row of the key at a position; those up to the next multiple of KEY_TILE follow it.
  DEVICE int64 row(int position) const {
    const int64 block = table[position >> shift];
    return ((block * kv_heads + kv_head) << shift) + (position & ((1 << shift) - 1));
  }
};

template <typename C>
DEVICE Pages<C> pages_of(const C* cache, const float* scales, const int* block_tables, int sequence, int kv_head,
                         const AttentionShape& shape) {
  const int64 to_values = int64(shape.blocks) * shape.kv_heads * shape.block_size;
  const int shift = shape.block_size == 16 ? 4 : shape.block_size == 32 ? 5 : 6;
  const int* table = block_tables + int64(sequence) * shape.max_blocks;
  return {cache, scales, table, to_values, shape.kv_heads, kv_head, shape.head_dim, shift};
}

// The first position that a query sees.
DEVICE int first_seen(int position, int window) { return window == 0 ? 0 : larger_int(0, position - window + 1); }

// Row r is a query at position + r * step. It sees its own position and those before it, of a window the last ones.
struct Sight {
  int position, step, window;

  DEVICE bool sees(int row, int key) const {
    const int at = position + row * step;
    return key <= at && (window == 0 || key > at - window);
  }
};

// N neighbouring floats, 2 or a multiple of 4, at a multiple of their bytes.
template <int N>
DEVICE Pack<float, N> load_floats(const float* from) {
  if constexpr (N % 4 == 0) return load<N>(from);
  const Words2 words = load_words2(from);
  return {{float_of(words.word[0]), float_of(words.word[1])}};
}
template <int N>
DEVICE void store_floats(float* to, const Pack<float, N>& values) {
  if constexpr (N % 4 == 0) {
    store(to, values);
  } else {
    store_words2(to, {{bits_of(values.at[0]), bits_of(values.at[1])}});
  }
}

// The softmax of some keys: the largest score, the sum of exp2(score - largest), and that sum weighted by values.
template <int N>
struct Softmax {
  float largest, sum;
  Pack<float, N> out;  // of neighbouring dimensions
};

// Rows of q into shared memory, (rows, WIDTH) and zero from head_dim on, by `threads` threads of which this is number
// `thread`; whoever reads waits for all.
template <int WIDTH, typename X>
DEVICE void put_queries(const X* q, int64 stride, int rows, int head_dim, X* to, int thread, int threads) {
  NO_UNROLL
  for (int i = thread; i < rows * WIDTH; i += threads) {
    const int row = i / WIDTH, dimension = i % WIDTH;
    to[i] = dimension < head_dim ? q[row * stride + dimension] : X{0};
  }
}

// What scores are measured from: the largest one so far, or 0 while none was above minus infinity. A NaN stays one.
DEVICE float base_of(float largest) { return largest == minus_infinity() ? 0.0f : largest; }

// The order of merging is part of the result's bits: everywhere from the lowest keys upwards.
template <int N>
DEVICE Softmax<N> merged(const Softmax<N>& before, const Softmax<N>& next) {
  const float largest = larger(before.largest, next.largest), base = base_of(largest);
  const float old = power_of_two(before.largest - base), fresh = power_of_two(next.largest - base);
  Softmax<N> all = {largest, before.sum * old + next.sum * fresh, {}};
  UNROLL
  for (int i = 0; i < N; ++i) all.out.at[i] = before.out.at[i] * old + next.out.at[i] * fresh;
  return all;
}

// Two elements in one register, the first in the lower half.
template <typename X>
DEVICE uint32 rounded_pair(float first, float second) {
#ifdef NATIVE_PAIRS
  return pair_bits(first, second, X());
#else
  return uint32(rounded<X>(first).bits) | uint32(rounded<X>(second).bits) << 16;
#endif
}

// The address is even in elements.
template <typename X>
DEVICE void store_pair(X* to, float first, float second) {
  *reinterpret_cast<uint32*>(to) = rounded_pair<X>(first, second);
}
