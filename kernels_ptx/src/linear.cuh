// Few tokens times a large weight: what the entries of linear, linear_add, linear_act_mul and linear_f32 share.
//
// A block takes groups of one or two tiles of 16 slots (linear_out.cuh), all tokens, and part block_y() of grid_y() of the
// depth.
// Where there are several parts, each block leaves its sums in the workspace, and the last of them to arrive adds them
// up, in the order of the parts. So the order of every sum follows from the depth and grid_y(): no token's bits depend
// on the number of tokens, nor on the number of tiles.
#pragma once

#include "meeting.cuh"
#if TIER >= 80
#include "linear_mma.cuh"
#else
#include "linear_fma.cuh"
#endif

// How a launch shares out the work: groups of so many tiles, whether tokens stay, and where parts of the depth meet.
struct Split {
  int tiles, tokens_stay;
  Meeting meeting;
};

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

// The four sums that a layer has side by side at `index`.
template <int EIGHTS, typename Out>
DEVICE void finish_four(int index, const Pack<float, 4>& sums, int slot, int tokens, const Out& out) {
  const int lane = index % WARP, part = index / WARP;
  const int token = part % EIGHTS * 8 + lane % 4 * 2;
  slot += part / EIGHTS * 16 + lane / 4;
  UNROLL
  for (int i = 0; i < 2; ++i) {
    const float first[1] = {sums.at[i]}, second[1] = {sums.at[2 + i]};
    if (token + i < tokens) out.template finish<8>(token + i, slot, first, second);
  }
}

// Up to 8 EIGHTS tokens.
template <int EIGHTS, typename X, typename Out>
DEVICE void linear(const Operands<X>& in, const Split& split, const Out& out) {
  DYNAMIC_SHARED(memory);
  const int slots = split.tiles * 16, fours = split.tiles * EIGHTS * WARP;
  const Groups groups = {(out.template slots<8>() + slots - 1) / slots, split.tiles, split.tokens_stay != 0};
  BlockSums<EIGHTS, X, Out> block = {in, out, groups, memory};
  NO_UNROLL
  for (int group = block_x(); group < groups.count; group += grid_x()) {
    const float* sums = block.of(group);
    int layers = block.count();
    if (grid_y() > 1) {
      float* parts = split.meeting.workspace + int64(group) * grid_y() * fours * 4;
      NO_UNROLL
      for (int i = thread_index(); i < fours; i += thread_count()) {
        store(parts + (block_y() * fours + i) * 4, sum_of(sums + i * 4, layers, fours * 4));
      }
      if (!arrives_last(split.meeting.counters + group, grid_y())) continue;
      sums = parts;
      layers = grid_y();
    }
    NO_UNROLL
    for (int i = thread_index(); i < fours; i += thread_count()) {
      finish_four<EIGHTS>(i, sum_of(sums + i * 4, layers, fours * 4), group * slots, in.tokens, out);
    }
  }
}
