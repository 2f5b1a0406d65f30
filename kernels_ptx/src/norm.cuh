// RMSNorm of one row by one block (Zhang and Sennrich 2019): out = X(weight * X(x / sqrt(mean(x^2) + epsilon))).
//
// The mean is summed in float: each thread its own packs in order, then block_sum. The order depends on the row's width
// and the number of threads, never on the number of rows, so a row's bits do not depend on its batch.
#pragma once

#include "element.cuh"
#include "reduce.cuh"

// Packs of a row that a thread keeps in registers: 1024 threads keep rows of up to 16384 elements. The rest is read
// twice.
enum : int { KEPT = 2 };

template <typename X, int N>
DEVICE float add_squares(float sum, const Pack<X, N>& pack) {
  UNROLL
  for (int i = 0; i < N; ++i) sum = fused_multiply_add(to_float(pack.at[i]), to_float(pack.at[i]), sum);
  return sum;
}

template <typename X, int N>
DEVICE Pack<X, N> scaled(const Pack<X, N>& x, const Pack<X, N>& weight, float scale) {
  Pack<X, N> out;
  UNROLL
  for (int i = 0; i < N; ++i) {
    const X normed = rounded<X>(to_float(x.at[i]) * scale);
    out.at[i] = rounded<X>(to_float(normed) * to_float(weight.at[i]));
  }
  return out;
}

// fetch(column) gives the pack of x there, once for each column; `again` is where x can be read after that.
template <int N, typename X, typename Fetch>
DEVICE void norm_row(Fetch fetch, const X* again, const X* weight, float epsilon, X* out, int hidden) {
  const int stride = thread_count() * N;
  const int first = thread_index() * N;
  const int rest = first + KEPT * stride;
  Pack<X, N> kept[KEPT], weights[KEPT];
  UNROLL
  for (int i = 0; i < KEPT; ++i) {
    const int column = first + i * stride;
    weights[i] = column < hidden ? load<N>(weight + column) : Pack<X, N>{};
  }
  begin_grid();  // no grid writes weights
  UNROLL
  for (int i = 0; i < KEPT; ++i) {
    const int column = first + i * stride;
    kept[i] = column < hidden ? fetch(column) : Pack<X, N>{};
  }
  float squares = 0.0f;
  UNROLL
  for (int i = 0; i < KEPT; ++i) squares = add_squares(squares, kept[i]);
  NO_UNROLL
  for (int column = rest; column < hidden; column += stride) squares = add_squares(squares, fetch(column));

  const float mean = block_sum(squares) / float(hidden);
  const float scale = 1.0f / square_root(mean + epsilon);
  UNROLL
  for (int i = 0; i < KEPT; ++i) {
    const int column = first + i * stride;
    if (column < hidden) store(out + column, scaled(kept[i], weights[i], scale));
  }
  NO_UNROLL
  for (int column = rest; column < hidden; column += stride) {
    store(out + column, scaled(load<N>(again + column), load<N>(weight + column), scale));
  }
}
