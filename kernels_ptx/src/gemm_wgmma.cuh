// Many tokens times a weight on the tensor cores of Hopper: 128 slots (linear_out.cuh) and 128 or 256 tokens a tile.
//
// Two warpgroups have 64 slots each, all tokens of the tile, and 64 elements of the depth a step. Steps wait in shared
// memory, rows of 128 bytes swizzled as products want them, copied there while earlier ones are multiplied.
//
// Tiles are counted with the tokens fastest, so that the blocks that share slots run at the same time. The first tiles
// have a block each; the last ones, which would leave most of the GPU idle, are cut into as many parts of the depth as
// there is room for. Their sums meet in the workspace and are added up in the order of the parts: the bits follow from
// the sizes alone.
#pragma once

#include "wgmma_tile.cuh"

enum : int { GROUP_TOKENS = 128 };

template <int TOKENS, typename X, typename Out>
struct WideTile {
  enum : int { STAGES = 196608 / Copies<TOKENS, X, Out>::STAGE_BYTES };
  enum : int { GROUPS = TOKENS / GROUP_TOKENS };
  using Sums = float[GROUPS][64];

  const Copies<TOKENS, X, Out> copies;

  DEVICE WideTile(const Operands<X>& operands, const Out& target, unsigned char* memory, int tile)
      : copies(operands, target, memory, tile) {}

  DEVICE void multiply(int stage, Sums& sums) const {
    const unsigned char *weights = copies.weights(stage), *tokens = copies.tokens(stage);
    UNROLL
    for (int k = 0; k < STEP; k += 16) {
      UNROLL
      for (int group = 0; group < GROUPS; ++group) {
        const unsigned char* some = tokens + group * GROUP_TOKENS * ROW_BYTES;
        wgmma_16(sums[group], matrix_at(weights, k), matrix_at(some, k), X());
      }
    }
    wgmma_commit();
  }

  // Steps [begin, end) of the depth.
  DEVICE void accumulate(Sums& sums, int begin, int end) const {
    enum : int { AHEAD = STAGES - 1 };
    NO_UNROLL
    for (int ahead = 0; ahead < AHEAD; ++ahead) copies.fetch(ahead, begin + ahead, end);
    border(sums);
    int stage = 0;
    NO_UNROLL
    for (int step = begin; step < end; ++step) {
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
    border(sums);
  }

  static DEVICE void border(Sums& sums) {
    UNROLL
    for (int group = 0; group < GROUPS; ++group) wgmma_border(sums[group]);
  }

  // This thread's sums of a part, as they lie in its registers.
  DEVICE float* part_of_thread(float* workspace, int part) const {
    return workspace + (int64(part) * TOKENS * SLOTS + thread_index() * 4);
  }

  DEVICE void leave(float* workspace, int part, const Sums& sums) const {
    float* to = part_of_thread(workspace, part);
    UNROLL
    for (int i = 0; i < GROUPS * 16; ++i) {
      const float (&of)[64] = sums[i / 16];
      const int at = i % 16 * 4;
      store(to + i * 1024, Pack<float, 4>{{of[at], of[at + 1], of[at + 2], of[at + 3]}});
    }
  }

  DEVICE void add_up(const float* workspace, int parts, Sums& sums) const {
    UNROLL
    for (int i = 0; i < GROUPS * 64; ++i) sums[i / 64][i % 64] = 0.0f;
    NO_UNROLL
    for (int part = 0; part < parts; ++part) {
      const float* from = part_of_thread(const_cast<float*>(workspace), part);
      UNROLL
      for (int i = 0; i < GROUPS * 16; ++i) {
        const Pack<float, 4> got = load<4>(from + i * 1024);
        UNROLL
        for (int j = 0; j < 4; ++j) sums[i / 16][i % 16 * 4 + j] += got.at[j];
      }
    }
  }
};

template <int TOKENS, typename X, typename Out>
DEVICE void gemm(const Operands<X>& in, const Cut& cut, const Meeting& meeting, const Out& out) {
  DYNAMIC_SHARED(memory);
  const TilePart own(cut);
  const WideTile<TOKENS, X, Out> wide(in, out, aligned_shared(memory, 1024), own.tile);
  const int steps = (in.depth + STEP - 1) / STEP;
  float sums[TOKENS / GROUP_TOKENS][64] = {};
  wait_for_previous_grid();
  wide.accumulate(sums, steps * own.part / own.parts, steps * (own.part + 1) / own.parts);
  start_next_grid();
  if (own.parts > 1) {
    float* workspace = meeting.workspace + int64(own.cut) * own.parts * TOKENS * SLOTS;
    wide.leave(workspace, own.part, sums);
    if (!arrives_last(meeting.counters + own.cut, own.parts)) return;
    wide.add_up(workspace, own.parts, sums);
  }
  const auto sum = [&](int i) { return sums[i / 64][i % 64]; };
  finish_tile<TOKENS>(out, wide.copies, sum);
}
