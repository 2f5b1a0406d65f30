// What products on warpgroups share: a block of two has 128 slots (linear_out.cuh), 64 each, and some tokens; 64 elements of
// the depth a step, whose rows lie in shared memory as 128 bytes.
#pragma once

#include "linear_in.cuh"
#include "linear_out.cuh"
#include "meeting.cuh"

enum : int { SLOTS = 128, HALF = SLOTS / 2, STEP = 64, ROW_BYTES = STEP * 2 };

// The tiles from `whole` on are cut into `parts` parts of the depth. Tiles are counted with the tokens fastest, so that
// blocks that share slots run at the same time.
struct Cut {
  int whole, parts;
};

struct TilePart {
  int tile, parts, part, cut;  // cut: its number among those that are cut

  DEVICE TilePart(const Cut& cutting) {
    const int over = block_x() - cutting.whole;
    tile = over < 0 ? block_x() : cutting.whole + over / cutting.parts;
    parts = over < 0 ? 1 : cutting.parts;
    part = over < 0 ? 0 : over % cutting.parts;
    cut = over / cutting.parts;
  }
};

// How a tile's rows of the weight and of x come to shared memory: those of a step in a stage, 128 slots, then the tokens.
template <int TOKENS, typename X, typename Out>
struct Copies {
  enum : int { ROWS = SLOTS + TOKENS, STAGE_BYTES = ROWS * ROW_BYTES };
  // A thread copies one 16-byte piece of every 32nd row.
  enum : int { PIECES = ROW_BYTES / 16, APART = 256 / PIECES, WEIGHTS = SLOTS / APART, COUNT = ROWS / APART };

  const Operands<X>& in;
  unsigned char* stages;
  int token, slot;     // the first ones
  uint32 from[COUNT];  // the starts of the rows that this thread copies, in whole pieces
  uint32 is_token;     // bit i: row i of the tokens exists

  DEVICE Copies(const Operands<X>& operands, const Out& out, unsigned char* memory, int tile)
      : in(operands), stages(memory), is_token(0) {
    const int token_tiles = (in.tokens + TOKENS - 1) / TOKENS;
    token = tile % token_tiles * TOKENS;
    slot = tile / token_tiles * SLOTS;
    const uint32 pieces = uint32(in.depth) / WIDE;
    UNROLL
    for (int i = 0; i < COUNT; ++i) {
      const int row = i * APART + thread_index() / PIECES;
      if (i < WEIGHTS) {  // behind the last row it is the first one, whose sums nobody asks for
        const int weight_row = out.template row<HALF>(slot + row);
        from[i] = uint32(weight_row == NOWHERE ? 0 : weight_row) * pieces;
      } else {
        const bool exists = token + row - SLOTS < in.tokens;
        from[i] = exists ? uint32(token + row - SLOTS) * pieces : 0;
        is_token |= uint32(exists) << (i - WEIGHTS);
      }
    }
  }

  // Every call commits one group, so that counting groups is counting steps.
  DEVICE void fetch(int stage, int step, int end) const {
    if (step < end) {
      const int piece = thread_index() % PIECES, first = thread_index() / PIECES, k = step * STEP + piece * WIDE;
      const bool inside = k < in.depth;
      unsigned char* to = stages + stage * STAGE_BYTES + first * ROW_BYTES + (piece ^ first % 8) * 16;
      UNROLL
      for (int i = 0; i < COUNT; ++i) {
        const bool wanted = inside && (i < WEIGHTS || (is_token >> (i - WEIGHTS) & 1));
        const X* at = (i < WEIGHTS ? in.weight : in.x) + int64(wanted ? from[i] + uint32(k) / WIDE : 0) * WIDE;
        copy_async(to + i * APART * ROW_BYTES, at, wanted ? 16 : 0);
      }
    }
    commit_copies();
  }

  // Where the 64 rows of this warpgroup begin, and the tokens.
  DEVICE const unsigned char* weights(int stage) const {
    return stages + stage * STAGE_BYTES + warp_index() / 4 * HALF * ROW_BYTES;
  }
  DEVICE const unsigned char* tokens(int stage) const { return stages + stage * STAGE_BYTES + SLOTS * ROW_BYTES; }
};

// Stores a tile: sum(i) is a thread's own in the order of wgmma_16's d, whole groups of tokens after one another. All go
// through shared memory, so that a thread has eight neighbours to store.
template <int TOKENS, typename X, typename Out, typename Sum>
DEVICE void finish_tile(const Out& out, const Copies<TOKENS, X, Out>& tile, const Sum& sum) {
  // Floats from one token's sums to the next's: what a warp stores at a time is in different banks.
  enum : int { STRIDE = SLOTS + 4 };
  float* kept = reinterpret_cast<float*>(tile.stages);
  float* to = kept + lane_index() % 4 * 2 * STRIDE + warp_index() * 16 + lane_index() / 4;
  sync_block();  // what was in the memory is read
  UNROLL
  for (int i = 0; i < TOKENS / 2; ++i) to[(i / 4 * 8 + i % 2) * STRIDE + i % 4 / 2 * 8] = sum(i);
  sync_block();
  NO_UNROLL
  for (int item = thread_index(); item < TOKENS * (HALF / 8); item += 256) {
    const int row = item / (HALF / 8), column = item % (HALF / 8) * 8;
    if (tile.token + row >= tile.in.tokens) return;
    const Pack<float, 8> first = load<8>(kept + row * STRIDE + column);
    const Pack<float, 8> second = load<8>(kept + row * STRIDE + HALF + column);
    out.template finish<HALF>(tile.token + row, tile.slot + column, first.at, second.at);
  }
}
