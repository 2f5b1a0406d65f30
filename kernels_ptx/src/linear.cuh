// Few tokens times a large weight: what the entries of linear, linear_add, linear_act_mul and linear_f32 share.
//
// A block has one or two tiles of 16 slots (linear_out.cuh), all tokens, and part block_y() of grid_y() of the depth.
// Where there are several parts, each block leaves its sums in the workspace, and the last of them to arrive adds them
// up, in the order of the parts. So the order of every sum follows from the depth and grid_y(): no token's bits depend
// on the number of tokens, nor on the number of tiles.
#pragma once

#include "linear_sums.cuh"
#include "meeting.cuh"
#if TIER >= 80
#include "linear_mma.cuh"
#else
#include "linear_fma.cuh"
#endif

// Up to 8 EIGHTS tokens. A grid that is wide enough for blocks of one tile has those, else blocks have two.
template <int EIGHTS, typename X, typename Out>
DEVICE void linear(const Operands<X>& in, const Meeting& meeting, const Out& out) {
  DYNAMIC_SHARED(memory);
  const int tiles = grid_x() * 16 >= out.template slots<8>() ? 1 : 2;
  const int fours = tiles * EIGHTS * WARP;
  int layers = block_sums<EIGHTS>(in, out, tiles, memory);
  const float* sums = reinterpret_cast<const float*>(memory);
  if (grid_y() > 1) {
    float* parts = meeting.workspace + int64(block_x()) * grid_y() * fours * 4;
    NO_UNROLL
    for (int i = thread_index(); i < fours; i += thread_count()) {
      store(parts + (block_y() * fours + i) * 4, sum_of(sums + i * 4, layers, fours * 4));
    }
    if (!arrives_last(meeting.counters + block_x(), grid_y())) return;
    sums = parts;
    layers = grid_y();
  }
  NO_UNROLL
  for (int i = thread_index(); i < fours; i += thread_count()) {
    finish_four<EIGHTS>(i, sum_of(sums + i * 4, layers, fours * 4), block_x() * tiles * 16, in.tokens, out);
  }
}
