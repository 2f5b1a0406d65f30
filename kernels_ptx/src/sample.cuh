// What the sampling kernels share: a row's parameters and state, logits as integer ranks, masses.
// Knows one row; the rules are rvllm/sampling/sampler.py's and draw.py's.
#pragma once

#include "reduce.cuh"

// A row is cut into slices of whole units, one block's each: as many as there are blocks. Its bits do not depend on that.
enum : int { UNIT = 1024, GROUP = 8, MOST_TOPS = 20, BINS = 2048 };
// Ranks in a row's list of what can matter, and in the one that a block holds; the largest top_k that needs no long list.
enum : int { LONG_LIST = 16384, LISTED = 2048, SHORT = 256 };
enum : uint32 { INFINITE = 0x7f800000u };
DEVICE float minus_infinite() { return float_of(INFINITE | 0x80000000u); }

// What happens to a row's logits before it is drawn from; its mask, if there is one, besides.
enum : uint32 { PENALISED = 1, BIASED = 2, FORBIDDEN = 4, BARRED = 8 };

// One row of the parameters: an array after another, each of `rows` elements, in this order.
struct Parameters {
  double top_p;       // 0 < top_p <= 1
  double min_p_drop;  // temperature ln(min_p); -inf: off
  int64 seed;
  uint32* bits;        // of the row's slot, read and written where `edits` says so: see sample_edits.cuh
  uint32* counts;      // how often each id is in the output; means something where its output bit is set
  const float* bias;   // of each id; means something where its bias bit is set
  const uint32* mask;  // bit id % 32 of word id / 32 allows id; null: all are
  float temperature;
  float repetition, presence, frequency;  // penalties; 1, 0, 0: off
  int top_k;                              // 0: off
  int greedy;                             // not 0: the best logit, without chance
  int logprobs;                           // -1: none; n: the token's, and the n best
  int given;                              // the token, where it is known; -1: it is drawn
  uint32 edits;
};

DEVICE Parameters parameters_of(const void* block, int rows, int row) {
  const double* wide = static_cast<const double*>(block) + row;
  const uint64* addresses = reinterpret_cast<const uint64*>(wide) + 3 * int64(rows);
  const float* narrow = static_cast<const float*>(block) + 14 * int64(rows) + row;
  const int* whole = reinterpret_cast<const int*>(narrow) + 4 * int64(rows);
  Parameters p;
  p.top_p = wide[0];
  p.min_p_drop = wide[rows];
  p.seed = reinterpret_cast<const int64*>(wide)[2 * rows];
  p.bits = reinterpret_cast<uint32*>(addresses[0]);
  p.counts = reinterpret_cast<uint32*>(addresses[rows]);
  p.bias = reinterpret_cast<const float*>(addresses[2 * rows]);
  p.mask = reinterpret_cast<const uint32*>(addresses[3 * rows]);
  p.temperature = narrow[0];
  p.repetition = narrow[rows];
  p.presence = narrow[2 * rows];
  p.frequency = narrow[3 * rows];
  p.top_k = whole[0];
  p.greedy = whole[rows];
  p.logprobs = whole[2 * rows];
  p.given = whole[3 * rows];
  p.edits = uint32(whole[4 * rows]);
  return p;
}

DEVICE bool cuts_by_count(const Parameters& p, int limit) { return p.top_k > 0 && p.top_k < limit; }
// Whether chance has to do with it, and whether a threshold has to be searched for.
DEVICE bool is_drawn(const Parameters& p) { return !p.greedy && p.given < 0; }
DEVICE bool selects(const Parameters& p, int limit) {
  return is_drawn(p) && (cuts_by_count(p, limit) || p.top_p < 1.0);
}
// A row that sample_scan alone is for: nothing is drawn, no log-probability told.
DEVICE bool is_plain(const Parameters& p) { return !is_drawn(p) && p.logprobs < 0; }
// One whose few tokens sample_finish finds by itself.
DEVICE bool is_short(const Parameters& p, int limit) {
  return is_drawn(p) && cuts_by_count(p, limit) && p.top_k <= SHORT;
}
// One that all logits have to be looked at again for, now that the best is known.
DEVICE bool is_weighed(const Parameters& p, int limit) {
  return p.logprobs >= 0 || (selects(p, limit) && !is_short(p, limit));
}
// Top_p counts the mass of what top_k leaves; where that leaves all, the whole row's.
DEVICE bool cuts_by_mass_alone(const Parameters& p, int limit) {
  return is_drawn(p) && p.top_p < 1.0 && !cuts_by_count(p, limit);
}

