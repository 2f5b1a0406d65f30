// The sums of a block of `linear` on tensor cores, m16n8k16: 16 slots of the weight are a product's rows, 8 tokens its
// columns. The 8 warps each take their own part of the depth.
//
// Lane (g, t) copies elements 8 t..8 t + 7 of a chunk of 32 of rows g and g + 8, a 16-byte piece each, into a ring in shared
// memory that is its warp's own; those of token g go the same way. A sum does not care which k comes first: of the 16 that
// a product takes, the lane has 4 t..4 t + 3, so a quarter of what its four lanes copied. Pieces lie so that what lanes read
// at a time is in different banks.
#pragma once

#include "linear_in.cuh"
#include "linear_out.cuh"

// Elements of the depth that two products take.
enum : int { CHUNK = 32 };

template <int TILES, int EIGHTS, typename X, typename Out>
struct Stream {
  // 4096 bytes a piece and stage of 256 threads: at most 96 KB, which every GPU from sm_80 on gives to a block.
  enum : int { ROWS = 2 * TILES, PIECES = ROWS + EIGHTS, FITTING = 24 / PIECES, STAGES = FITTING < 6 ? FITTING : 6 };

  const Operands<X>& in;
  const Out& out;
  Range range;
  unsigned char* ring;
  uint32 weight[ROWS];  // the starts of weight rows g and g + 8 of each tile, in whole pieces: registers are few

  DEVICE Stream(const Operands<X>& operands, const Out& target, unsigned char* memory)
      : in(operands),
        out(target),
        range(part_of(in.depth, block_y() * warp_count() + warp_index(), grid_y() * warp_count())),
        ring(memory + warp_index() * WARP * 16) {
    UNROLL
    for (int piece = 0; piece < ROWS; ++piece) weight[piece] = uint32(weight_row(piece)) * uint32(in.depth / WIDE);
  }

  // Behind the last row it is the first one, whose sums nobody asks for.
  DEVICE int weight_row(int piece) const {
    const int row = out.template row<8>(block_x() * TILES * 16 + piece * 8 + lane_index() / 4);
    return row == NOWHERE ? 0 : row;
  }

  // Token g of the eight that a piece behind the weight's belongs to, or NOWHERE.
  DEVICE int token_of(int piece) const {
    const int token = (piece - ROWS) * 8 + lane_index() / 4;
    return token < in.tokens ? token : NOWHERE;
  }

  // Where row g of a piece's eight has its 16 bytes `quarter`. Halves change places in every other pair of rows, so that
  // what lanes read at a time is in different banks, and what they copy of a row stays together.
  DEVICE unsigned char* quarter(int stage, int piece, int quarter) const {
    const int g = lane_index() / 4;
    return ring + (stage * PIECES + piece) * thread_count() * 16 + (g * 4 + (quarter ^ g / 2 % 2 * 2)) * 16;
  }

  DEVICE unsigned char* place(int stage, int piece) const { return quarter(stage, piece, lane_index() % 4); }

  // This lane's four elements of the product `half` of a chunk.
  DEVICE Words2 four(int stage, int piece, int half) const {
    const int t = lane_index() % 4;
    return load_words2(quarter(stage, piece, half * 2 + t / 2) + t % 2 * 8);
  }

  // The piece from k on of the row that starts at piece `row`, or the matrix's first one.
  DEVICE const X* piece_at(const X* matrix, uint32 row, int k, bool wanted) const {
    return matrix + int64(wanted ? row + uint32(k) / WIDE : 0) * WIDE;
  }

  // Elements [k, k + 8) of every weight row.
  DEVICE void fetch_weights(int stage, int k) const {
    const bool inside = k < range.end;
    UNROLL
    for (int piece = 0; piece < ROWS; ++piece) {
      copy_async_once(place(stage, piece), piece_at(in.weight, weight[piece], k, inside), inside ? 16 : 0);
    }
  }

  // The same of every token. Addresses are counted up, since registers are few.
  DEVICE void fetch_tokens(int stage, int k) const {
    const bool inside = k < range.end;
    uint32 row = uint32(lane_index() / 4) * uint32(in.depth / WIDE);
    UNROLL
    for (int piece = ROWS; piece < PIECES; ++piece) {
      const bool wanted = inside && token_of(piece) != NOWHERE;
      copy_async(place(stage, piece), piece_at(in.x, row, k, wanted), wanted ? 16 : 0);
      row += uint32(in.depth);  // eight rows, in pieces
    }
  }

