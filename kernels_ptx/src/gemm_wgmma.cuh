// Many tokens times a weight on the tensor cores of Hopper: 128, 144 or 192 slots (linear_out.cuh) and 128 or 256 tokens a
// tile.
//
// Tiles are counted with the tokens fastest, so that the blocks that share slots run at the same time. The first tiles
// have a block each; the last ones, which would leave most of the GPU idle, are cut into as many parts of the depth as
// there is room for. Their sums meet in the workspace, each block adds up a share of them, in the order of the parts:
// the bits follow from the sizes alone.
#pragma once

#include "wgmma_tile.cuh"

enum : int { MOST_PARTS = 16 };

template <typename Size, typename X, typename Out>
DEVICE void gemm(const Matrices& in, const Cut& cut, const Meeting& meeting, const Out& out) {
  enum : int { SLOTS = Size::SLOTS, TOKENS = Size::TOKENS, ROOM = SLOTS == 128 ? 196608 : 229376 };
  using Own = Steps<Size, ROOM / ((SLOTS + TOKENS) * ROW_BYTES)>;
  DYNAMIC_SHARED(dynamic);
  SHARED_ARRAY(uint64, words, 2 * Own::STAGES);
  unsigned char* memory = aligned_shared(dynamic, 1024);
  const TilePart own(cut);
  const Tile<Size> tile(in, out, own.tile);
  const int all = (in.depth + STEP - 1) / STEP;
  Own steps(in, tile, memory, words, all * own.part / own.parts, all * (own.part + 1) / own.parts);
  float sums[Size::SUMS] = {};
  steps.accumulate(steps.end - steps.step, sums, X());
  start_next_grid();
  Leaving<Size> leaving(tile, memory);
  if (own.parts == 1) {
    leaving.take(sums);
  } else {
    float* workspace = meeting.workspace + int64(own.cut) * own.parts * TOKENS * SLOTS;
    leave_sums<Size>(workspace, own.part, sums);
    leaving.take_share(own, meeting.counters + own.cut,
                       [&](int group) { return add_parts<Size, MOST_PARTS>(workspace, 0, own.parts, group); });
  }
  leaving.finish(out, in.tokens);
}