// ---- Ranks: a logit and its id as one integer, larger for larger logits and then for lower ids; both zeros are equal.
enum : uint64 { NO_RANK = 0, LOWEST_RANK = 0x00800000ull << 32 };  // of any logit above -inf

DEVICE uint64 rank_of(float logit, int id) {
  const uint32 bits = logit == 0.0f ? 0 : bits_of(logit);
  const uint32 key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64(key) << 32 | ~uint32(id);
}
DEVICE int id_of(uint64 rank) { return int(~uint32(rank)); }
DEVICE float logit_of(uint64 rank) {
  const uint32 key = uint32(rank >> 32);
  return float_of(key >> 31 ? key & 0x7fffffffu : ~key);
}
DEVICE uint64 larger_rank(uint64 a, uint64 b) { return a > b ? a : b; }

// The best of values that are seen in order of their ids. NaN is never better.
struct Best {
  float logit = minus_infinite();
  int id = -1;
  DEVICE void see(int at, float value) {
    if (value > logit) {
      logit = value;
      id = at;
    }
  }
  DEVICE void see_any(int at, float value) {  // in any order
    if (value > logit || (value == logit && at < id)) {
      logit = value;
      id = at;
    }
  }
  DEVICE uint64 rank() const { return id < 0 ? uint64(NO_RANK) : rank_of(logit, id); }
};

DEVICE bool unordered(float a, float b) { return a != a || b != b; }

// x of step 3. Where the best is +inf, all its equals share the chance and the others have none.
DEVICE float scaled(float logit, float best, float temperature) {
  if (bits_of(best) == INFINITE) return logit == best ? 0.0f : minus_infinite();
  return temperature == 1.0f ? logit - best : (logit - best) / temperature;  // division is dear
}
// The integer part of 2^40 exp(x), x <= 0: sums of masses do not depend on their order.
DEVICE uint64 mass_of(float x) { return uint64(exponential(x) * 0x1p40f); }

// ---- The workspace, 16-byte aligned: states (rows), slices (rows, units), lists (rows, LONG_LIST), histograms (rows),
// maxima (rows, 2, 128 units). Of two, the first is of the processed logits, the second of the raw ones.
struct Histogram {  // of ranks, the highest in bin 0; a mass is low + 2^32 high
  uint32 count[BINS], low[BINS], high[BINS];
};
enum : int { HISTOGRAM_WORDS = 3 * BINS };
enum : uint32 {
  DONE = 1,   // nothing is left to do
  KNOWN = 2,  // the token is; its log-probability and the best ones are not
  LISTS = 4,  // sample_weigh lists the ranks that can matter,
  FLAT = 8,   // or since too many can, only counts them
  OPEN = 16   // before penalties, an id that is not forbidden has a logit above -inf
};
struct alignas(16) State {
  uint64 best;            // as a slice's; NO_RANK: no token can be drawn
  uint64 cut;             // tokens of this rank and above may be drawn
  uint64 bounds[2];       // ranks from here on are listed: all that can matter
  uint64 mass, raw_mass;  // of all tokens of this rank and above, and of all raw logits
  uint32 listed[2];       // more than there is room for: the list is not whole
  int token;              // from sample_scan to sample_bound: the number of slices
  uint32 mode;
  float raw_best;
  uint32 zeros[3];  // 80 bytes
};
// The id of a slice's best ranks, and of those of a row, is that of their group: which of its logits it is, is not known.
struct alignas(16) Slice {
  uint64 best;       // of the processed logits
  uint64 forbidden;  // the best of the forbidden ids, as if they were not
  uint64 raw_best;   // where log-probabilities are told
  uint32 flags;      // HAS_NAN, OPEN
  float mass;        // about: of the processed logits, the slice's best: 1. 32 bytes, all of them written
};
enum : uint32 { HAS_NAN = 1 };
struct Workspace {
  State* state;
  Slice* slices;
  uint64* list;
  Histogram* histogram;
  float* maxima;  // of groups: logits, or where all are drawn from, bounds of scores; raw ones from maxima + groups on
  int groups;
};

