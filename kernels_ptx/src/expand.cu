// expand: weights as a file stores them -> row-major X: out[i] = X(float(raw[row(i)])), dequantised in float as
// rvllm/model/quants.py does and rounded once.
//
// raw: rows of `columns` elements, stored as the entry's name says (expand_<format>_<X>); out (rows, columns) X.
// rotary_heads > 0: the file has each head's d = rows / rotary_heads rows in interleaved order, and out row
//   h d + half d/2 + pair is file row h d + 2 pair + half. A vector of rows (a bias) has 1 column.
// launch: grid (rows, ceil(columns / 2048)), block 256, no dynamic shared memory. One thread: 8 elements, or one.
// bound: rows columns (2 + bytes an element).
// assumes: raw is aligned to 2 bytes, no more: it may be an offset in a file; columns is a multiple of the format's
//   block (32, or 256 for _k); rows is a multiple of 2 rotary_heads. Where columns % 8 == 0, loads are wide if raw, and
//   stores if out, starts on 16 bytes. NaN stays NaN, with the bits that the rounding instruction gives.
// tiers: t70
#include "expand.cuh"

DEVICE int file_row(int row, int rows, int rotary_heads) {
  if (rotary_heads == 0) return row;
  const int head_rows = rows / rotary_heads;
  const int place = row % head_rows, half = place / (head_rows / 2), pair = place % (head_rows / 2);
  return row - place + 2 * pair + half;
}

template <typename F, typename X>
DEVICE void expand_eight(const Byte* from, X* to, int column, bool aligned) {
  float values[WIDE];
  F::eight(from + int64(column / F::ELEMENTS) * F::BYTES, column % F::ELEMENTS, values);
  Pack<X, WIDE> pack;
  UNROLL
  for (int i = 0; i < WIDE; ++i) pack.at[i] = rounded<X>(values[i]);
  if (aligned) {
    store(to + column, pack);
  } else {
    UNROLL
    for (int i = 0; i < WIDE; ++i) to[column + i] = pack.at[i];
  }
}

template <typename F, typename X>
DEVICE void expand(const Byte* raw, X* out, int rows, int columns, int rotary_heads) {
  const int row = block_x();
  const int first = block_y() * thread_count() + thread_index(), stride = grid_y() * thread_count();
  const Byte* from = raw + int64(file_row(row, rows, rotary_heads)) * (columns / F::ELEMENTS) * F::BYTES;
  X* to = out + int64(row) * columns;
  if (columns % WIDE == 0) {
    const bool aligned = reinterpret_cast<uint64>(out) % 16 == 0;
    NO_UNROLL
    for (int column = first * WIDE; column < columns; column += stride * WIDE) {
      expand_eight<F>(from, to, column, aligned);
    }
  } else if constexpr (F::ELEMENTS == 1) {
    NO_UNROLL
    for (int column = first; column < columns; column += stride) {
      to[column] = rounded<X>(F::one(from + int64(column) * F::BYTES));
    }
  }
}

KERNEL(256) void expand_f32_f16(const Byte* raw, half_t* out, int rows, int columns, int rotary_heads) {
  expand<StoredFloat>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_f32_bf16(const Byte* raw, bfloat_t* out, int rows, int columns, int rotary_heads) {
  expand<StoredFloat>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_f16_f16(const Byte* raw, half_t* out, int rows, int columns, int rotary_heads) {
  expand<StoredShort<half_t>>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_f16_bf16(const Byte* raw, bfloat_t* out, int rows, int columns, int rotary_heads) {
  expand<StoredShort<half_t>>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_bf16_f16(const Byte* raw, half_t* out, int rows, int columns, int rotary_heads) {
  expand<StoredShort<bfloat_t>>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_bf16_bf16(const Byte* raw, bfloat_t* out, int rows, int columns, int rotary_heads) {
  expand<StoredShort<bfloat_t>>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q4_0_f16(const Byte* raw, half_t* out, int rows, int columns, int rotary_heads) {
  expand<Q4_0>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q4_0_bf16(const Byte* raw, bfloat_t* out, int rows, int columns, int rotary_heads) {
  expand<Q4_0>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q4_1_f16(const Byte* raw, half_t* out, int rows, int columns, int rotary_heads) {
  expand<Q4_1>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q4_1_bf16(const Byte* raw, bfloat_t* out, int rows, int columns, int rotary_heads) {
  expand<Q4_1>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q5_0_f16(const Byte* raw, half_t* out, int rows, int columns, int rotary_heads) {
  expand<Q5_0>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q5_0_bf16(const Byte* raw, bfloat_t* out, int rows, int columns, int rotary_heads) {
  expand<Q5_0>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q5_1_f16(const Byte* raw, half_t* out, int rows, int columns, int rotary_heads) {
  expand<Q5_1>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q5_1_bf16(const Byte* raw, bfloat_t* out, int rows, int columns, int rotary_heads) {
  expand<Q5_1>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q8_0_f16(const Byte* raw, half_t* out, int rows, int columns, int rotary_heads) {
  expand<Q8_0>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q8_0_bf16(const Byte* raw, bfloat_t* out, int rows, int columns, int rotary_heads) {
  expand<Q8_0>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q4_k_f16(const Byte* raw, half_t* out, int rows, int columns, int rotary_heads) {
  expand<Q4_K>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q4_k_bf16(const Byte* raw, bfloat_t* out, int rows, int columns, int rotary_heads) {
  expand<Q4_K>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q5_k_f16(const Byte* raw, half_t* out, int rows, int columns, int rotary_heads) {
  expand<Q5_K>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q5_k_bf16(const Byte* raw, bfloat_t* out, int rows, int columns, int rotary_heads) {
  expand<Q5_K>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q6_k_f16(const Byte* raw, half_t* out, int rows, int columns, int rotary_heads) {
  expand<Q6_K>(raw, out, rows, columns, rotary_heads);
}

KERNEL(256) void expand_q6_k_bf16(const Byte* raw, bfloat_t* out, int rows, int columns, int rotary_heads) {
  expand<Q6_K>(raw, out, rows, columns, rotary_heads);
}
