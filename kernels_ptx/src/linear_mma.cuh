// The sums of a block of `linear` on tensor cores, m16n8k16: 16 slots of the weight are a product's rows, 8 tokens its
// columns. The 8 warps each take their own part of the depth.
//
// A sum does not care which k comes first, so lane (g, t) takes elements 8 t..8 t + 7 of a chunk of 32 of rows g and
// g + 8: one 16-byte piece of each is what two products want of it. Those of token g go the same way. A lane copies its
// own pieces into a ring in shared memory and is the only one that reads them, so nothing has to be waited for but the
// copies, and neither bank conflicts nor a layout matter.
#pragma once

#include "linear_in.cuh"
#include "linear_out.cuh"

// Elements of the depth that two products take.
enum : int { CHUNK = 32 };

template <int TILES, int EIGHTS, typename X, typename Out>
struct Stream {
  // 4096 bytes a piece and stage of 256 threads: at most 96 KB, which every GPU from sm_80 on gives to a block.
  enum : int { PIECES = 2 * TILES + EIGHTS, FITTING = 24 / PIECES, STAGES = FITTING < 6 ? FITTING : 6 };

  const Operands<X>& in;
  const Out& out;
  Range range;
  unsigned char* ring;
  const X* from[PIECES];  // the start of each piece's row, or of x where there is no such row
  uint32 present;         // bit i: there is a row for piece i

  DEVICE Stream(const Operands<X>& operands, const Out& target, unsigned char* memory)
      : in(operands),
        out(target),
        range(part_of(in.depth, block_y() * warp_count() + warp_index(), grid_y() * warp_count())),
        ring(memory + thread_index() * 16),
        present(0) {
    UNROLL
    for (int piece = 0; piece < PIECES; ++piece) {
      const X* row = row_of(piece);
      from[piece] = row == nullptr ? in.x : row;
      present |= uint32(row != nullptr) << piece;
    }
  }

  // Weight rows g and g + 8 of each tile, then token g of each eight; null behind the last.
  DEVICE const X* row_of(int piece) const {
    const int group = lane_index() / 4;
    if (piece < 2 * TILES) {
      const int row = out.template row<8>(block_x() * TILES * 16 + piece * 8 + group);
      return row == NOWHERE ? nullptr : in.weight + int64(row) * in.depth;
    }
    const int token = (piece - 2 * TILES) * 8 + group;
    return token < in.tokens ? in.x + int64(token) * in.depth : nullptr;
  }

  DEVICE unsigned char* slot(int stage, int piece) const {
    return ring + (stage * PIECES + piece) * thread_count() * 16;
  }

  // Every call commits one group, so that counting groups is counting chunks.
  DEVICE void fetch(int stage, int chunk) const {
    const int k = chunk + lane_index() % 4 * WIDE;
    if (chunk < range.end && in.depth % WIDE == 0) {
      const bool inside = k < range.end;
      UNROLL
      for (int piece = 0; piece < PIECES; ++piece) {
        const bool wanted = inside && (present >> piece & 1u);
        copy_async_once(slot(stage, piece), from[piece] + (inside ? k : 0), wanted ? 16 : 0);
      }
    } else if (chunk < range.end) {  // rows start anywhere
      NO_UNROLL
      for (int piece = 0; piece < PIECES; ++piece) {
        store(reinterpret_cast<X*>(slot(stage, piece)), load_piece(row_of(piece), k, range.end));
      }
    }
    commit_copies();
  }

  DEVICE void multiply(int stage, float (&sums)[TILES][EIGHTS][4]) const {
    Words4 weights[TILES][2];
    UNROLL
    for (int piece = 0; piece < 2 * TILES; ++piece) weights[piece / 2][piece % 2] = load_words4(slot(stage, piece));
    UNROLL
    for (int eight = 0; eight < EIGHTS; ++eight) {
      const Words4 x = load_words4(slot(stage, 2 * TILES + eight));
      UNROLL
      for (int half = 0; half < 2; ++half) {
        const uint32 b[2] = {x.word[2 * half], x.word[2 * half + 1]};
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
          const Words4 &upper = weights[tile][0], &lower = weights[tile][1];
          const uint32 a[4] = {upper.word[2 * half], lower.word[2 * half], upper.word[2 * half + 1],
                               lower.word[2 * half + 1]};
          mma_16816(sums[tile][eight], a, b, X());
        }
      }
    }
  }

  DEVICE void accumulate(float (&sums)[TILES][EIGHTS][4]) const {
    NO_UNROLL
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage, range.begin + stage * CHUNK);
    int stage = 0;
    NO_UNROLL
    for (int chunk = range.begin; chunk < range.end; chunk += CHUNK) {
      wait_copies<STAGES - 2>();
      // Into the stage before this one, whose products have been started.
      fetch(stage == 0 ? STAGES - 1 : stage - 1, chunk + (STAGES - 1) * CHUNK);
      multiply(stage, sums);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
  }
};

// Leaves each warp's partial sums of the block's tile in shared memory, one after another, and gives their number. Of
// lane (g, t) and an eight there are four in a row: first g and second g, each of tokens 2 t and 2 t + 1.
template <int TILES, int EIGHTS, typename X, typename Out>
DEVICE int block_sums(const Operands<X>& in, const Out& out, unsigned char* memory) {
  float sums[TILES][EIGHTS][4] = {};
  Stream<TILES, EIGHTS, X, Out>(in, out, memory).accumulate(sums);
  sync_block();  // the ring is read; its memory is the sums' now
  float* to = reinterpret_cast<float*>(memory) + warp_index() * TILES * EIGHTS * WARP * 4 + lane_index() * 4;
  UNROLL
  for (int tile = 0; tile < TILES; ++tile) {
    UNROLL
    for (int eight = 0; eight < EIGHTS; ++eight) {
      const float (&of)[4] = sums[tile][eight];
      store(to + (tile * EIGHTS + eight) * WARP * 4, Pack<float, 4>{{of[0], of[1], of[2], of[3]}});
    }
  }
  sync_block();
  return warp_count();
}
