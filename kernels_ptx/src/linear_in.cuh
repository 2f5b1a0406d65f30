// What a linear layer reads, and the pieces that it is read in.
#pragma once

#include "element.cuh"

// x (tokens, depth) and weight (rows, depth), both row-major and on 16 bytes.
template <typename X>
struct Operands {
  const X* x;
  const X* weight;
  int tokens, depth;
};

struct Range {
  int begin, end;
};

// Elements that parts of the depth are multiples of: whole 128-byte lines of 16-bit elements.
enum : int { LINE = 64 };

// Part `part` of `parts` of the depth, as even as whole lines allow; it may be empty.
DEVICE Range part_of(int depth, int part, int parts) {
  const int lines = (depth + LINE - 1) / LINE;
  const int end = int(int64(lines) * (part + 1) / parts) * LINE;
  return {int(int64(lines) * part / parts) * LINE, end < depth ? end : depth};
}

// Elements [k, k + 8) of a row that may start anywhere: zeros from `end` on.
template <typename X>
DEVICE Pack<X, WIDE> load_piece(const X* row, int k, int end) {
  Pack<X, WIDE> piece = {};
  UNROLL
  for (int i = 0; i < WIDE; ++i) {
    if (k + i < end) piece.at[i] = row[k + i];
  }
  return piece;
}
