// `linear` for more tokens on warpgroups, with its bits: 32 or 64 tokens and 128 slots a tile.
//
// linear_mma.cuh takes the depth in parts, of which each warp has one, and 16 elements a product. Here a block goes through
// the same parts and the same sixteens. Sums of such products are the same to the bit as those of mma_16816 (measured:
// benchmarks/LOG.md), parts are added up in the same order, and so a token has the same bits among few and among many.
//
// A tile's parts are its block's, or shared by several, which leave each part's sums in the workspace; then each block adds
// up those of some tokens.
#pragma once

#include "linear_in.cuh"
#include "wgmma_tile.cuh"

template <int T, typename X>
struct PartTile {
  enum : int { TOKENS = T, WARPS = 8 };  // WARPS: linear's
  using Own = SlotRows<128, TOKENS>;
  using Sums = float[TOKENS / 2];

  int depth, splits;

  // The steps of part `part` end before this one.
  DEVICE int end_of(int part) const { return (part_of(depth, part, splits * WARPS).end + STEP - 1) / STEP; }
  DEVICE int begin_of(int part) const { return part == 0 ? 0 : end_of(part - 1); }

  // The parts [first, last): added up, or each left in the workspace.
  template <typename Stages>
  DEVICE void accumulate(Stages& steps, int first, int last, float* workspace, Sums& total) const {
    NO_UNROLL
    for (int part = first; part < last; ++part) {
      Sums sums = {};
      steps.accumulate(end_of(part) - begin_of(part), sums, X());
      if (workspace != nullptr) {
        leave_sums<Own>(workspace, part, sums);
      } else {
        UNROLL
        for (int i = 0; i < TOKENS / 2; ++i) total[i] = part == first ? sums[i] : total[i] + sums[i];
      }
    }
  }

  // Sums 4 four.. of this thread from the workspace: all parts of one split added up, and then the splits.
  DEVICE Pack<float, 4> added(float* workspace, int four) const {
    Pack<float, 4> total = add_parts<Own, WARPS>(workspace, 0, WARPS, four);
    NO_UNROLL
    for (int split = 1; split < splits; ++split) {
      const Pack<float, 4> sum = add_parts<Own, WARPS>(workspace, split * WARPS, WARPS, four);
      UNROLL
      for (int i = 0; i < 4; ++i) total.at[i] = total.at[i] + sum.at[i];
    }
    return total;
  }
};

// splits: S of linear.cu. Where it is more than 1, every tile is cut.
template <int T, typename X, typename Out>
DEVICE void linear_parts(const Matrices& in, int splits, const Cut& cut, const Meeting& meeting, const Out& out) {
  using Parts = PartTile<T, X>;
  enum : int { TOKENS = Parts::TOKENS, WARPS = Parts::WARPS, SLOTS = Parts::Own::SLOTS };
  using Own = Steps<typename Parts::Own, T == 32 ? 5 : 4>;  // two blocks fit on a multiprocessor
  DYNAMIC_SHARED(dynamic);
  SHARED_ARRAY(uint64, words, 2 * Own::STAGES);
  unsigned char* memory = aligned_shared(dynamic, 1024);
  const TilePart own(cut);
  const Tile<typename Parts::Own> tile(in, out, own.tile);
  const Parts parts = {in.depth, splits};
  const int count = splits * WARPS / own.parts, first = own.part * count, last = first + count;
  const bool alone = own.parts == 1;
  float* workspace = alone ? nullptr : meeting.workspace + int64(own.cut) * splits * WARPS * TOKENS * SLOTS;
  float sums[TOKENS / 2];
  Own steps(in, tile, memory, words, parts.begin_of(first), parts.end_of(last - 1));
  parts.accumulate(steps, first, last, workspace, sums);
  start_next_grid();
  Leaving<typename Parts::Own> leaving(tile, memory);
  if (alone) {
    leaving.take(sums);
  } else {
    leaving.take_share(own, meeting.counters + own.cut, [&](int group) { return parts.added(workspace, group); });
  }
  leaving.finish(out, in.tokens);
}
