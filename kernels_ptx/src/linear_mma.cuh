// The sums of a block of `linear` on tensor cores, m16n8k16: 16 slots of the weight are a product's rows, 8 tokens its
// columns. The 8 warps each take their own part of the depth.
//
// Lane (g, t) copies elements 8 t..8 t + 7 of a chunk of 32 of rows g and g + 8, a 16-byte piece each, into a ring in shared
// memory that is its warp's own; those of token g go the same way. Pieces lie so that the eight rows of a matrix that is
// loaded are in different banks, and what is copied of a row stays together.
//
// Where few tokens leave room for partial sums beside the ring, a warp's stream goes on from tile to tile: the first chunks
// of the next are on their way while the last ones are multiplied, and while the block adds up.
#pragma once

#include "linear_in.cuh"
#include "linear_out.cuh"

// Elements of the depth that two products take; warps of a block; bytes that eight rows of a chunk take for all of them.
enum : int { CHUNK = 32, WARPS = 8, EIGHT_BYTES = 8 * 2 * CHUNK, UNIT = WARPS * EIGHT_BYTES };

// What lies in shared memory, in units: stages of weights, two sets of partial sums if they lie apart, then stages of
// tokens, or every chunk of them. A set of sums takes SUMS units, as eight rows of a chunk take one.
template <int TILES, int EIGHTS>
struct Plan {
  enum : int {
    ROWS = 2 * TILES,
    SUMS = TILES * EIGHTS,
    APART = SUMS <= 2,
    // At most 96 KB, which every GPU from sm_80 on gives to a block. With five stages of one tile and eight tokens, three
    // blocks fit on a multiprocessor of sm_90.
    FITTING = (24 - (APART ? 2 * SUMS : 0)) / (ROWS + EIGHTS),
    STAGES = FITTING < 5 ? FITTING : 5,
    AHEAD = STAGES - 1,
    FEW = AHEAD < 2 ? AHEAD : 2,
    TOKENS = STAGES * ROWS + (APART ? 2 * SUMS : 0),
  };
};

template <int EIGHTS, typename X, typename Out>
struct Stream {
  const Operands<X>& in;
  const Out& out;
  const Groups& groups;
  Range range;
  unsigned char* to;                   // where this lane copies of a unit
  const unsigned char *rows, *tokens;  // and the row of a matrix that it names: of weights, and of tokens
  int second_half;                     // where two quarters further are: bytes on, or back
  int group, chunk;                    // the next to be fetched
  uint32 weight[4];                    // the starts of its rows g and g + 8 of each tile, in whole pieces
  bool with_tokens;                    // whether its tokens must be fetched, too
  int stage, set;                      // the next to be multiplied; where the next sums go

  DEVICE Stream(const Operands<X>& operands, const Out& target, const Groups& all, unsigned char* memory)
      : in(operands),
        out(target),
        groups(all),
        range(part_of(in.depth, block_y() * WARPS + warp_index(), grid_y() * WARPS)),
        to(held(memory + quarter_of(lane_index() / 4, lane_index() % 4))),
        rows(held(memory + lane_index() / 8 % 2 * UNIT + quarter_of(lane_index() % 8, lane_index() / 16))),
        tokens(held(memory + quarter_of(lane_index() % 8, lane_index() / 8))),
        second_half(quarter_of(lane_index() % 8, 2) - quarter_of(lane_index() % 8, 0)),
        set(0) {}

  // Where this warp has the 16 bytes `quarter` of row `row` of a unit's eight.
  DEVICE static int quarter_of(int row, int quarter) {
    return warp_index() * EIGHT_BYTES + row * 64 + (quarter ^ row / 2 % 4) * 16;
  }

  // Sums of more than 32 tokens would lie over them.
  DEVICE bool keeps_tokens() const { return EIGHTS <= 4 && groups.tokens_stay; }

  // Behind the last row it is the first one, whose sums nobody asks for.
  template <int TILES>
  DEVICE int weight_row(int piece) const {
    const int row = out.template row<8>(group * TILES * 16 + piece * 8 + lane_index() / 4);
    return row == NOWHERE ? 0 : row;
  }

  template <int TILES>
  DEVICE void begin(int next) {
    group = next;
    with_tokens = !keeps_tokens() || next == block_x();
    chunk = next < groups.count ? range.begin : range.end;
    UNROLL
    for (int piece = 0; piece < 2 * TILES; ++piece) {
      weight[piece] = uint32(weight_row<TILES>(piece)) * uint32(in.depth / WIDE);
    }
  }

