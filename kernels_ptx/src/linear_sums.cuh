// Sums of tiles of 16 slots in layers, each of another part of the depth: added up, and what becomes of them.
//
// In a layer, lane (g, t) of a tile and an eight of tokens has four in a row: first g and second g, each of tokens 2 t and
// 2 t + 1.
#pragma once

#include "linear_out.cuh"

// Four sums from each of `parts` layers, `stride` floats apart, added up in that order.
DEVICE Pack<float, 4> sum_of(const float* from, int parts, int stride) {
  Pack<float, 4> sum = load<4>(from);
  NO_UNROLL
  for (int part = 1; part < parts; ++part) {
    const Pack<float, 4> next = load<4>(from + int64(part) * stride);
    UNROLL
    for (int i = 0; i < 4; ++i) sum.at[i] += next.at[i];
  }
  return sum;
}

// The same of a known number, asked for together.
template <int PARTS>
DEVICE Pack<float, 4> sum_of(const float* from, int stride) {
  Pack<float, 4> parts[PARTS];
  UNROLL
  for (int part = 0; part < PARTS; ++part) parts[part] = load<4>(from + part * stride);
  UNROLL
  for (int part = 1; part < PARTS; ++part) {
    UNROLL
    for (int i = 0; i < 4; ++i) parts[0].at[i] += parts[part].at[i];
  }
  return parts[0];
}

// The four sums that a layer of tiles from slot `first` on has side by side at `index`.
template <int EIGHTS, typename Out>
DEVICE void finish_four(int index, const Pack<float, 4>& sums, int first, int tokens, const Out& out) {
  const int lane = index % WARP, part = index / WARP;
  const int slot = first + part / EIGHTS * 16 + lane / 4;
  const int token = part % EIGHTS * 8 + lane % 4 * 2;
  UNROLL
  for (int i = 0; i < 2; ++i) {
    const float upper[1] = {sums.at[i]}, lower[1] = {sums.at[2 + i]};
    if (token + i < tokens) out.template finish<8>(token + i, slot, upper, lower);
  }
}
