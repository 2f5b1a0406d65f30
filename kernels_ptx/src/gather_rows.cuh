// out[i] = table[index[i]], row by row: what embedding and select_rows are. One block copies up to 2048 elements of a
// row; grid (rows, ceil(width / 2048)), block 256.
#pragma once

#include "element.cuh"

template <int N, typename X>
DEVICE void copy_row(const X* from, X* to, int width) {
  const int stride = grid_y() * thread_count() * N;
  NO_UNROLL
  for (int column = (block_y() * thread_count() + thread_index()) * N; column < width; column += stride) {
    store(to + column, load<N>(from + column));
  }
}

template <typename X>
DEVICE void gather_row(const int* index, const X* table, X* out, int width) {
  begin_grid();
  const X* from = table + int64(index[block_x()]) * width;
  X* to = out + int64(block_x()) * width;
  if (width % WIDE == 0) {
    copy_row<WIDE>(from, to, width);
  } else {
    copy_row<1>(from, to, width);
  }
}