  // Behind chunks that were fetched. Without room for sums the next group must wait for those of this one.
  template <int TILES>
  DEVICE void advance(int chunks) {
    chunk += chunks * CHUNK;
    if (Plan<TILES, EIGHTS>::APART && chunk >= range.end) begin<TILES>(group + grid_x());
  }

  // Token g of an eight, or NOWHERE.
  DEVICE int token_of(int eight) const {
    const int token = eight * 8 + lane_index() / 4;
    return token < in.tokens ? token : NOWHERE;
  }

  // The first unit of a chunk's tokens.
  template <int TILES>
  DEVICE int tokens_at(int stage, int chunk) const {
    return Plan<TILES, EIGHTS>::TOKENS + (keeps_tokens() ? uint32(chunk - range.begin) / CHUNK : stage) * EIGHTS;
  }

  // The piece from k on of the row that starts at piece `row`, or the matrix's first one.
  DEVICE const void* piece_at(const X* matrix, uint32 row, int k, bool wanted) const {
    return reinterpret_cast<const Words4*>(matrix) + (wanted ? row + uint32(k) / WIDE : 0u);
  }

  // Elements [k, k + 8) of every weight row, k this lane's in the chunk.
  template <int TILES>
  DEVICE void fetch_weights(int stage, int chunk) const {
    const int k = chunk + lane_index() % 4 * WIDE;
    const bool inside = k < range.end;
    UNROLL
    for (int piece = 0; piece < 2 * TILES; ++piece) {
      copy_async_once(to + (stage * 2 * TILES + piece) * UNIT, piece_at(in.weight, weight[piece], k, inside),
                      inside ? 16 : 0);
    }
  }

  // The same of every token. Addresses are counted up, since registers are few.
  template <int TILES>
  DEVICE void fetch_tokens(int stage, int chunk) const {
    const int k = chunk + lane_index() % 4 * WIDE, unit = tokens_at<TILES>(stage, chunk);
    uint32 row = uint32(lane_index() / 4) * uint32(in.depth / WIDE);
    UNROLL
    for (int eight = 0; eight < EIGHTS; ++eight) {
      const bool wanted = k < range.end && token_of(eight) != NOWHERE;
      copy_async(to + (unit + eight) * UNIT, piece_at(in.x, row, k, wanted), wanted ? 16 : 0);
      row += uint32(in.depth);  // eight rows, in pieces
    }
  }

  // Both, of rows that start anywhere.
  template <int TILES>
  DEVICE void fetch_unaligned(int stage) const {
    enum : int { ROWS = 2 * TILES };
    const int k = chunk + lane_index() % 4 * WIDE, behind_weights = tokens_at<TILES>(stage, chunk) - ROWS;
    NO_UNROLL
    for (int piece = 0; piece < (with_tokens ? ROWS + EIGHTS : ROWS); ++piece) {
      Pack<X, WIDE> got = {};
      if (piece < ROWS) {
        got = load_piece(in.weight + int64(weight_row<TILES>(piece)) * in.depth, k, range.end);
      } else if (token_of(piece - ROWS) != NOWHERE) {
        got = load_piece(in.x + int64(token_of(piece - ROWS)) * in.depth, k, range.end);
      }
      store(reinterpret_cast<X*>(to + (piece + (piece < ROWS ? stage * ROWS : behind_weights)) * UNIT), got);
    }
  }

  // The warp's next chunk. Every call commits one group, so that counting groups is counting chunks.
  template <int TILES>
  DEVICE void fetch(int stage) {
    if (chunk < range.end) {
      if (in.depth % WIDE == 0) {
        fetch_weights<TILES>(stage, chunk);
        if (with_tokens) fetch_tokens<TILES>(stage, chunk);
      } else {
        fetch_unaligned<TILES>(stage);
      }
      advance<TILES>(1);
    }
    commit_copies();
  }

  // Weights may be on their way before the grid that makes the tokens has ended, but a stage is there only with all that
  // came before it. Where a warp takes little more than the ring holds, a few stages then: with all of them, blocks that
  // share a multiprocessor would first all wait and then all compute, instead of in turns. Gives how many.
  template <int TILES>
  DEVICE int fetch_early() {
    using Of = Plan<TILES, EIGHTS>;
    begin<TILES>(block_x());
    const int chunks = (range.end - range.begin + CHUNK - 1) / CHUNK;
    const bool is_long = chunks >= 2 * Of::STAGES || grid_x() < groups.count;
    const int early = !GRIDS_OVERLAP || in.depth % WIDE ? 0 : smaller_int(chunks, is_long ? Of::AHEAD : Of::FEW);
    NO_UNROLL
    for (int at = 0; at < early; ++at) fetch_weights<TILES>(at, range.begin + at * CHUNK);
    wait_for_previous_grid();
    // Not before the wait: what the next grid does before its own may then count on all that ended before this one began.
    start_next_grid();
    NO_UNROLL
    for (int at = 0; at < early; ++at) {
      fetch_tokens<TILES>(at, range.begin + at * CHUNK);
      commit_copies();
    }
    if (early > 0) advance<TILES>(early);
    return early;
  }