  // The same of rows that start anywhere.
  DEVICE void fetch_unaligned(int stage, int k) const {
    NO_UNROLL
    for (int piece = 0; piece < PIECES; ++piece) {
      Pack<X, WIDE> got = {};
      if (piece < ROWS) {
        got = load_piece(in.weight + int64(weight_row(piece)) * in.depth, k, range.end);
      } else if (token_of(piece) != NOWHERE) {
        got = load_piece(in.x + int64(token_of(piece)) * in.depth, k, range.end);
      }
      store(reinterpret_cast<X*>(place(stage, piece)), got);
    }
  }

  // Every call commits one group, so that counting groups is counting chunks.
  DEVICE void fetch(int stage, int chunk) const {
    const int k = chunk + lane_index() % 4 * WIDE;
    if (chunk < range.end && in.depth % WIDE == 0) {
      fetch_weights(stage, k);
      fetch_tokens(stage, k);
    } else if (chunk < range.end) {
      fetch_unaligned(stage, k);
    }
    commit_copies();
  }

  DEVICE void multiply(int stage, float (&sums)[TILES][EIGHTS][4]) const {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      Words2 weights[ROWS];
      UNROLL
      for (int piece = 0; piece < ROWS; ++piece) weights[piece] = four(stage, piece, half);
      UNROLL
      for (int eight = 0; eight < EIGHTS; ++eight) {
        const Words2 x = four(stage, ROWS + eight, half);
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
          const Words2 &upper = weights[2 * tile], &lower = weights[2 * tile + 1];
          const uint32 a[4] = {upper.word[0], lower.word[0], upper.word[1], lower.word[1]};
          mma_16816(sums[tile][eight], a, x.word, X());
        }
      }
    }
  }

  DEVICE void accumulate(float (&sums)[TILES][EIGHTS][4]) const {
    enum : int { AHEAD = STAGES - 1, FEW = AHEAD < 2 ? AHEAD : 2 };
    // Weights may be on their way before the grid that makes the tokens has ended, but a stage is there only with all that
    // came before it. Where a warp takes little more than the ring holds, a few stages then: with all of them, blocks that
    // share a multiprocessor would first all wait and then all compute, instead of in turns.
    const bool is_long = range.end - range.begin >= 2 * STAGES * CHUNK;
    const int early = !GRIDS_OVERLAP || in.depth % WIDE ? 0 : is_long ? AHEAD : FEW;
    const int begin = range.begin + lane_index() % 4 * WIDE;
    NO_UNROLL
    for (int stage = 0; stage < early; ++stage) fetch_weights(stage, begin + stage * CHUNK);
    wait_for_previous_grid();
    NO_UNROLL
    for (int stage = 0; stage < early; ++stage) {
      fetch_tokens(stage, begin + stage * CHUNK);
      commit_copies();
    }
    NO_UNROLL
    for (int stage = early; stage < AHEAD; ++stage) fetch(stage, range.begin + stage * CHUNK);
    // Not before the wait: what the next grid does before its own may then count on all that ended before this one began.
    start_next_grid();
    int stage = 0;
    NO_UNROLL
    for (int chunk = range.begin; chunk < range.end; chunk += CHUNK) {
      wait_copies<AHEAD - 1>();
      sync_warp();  // the copies of all lanes, and their reads of the stage before
      // Into the stage before this one, whose products have been started.
      fetch(stage == 0 ? AHEAD : stage - 1, chunk + AHEAD * CHUNK);
      multiply(stage, sums);
      stage = stage == AHEAD ? 0 : stage + 1;
    }
  }
};

// Each warp's partial sums of the block's tiles, one after another in shared memory.
template <int TILES, int EIGHTS, typename X, typename Out>
DEVICE void partial_sums(const Operands<X>& in, const Out& out, unsigned char* memory) {
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
}

// Leaves partial sums of the block's 1 or 2 tiles in shared memory, and gives how many layers of them there are. In a
// layer, lane (g, t) of a tile and an eight has four in a row: first g and second g, each of tokens 2 t and 2 t + 1.
template <int EIGHTS, typename X, typename Out>
DEVICE int block_sums(const Operands<X>& in, const Out& out, int tiles, unsigned char* memory) {
  if (tiles == 1) {
    partial_sums<1, EIGHTS>(in, out, memory);
  } else {
    partial_sums<2, EIGHTS>(in, out, memory);
  }
  return warp_count();
}
