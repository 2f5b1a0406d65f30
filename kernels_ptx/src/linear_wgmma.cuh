// `linear` for more tokens on warpgroups, with its bits: 64 tokens and 128 slots a tile.
//
// linear_mma.cuh takes the depth in parts, of which each warp has one, and 16 elements a product. Here a block goes through
// the same parts and the same sixteens. Sums of such products are the same to the bit as those of mma_16816 (measured:
// benchmarks/LOG.md), parts are added up in the same order, and so a token has the same bits among few and among many.
//
// A tile's parts are its block's, or shared by several, which leave each part's sums in the workspace for the last.
#pragma once

#include "wgmma_tile.cuh"

template <typename X, typename Out>
struct PartTile {
  enum : int { TOKENS = 64, STAGES = 4, WARPS = 8 };
  using Sums = float[TOKENS / 2];

  const Copies<TOKENS, X, Out> copies;
  const Operands<X>& in;
  int splits;

  DEVICE PartTile(const Operands<X>& operands, const Out& target, unsigned char* memory, int tile, int split_count)
      : copies(operands, target, memory, tile), in(operands), splits(split_count) {}

  DEVICE void multiply(int stage, Sums& sums) const {
    const unsigned char *weights = copies.weights(stage), *tokens = copies.tokens(stage);
    UNROLL
    for (int k = 0; k < STEP; k += 16) {
      wgmma_16(sums, matrix_at(weights, k), matrix_at(tokens, k), X());
    }
    wgmma_commit();
  }

  // The steps of part `part` end before this one.
  DEVICE int end_of(int part) const { return (part_of(in.depth, part, splits * WARPS).end + STEP - 1) / STEP; }

  // This thread's sums of a part in the workspace, as they lie in its registers.
  DEVICE float* kept(float* workspace, int part) const {
    return workspace + (int64(part) * TOKENS * SLOTS + thread_index() * 4);
  }

  DEVICE void leave(float* workspace, int part, const Sums& sums) const {
    float* to = kept(workspace, part);
    UNROLL
    for (int i = 0; i < TOKENS / 2; i += 4) {
      store(to + i * 256, Pack<float, 4>{{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]}});
    }
  }

  // The parts [first, last): added up, or each left in the workspace.
  DEVICE void accumulate(int first, int last, float* workspace, Sums& total) const {
    enum : int { AHEAD = STAGES - 1 };
    const int end = end_of(last - 1);
    int step = first == 0 ? 0 : end_of(first - 1), stage = 0;
    NO_UNROLL
    for (int ahead = 0; ahead < AHEAD; ++ahead) copies.fetch(ahead, step + ahead, end);
    NO_UNROLL
    for (int part = first; part < last; ++part) {
      Sums sums = {};
      wgmma_border(sums);
      const int border = end_of(part);
      NO_UNROLL
      for (; step < border; ++step) {
        wait_copies<AHEAD - 1>();
        wgmma_wait<0>();
        show_to_wgmma();
        sync_block();  // the stage's copies have arrived, and all products before have read theirs
        wgmma_begin();
        multiply(stage, sums);
        copies.fetch(stage == 0 ? AHEAD : stage - 1, step + AHEAD, end);
        stage = stage == AHEAD ? 0 : stage + 1;
      }
      wgmma_wait<0>();
      wgmma_border(sums);
      if (workspace != nullptr) {
        leave(workspace, part, sums);
      } else {
        UNROLL
        for (int i = 0; i < TOKENS / 2; ++i) total[i] = part == first ? sums[i] : total[i] + sums[i];
      }
    }
  }

  // All parts from the workspace: those of one split added up, and then the splits.
  DEVICE void add_up(float* workspace, Sums& total) const {
    NO_UNROLL
    for (int split = 0; split < splits; ++split) {
      UNROLL
      for (int four = 0; four < TOKENS / 8; ++four) {
        const Pack<float, 4> sum = sum_of<WARPS>(kept(workspace, split * WARPS) + four * 1024, TOKENS * SLOTS);
        UNROLL
        for (int i = 0; i < 4; ++i) {
          total[four * 4 + i] = split == 0 ? sum.at[i] : total[four * 4 + i] + sum.at[i];
        }
      }
    }
  }

  // Four sums from each of COUNT parts, `stride` floats apart, added up in that order.
  template <int COUNT>
  static DEVICE Pack<float, 4> sum_of(const float* from, int stride) {
    Pack<float, 4> parts[COUNT];
    UNROLL
    for (int i = 0; i < COUNT; ++i) parts[i] = load<4>(from + int64(i) * stride);
    UNROLL
    for (int i = 1; i < COUNT; ++i) {
      UNROLL
      for (int j = 0; j < 4; ++j) parts[0].at[j] += parts[i].at[j];
    }
    return parts[0];
  }
};

// splits: S of linear.cu. Where it is more than 1, every tile is cut.
template <typename X, typename Out>
DEVICE void linear_parts(const Operands<X>& in, int splits, const Cut& cut, const Meeting& meeting, const Out& out) {
  DYNAMIC_SHARED(memory);
  enum : int { TOKENS = PartTile<X, Out>::TOKENS, WARPS = PartTile<X, Out>::WARPS };
  const TilePart own(cut);
  const PartTile<X, Out> tile(in, out, aligned_shared(memory, 1024), own.tile, splits);
  const int parts = splits * WARPS / own.parts;
  const bool alone = own.parts == 1;
  float* workspace = alone ? nullptr : meeting.workspace + int64(own.cut) * splits * WARPS * TOKENS * SLOTS;
  float sums[TOKENS / 2];
  wait_for_previous_grid();
  tile.accumulate(own.part * parts, (own.part + 1) * parts, workspace, sums);
  start_next_grid();
  if (!alone) {
    if (!arrives_last(meeting.counters + own.cut, own.parts)) return;
    tile.add_up(workspace, sums);
  }
  finish_tile<TOKENS>(out, tile.copies, [&](int i) { return sums[i]; });
}