  template <int TILES>
  DEVICE void multiply(int stage, int chunk, float (&sums)[TILES][EIGHTS][4]) const {
    const unsigned char *weights = rows + stage * 2 * TILES * UNIT, *x = tokens + tokens_at<TILES>(stage, chunk) * UNIT;
    // A half of the chunk is a product's sixteen.
    UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32 a[TILES][4];
      UNROLL
      for (int tile = 0; tile < TILES; ++tile) load_matrices(a[tile], weights + half * second_half, tile * 2 * UNIT);
      UNROLL
      for (int eight = 0; eight < EIGHTS; ++eight) {
        uint32 b[2];
        load_matrices(b, x + half * second_half + eight * UNIT);
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) mma_16816(sums[tile][eight], a[tile], b, X());
      }
    }
  }

  // This warp's sums of a group, and the block's next chunks on their way.
  template <int TILES>
  DEVICE void accumulate(int of, float (&sums)[TILES][EIGHTS][4]) {
    using Of = Plan<TILES, EIGHTS>;
    int ahead = Of::AHEAD;  // how many chunks are on their way
    if (of == block_x()) {
      ahead = fetch_early<TILES>();
      stage = ahead == Of::AHEAD ? 0 : ahead + 1;
    } else if (!Of::APART) {
      sync_block();  // the sums are read; their memory is the ring's again
      begin<TILES>(of);
      ahead = 0;
      stage = 1;
    }
    // First only fetches, until the ring is full.
    NO_UNROLL
    for (int at = range.begin - (Of::AHEAD - ahead) * CHUNK; at < range.end; at += CHUNK) {
      const bool full = at >= range.begin;
      if (full) {
        wait_copies<Of::AHEAD - 1>();
        sync_warp();  // the copies of all lanes, and their reads of the stage before
      }
      if (!Of::APART) chunk = at + Of::AHEAD * CHUNK;  // as it is: one register less
      // Into the stage before this one, whose products have been started.
      fetch<TILES>(stage == 0 ? Of::AHEAD : stage - 1);
      if (full) multiply<TILES>(stage, at, sums);
      stage = stage == Of::AHEAD ? 0 : stage + 1;
    }
  }

  // Each warp's sums of a group, one after another in shared memory; they stay until the next but one is asked for, and
  // without room for that until the next.
  template <int TILES>
  DEVICE const float* layers(int of, unsigned char* memory) {
    using Of = Plan<TILES, EIGHTS>;
    float sums[TILES][EIGHTS][4] = {};
    accumulate<TILES>(of, sums);
    float* to = reinterpret_cast<float*>(memory);
    if (Of::APART) {
      to += (Of::STAGES * Of::ROWS + set * Of::SUMS) * (UNIT / 4);
      set ^= 1;
    } else {
      sync_block();  // the ring is read; its memory is the sums' now
    }
    float* own = to + warp_index() * Of::SUMS * WARP * 4 + lane_index() * 4;
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
      UNROLL
      for (int eight = 0; eight < EIGHTS; ++eight) {
        const float (&four)[4] = sums[tile][eight];
        store(own + (tile * EIGHTS + eight) * WARP * 4, Pack<float, 4>{{four[0], four[1], four[2], four[3]}});
      }
    }
    sync_block();
    return to;
  }
};

// The sums of a block's groups, one after another.
template <int EIGHTS, typename X, typename Out>
struct BlockSums {
  Stream<EIGHTS, X, Out> stream;
  const Groups& groups;
  unsigned char* memory;

  DEVICE BlockSums(const Operands<X>& in, const Out& out, const Groups& all, unsigned char* dynamic)
      : stream(in, out, all, dynamic), groups(all), memory(dynamic) {}

  // Partial sums of a group in shared memory, in as many layers as count() gives. In a layer, lane (g, t) of a tile and
  // an eight has four in a row: first g and second g, each of tokens 2 t and 2 t + 1.
  DEVICE const float* of(int group) {
    return groups.tiles == 1 ? stream.template layers<1>(group, memory) : stream.template layers<2>(group, memory);
  }
  DEVICE int count() const { return WARPS; }
};