DEVICE int groups_of(int limit) { return (limit + GROUP - 1) / GROUP; }
DEVICE int units_of(int limit) { return (limit + UNIT - 1) / UNIT; }
DEVICE Workspace workspace_of(unsigned char* base, int rows, int row, int limit) {
  const int units = units_of(limit), groups = units * (UNIT / GROUP);
  State* states = reinterpret_cast<State*>(base);
  Slice* slices = reinterpret_cast<Slice*>(states + rows);
  uint64* lists = reinterpret_cast<uint64*>(slices + int64(rows) * units);
  Histogram* histograms = reinterpret_cast<Histogram*>(lists + int64(rows) * LONG_LIST);
  float* maxima = reinterpret_cast<float*>(histograms + rows);
  return {states + row,     slices + int64(row) * units,      lists + int64(row) * LONG_LIST,
          histograms + row, maxima + int64(row) * 2 * groups, groups};
}

// ---- Reductions: every lane, or thread, gets the result.
DEVICE uint64 warp_best(uint64 value) { return warp_joined(value, larger_rank); }

// True in every thread of the block of a row that arrives last; what the others wrote is then seen, and the counter is
// zero again. The block's threads have met since they last wrote: the fence is for all of them.
DEVICE bool arrives_last(uint32* counter) {
  SHARED_ARRAY(int, last, 1);
  if (thread_index() == 0) {
    fence();
    last[0] = int(atomic_add(counter, 1u)) + 1 == grid_x();
    fence();
    if (last[0]) *counter = 0;
  }
  sync_block();
  return last[0] != 0;
}

// What the slices of a row have together; made by every warp for itself.
struct Summary {
  uint64 best, raw_best;  // NO_RANK: no token can be drawn
  bool has_nan, is_open;
};
DEVICE Summary summary_of(const Slice* slices, int count) {
  uint64 best = NO_RANK, forbidden = NO_RANK, raw = NO_RANK;
  uint32 flags = 0;
  NO_UNROLL
  for (int i = lane_index(); i < count; i += WARP) {
    best = larger_rank(best, slices[i].best);
    forbidden = larger_rank(forbidden, slices[i].forbidden);
    raw = larger_rank(raw, slices[i].raw_best);
    flags |= slices[i].flags;
  }
  const bool has_nan = lanes_where(flags & HAS_NAN) != 0, is_open = lanes_where(flags & OPEN) != 0;
  best = warp_best(is_open ? best : forbidden);
  return {has_nan ? uint64(NO_RANK) : best, warp_best(raw), has_nan, is_open};
}

// ---- Visiting a row. Ids come in groups of four, as random numbers do.
struct Four {
  float at[4];
};
// `wide`: rows are a multiple of four long and start on 16 bytes; logits at and beyond `end` mean nothing.
DEVICE Four load_four(const float* row, int first, int end, bool wide) {
  Four four = {};
  if (wide) {
    const Words4 words = load_words4(row + first);
    UNROLL
    for (int i = 0; i < 4; ++i) four.at[i] = float_of(words.word[i]);
  } else {
    UNROLL
    for (int i = 0; i < 4; ++i) four.at[i] = first + i < end ? row[first + i] : 0.0f;
  }
  return four;
}
