// What becomes of a linear layer's sums, x W^T in float, whichever kernel made them: bias, rounding points, stores.
//
// A kernel sees the rows of the weight as slots. It holds a sum and the one P slots on in the same lane: slots come as
// P `first` and then P `second` ones. Plain outputs have their rows in slots in order; gated ones have P gate rows as
// first, and the P up rows that belong to them as second, so that a product of both needs no exchange.
#pragma once

#include "activation.cuh"

enum : int { NOWHERE = -1 };  // the row of a slot behind the last row

template <typename X>
DEVICE float with_bias(float sum, const X* bias, int row) {
  return bias == nullptr ? sum : sum + to_float(bias[row]);
}

template <typename X>
DEVICE void touch_bias(const X* bias, int row) {
  if (bias != nullptr) prefetch(bias + row);
}

// The value of one sum of a plain output; `at` is its index in the output.

template <typename X>
struct Rounded {  // X(sum + bias)
  using Element = X;
  const X* bias;

  DEVICE X operator()(float sum, int row, int64) const { return rounded<X>(with_bias(sum, bias, row)); }
  DEVICE void touch(int row, int64) const { touch_bias(bias, row); }
};

template <typename X>
struct Added {  // X(residual + X(sum + bias))
  using Element = X;
  const X* bias;
  const X* residual;

  DEVICE X operator()(float sum, int row, int64 at) const {
    const X projected = rounded<X>(with_bias(sum, bias, row));
    return rounded<X>(to_float(residual[at]) + to_float(projected));
  }
  DEVICE void touch(int row, int64 at) const {
    touch_bias(bias, row);
    prefetch(residual + at);
  }
};

template <typename X>
struct Unrounded {  // sum + bias
  using Element = float;
  const X* bias;

  DEVICE float operator()(float sum, int row, int64) const { return with_bias(sum, bias, row); }
  DEVICE void touch(int row, int64) const { touch_bias(bias, row); }
};

// out (tokens, rows): a value a row.
template <typename Value>
struct Plain {
  using Element = typename Value::Element;
  Value value;
  Element* out;
  int rows;

  template <int P>
  DEVICE int slots() const {
    return rows;
  }

  template <int P>
  DEVICE int row(int slot) const {
    return slot < rows ? slot : NOWHERE;
  }

  // The row of the first of P slots, those after it are in the next ones; behind the last row are others, or none.
  template <int P>
  DEVICE int first_row(int slot) const {
    return slot;
  }

  // N neighbouring sums of one token, and the N that are P slots on.
  template <int P, int N>
  DEVICE void finish(int token, int slot, const float (&first)[N], const float (&second)[N]) const {
    put(token, slot, first);
    put(token, slot + P, second);
  }

  // `row` is a multiple of N.
  template <int N>
  DEVICE void put(int token, int row, const float (&sums)[N]) const {
    const int64 at = int64(token) * rows + row;
    if (rows % N == 0) {
      if (row >= rows) return;
      Pack<Element, N> values;
      UNROLL
      for (int i = 0; i < N; ++i) values.at[i] = value(sums[i], row + i, at + i);
      *reinterpret_cast<Pack<Element, N>*>(out + at) = values;
    } else {
      UNROLL
      for (int i = 0; i < N; ++i) {
        if (row + i < rows) out[at + i] = value(sums[i], row + i, at + i);
      }
    }
  }

  // In tiles of up to 16 slots, `tall`: a box of neighbouring rows, and of one token the sums of slots g and g + 8.
  enum : int { BOXES = 1 };
  DEVICE int tiles(int tall) const { return (rows + tall - 1) / tall; }
  DEVICE int box_row(int tile, int tall, int) const { return tile * tall; }

  DEVICE void finish_pair(int token, int tile, int tall, int g, float first, float second) const {
    const float sums[2][1] = {{first}, {second}};
    if (g < tall) put(token, tile * tall + g, sums[0]);
    if (g + 8 < tall) put(token, tile * tall + g + 8, sums[1]);
  }

  // What that reads, into the nearest cache.
  DEVICE void touch_pair(int token, int tile, int tall, int g) const {
    UNROLL
    for (int slot = g; slot < 16; slot += 8) {
      const int row = tile * tall + slot;
      if (slot < tall && row < rows) value.touch(row, int64(token) * rows + row);
    }
  }
};

// out (tokens, width) = X(X(act(X(gate))) * X(up)); weight and bias have `width` gate rows, then as many up rows.
template <typename X>
struct Gated {
  const X* bias;
  X* out;
  int width, activation;

  template <int P>
  DEVICE int slots() const {
    return (width + P - 1) / P * 2 * P;
  }

  template <int P>
  DEVICE int row(int slot) const {
    const int column = slot / (2 * P) * P + slot % P;
    return column >= width ? NOWHERE : slot / P % 2 == 0 ? column : width + column;
  }

  template <int P>
  DEVICE int first_row(int slot) const {
    return slot / (2 * P) * P + (slot / P % 2 == 0 ? 0 : width);
  }

  template <int P, int N>
  DEVICE void finish(int token, int slot, const float (&first)[N], const float (&second)[N]) const {
    const int column = slot / (2 * P) * P + slot % P;
    if (column >= width) return;
    float gates[N];
    Pack<X, N> values;
    UNROLL
    for (int i = 0; i < N; ++i) gates[i] = rounded_again(first[i], clamped(column + i));
    activate(gates, activation);
    UNROLL
    for (int i = 0; i < N; ++i) {
      const float up = rounded_again(second[i], width + clamped(column + i));
      values.at[i] = rounded<X>(to_float(rounded<X>(gates[i])) * up);
    }
    X* to = out + int64(token) * width + column;
    if (width % N == 0) {  // as `column` is
      *reinterpret_cast<Pack<X, N>*>(to) = values;
    } else {
      UNROLL
      for (int i = 0; i < N; ++i) {
        if (column + i < width) to[i] = values.at[i];
      }
    }
  }

  // In tiles of 16 slots: a box of eight gate rows and one of their up rows.
  enum : int { BOXES = 2 };
  DEVICE int tiles(int) const { return (width + 7) / 8; }
  DEVICE int box_row(int tile, int, int box) const { return tile * 8 + box * width; }

  DEVICE void finish_pair(int token, int tile, int, int g, float first, float second) const {
    const float gate[1] = {first}, up[1] = {second};
    finish<8>(token, tile * 16 + g, gate, up);
  }

  DEVICE void touch_pair(int, int tile, int, int g) const {
    if (tile * 8 + g >= width) return;
    touch_bias(bias, tile * 8 + g);
    touch_bias(bias, width + tile * 8 + g);
  }

  DEVICE int clamped(int column) const { return smaller_int(column, width - 1); }
  DEVICE float rounded_again(float sum, int row) const { return to_float(rounded<X>(with_bias(sum, bias, row))); }
};
