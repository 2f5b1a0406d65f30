// Many tokens times a weight on the tensor cores of Hopper: 128 slots (linear_out.cuh) and 128 or 256 tokens a tile.
//
// Tiles are counted with the tokens fastest, so that the blocks that share slots run at the same time. The first tiles
// have a block each; the last ones, which would leave most of the GPU idle, are cut into as many parts of the depth as
// there is room for. Their sums meet in the workspace and are added up in the order of the parts: the bits follow from
// the sizes alone.
#pragma once

#include "wgmma_tile.cuh"

// A tile's sums: those of a thread are N.
template <int TOKENS>
struct Sums {
  enum : int { N = TOKENS / 2 };
  float at[N] = {};

  // This thread's of a part, as they lie in its registers.
  static DEVICE float* place(float* workspace, int part) {
    return workspace + (int64(part) * TOKENS * SLOTS + thread_index() * 4);
  }

  DEVICE void leave(float* workspace, int part) const {
    float* to = place(workspace, part);
    UNROLL
    for (int i = 0; i < N; i += 4)
      store(to + i * TILE_THREADS, Pack<float, 4>{{at[i], at[i + 1], at[i + 2], at[i + 3]}});
  }

  DEVICE void add_up(float* workspace, int parts) {
    UNROLL
    for (int i = 0; i < N; ++i) at[i] = 0.0f;
    NO_UNROLL
    for (int part = 0; part < parts; ++part) {
      const float* from = place(workspace, part);
      UNROLL
      for (int i = 0; i < N; i += 4) {
        const Pack<float, 4> got = load<4>(from + i * TILE_THREADS);
        UNROLL
        for (int j = 0; j < 4; ++j) at[i + j] += got.at[j];
      }
    }
  }
};

template <int TOKENS, typename X, typename Out>
DEVICE void gemm(const Matrices& in, const Cut& cut, const Meeting& meeting, const Out& out) {
  using Own = Steps<TOKENS, 196608 / ((SLOTS + TOKENS) * ROW_BYTES)>;
  DYNAMIC_SHARED(dynamic);
  SHARED_ARRAY(uint64, words, 2 * Own::STAGES);
  unsigned char* memory = aligned_shared(dynamic, 1024);
  const TilePart own(cut);
  const Tile<TOKENS> tile(in, out, own.tile);
  const int all = (in.depth + STEP - 1) / STEP;
  Own steps(in, tile, memory, words, all * own.part / own.parts, all * (own.part + 1) / own.parts);
  Sums<TOKENS> sums;
  steps.accumulate(steps.end - steps.step, sums.at, X());
  start_next_grid();
  if (own.parts > 1) {
    float* workspace = meeting.workspace + int64(own.cut) * own.parts * TOKENS * SLOTS;
    sums.leave(workspace, own.part);
    if (!arrives_last(meeting.counters + own.cut, own.parts)) return;
    sums.add_up(workspace, own.parts);
  }
  finish_tile(out, tile, in.tokens, memory, [&](int i) { return sums.at[i]; });
}
