// A warp's tiles of attention_decode through shared memory, by the copy engine: t90.
//
// Each warp has a ring of its own, of stages with a tile's keys and its values; as soon as it has read one of them, it asks
// for the same of the tile that comes so many stages later, also of its next split. So no lane holds what is on its way.
#pragma once

#include "attention_decode_mma.cuh"
#include "intrinsics_t90.cuh"

template <int WIDTH, typename X, typename C>
struct RingTiles {
  using Rows = MmaRows<WIDTH, X, C>;
  enum : int { CODES = sizeof(C) == 1, STAGES = 256 / WIDTH, NONE = -1 };
  // Of keys or values: a tile's rows, then their scales. launch: WARPS WARP_BYTES of shared memory.
  enum : int {
    SCALES_AT = KEY_TILE * WIDTH * int(sizeof(C)),
    PART_BYTES = SCALES_AT + (CODES ? KEY_TILE * 4 : 0),
    WARP_BYTES = 2 * STAGES * PART_BYTES
  };

  unsigned char* memory;  // this warp's (STAGES, 2, PART_BYTES)
  uint64* arrivals;       // (STAGES, 2)
  int stage = 0, filled = 0;
  uint32 round = 0;  // how often the ring has gone round, odd or even
  // The tile that is asked for next, in which split of those up to `last`, and its row.
  int at, number, last;
  int64 row;
  typename Rows::Keys keys;  // of the tile at hand
  typename Rows::Values values;

  // Of splits [first, end), what lies before key `known`, as far as the ring holds it.
  DEVICE void begin(const Pages<C>& pages, const Splits& splits, int first, int end, int known) {
    DYNAMIC_SHARED(rings);
    SHARED_ARRAY(uint64, words, WARPS * 2 * STAGES);
    memory = rings + warp_index() * WARP_BYTES;
    arrivals = words + warp_index() * 2 * STAGES;
    if (lane_index() == 0) {
      UNROLL
      for (int i = 0; i < 2 * STAGES; ++i) begin_arrivals(arrivals + i, 1);
      show_arrivals();
    }
    sync_warp();
    number = first;
    last = end;
    at = first_tile(splits.begin_of(first));
    find(pages, splits);
    fill(pages, splits, known);
  }
  // The rest of what the ring holds.
  DEVICE void go_on(const Pages<C>& pages, const Splits& splits) { fill(pages, splits, splits.end + KEY_TILE); }

  DEVICE void split(Rows& rows, const Pages<C>& pages, const Splits& splits, int which, float scale) {
    const int first = splits.begin_of(which), end = splits.end_of(which);
    NO_UNROLL
    for (int from = first_tile(first); from < end; from += WARPS * KEY_TILE) {
      const int lowest = larger_int(0, first - from), highest = smaller_int(KEY_TILE, end - from) - 1;
      float scores[4];
      uint32 weights[2];
      Rows::template load_keys<true>(brought(0, pages, lowest, highest), keys);
      rows.score(keys, scores);
      has_read(0, pages);
      const Tile<C> of_values = brought(1, pages, lowest, highest);
      Rows::template load_values<true>(of_values, values);
      rows.weigh(scores, of_values, keys.scales, values.scales, scale, weights);
      rows.mix(values, weights);
      has_read(1, pages);
      if (at != NONE) next(pages, splits);
      if (++stage == STAGES) {
        stage = 0;
        round ^= 1u;
      }
    }
  }

  DEVICE unsigned char* part(int in, int values) const { return memory + (2 * in + values) * PART_BYTES; }

  // Keys (0) or values (1) of the tile in this stage, once they are there.
  DEVICE Tile<C> brought(int values, const Pages<C>& pages, int lowest, int highest) const {
    wait_arrivals(arrivals + 2 * stage + values, round);
    const unsigned char* rows = part(stage, values);
    return {reinterpret_cast<const C*>(rows), reinterpret_cast<const float*>(rows + SCALES_AT), pages.head_dim, lowest,
            highest};
  }

  // All lanes have read them.
  DEVICE void has_read(int values, const Pages<C>& pages) const {
    sync_warp();
    if (at != NONE) fetch(stage, values, pages);
  }

  DEVICE void fetch(int to, int values, const Pages<C>& pages) const {
    if (lane_index() != 0) return;
    const int bytes = KEY_TILE * pages.head_dim * int(sizeof(C)), scales = CODES ? KEY_TILE * 4 : 0;
    const int64 from = row + (values ? pages.to_values : 0);
    uint64* word = arrivals + 2 * to + values;
    arrive_expecting(word, bytes + scales);
    copy_bytes(part(to, values), pages.cache + from * pages.head_dim, bytes, word);
    if (CODES) copy_bytes(part(to, values) + SCALES_AT, pages.scales + from, scales, word);
  }

  DEVICE void fill(const Pages<C>& pages, const Splits& splits, int known) {
    NO_UNROLL
    for (; filled < STAGES && at != NONE && at + KEY_TILE <= known; ++filled) {
      fetch(filled, 0, pages);
      fetch(filled, 1, pages);
      next(pages, splits);
    }
  }

  DEVICE void next(const Pages<C>& pages, const Splits& splits) {
    at += WARPS * KEY_TILE;
    find(pages, splits);
  }

  // `at`, where its split ends before, becomes the warp's first tile of a later one.
  DEVICE void find(const Pages<C>& pages, const Splits& splits) {
    NO_UNROLL
    while (at >= splits.end_of(number)) {
      if (++number == last) {
        at = NONE;
        return;
      }
      at = first_tile(splits.begin_of(number));
    }
    row = pages.row(at);
  }
};

// Straight into registers where a block has one split of the fewest keys, of which a warp has two tiles at most: a ring would
// only be longer. Else by the ring.
template <int WIDTH, typename X, typename C>
struct EitherTiles {
  using Rows = MmaRows<WIDTH, X, C>;

  RingTiles<WIDTH, X, C> ring;
  HeldTiles<WIDTH, X, C> held;
  bool is_short;

  DEVICE void begin(const Pages<C>& pages, const Splits& splits, int first, int last, int known) {
    is_short = last - first == 1 && splits.chunk == SMALLEST_CHUNK;
    if (is_short) return held.begin(pages, splits, first, last, known);
    ring.begin(pages, splits, first, last, known);
  }
  DEVICE void go_on(const Pages<C>& pages, const Splits& splits) {
    if (!is_short) ring.go_on(pages, splits);
  }
  DEVICE void split(Rows& rows, const Pages<C>& pages, const Splits& splits, int number, float scale) {
    if (is_short) return held.split(rows, pages, splits, number, scale);
    ring.split(rows, pages, splits, number, scale);
  }
};
