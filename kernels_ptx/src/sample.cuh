// What the sampling kernels share: a row's parameters and state, logits as integer ranks, masses, random numbers.
// Knows one row; the rules are rvllm/sampling/sampler.py's and draw.py's.
#pragma once

#include "reduce.cuh"

// A slice of a row is one block's; a row's bits do not depend on how many rows there are.
enum : int { SLICE = 4096, MOST_TOPS = 20, BINS = 2048 };
enum : uint32 { INFINITE = 0x7f800000u };

// One row of the parameters: an array after another, each of `rows` elements, in this order.
struct Parameters {
  double top_p;       // 0 < top_p <= 1
  double min_p_drop;  // temperature ln(min_p); -inf: off
  int64 seed;
  float temperature;
  float repetition, presence, frequency;  // penalties; 1, 0, 0: off
  int top_k;                              // 0: off
  int greedy;                             // not 0: the best logit, without chance
  int mask_row;                           // of `masks`; -1: every id is allowed
  int logprobs;                           // -1: none; n: the token's, and the n best
};

DEVICE Parameters parameters_of(const void* block, int rows, int row) {
  const double* wide = static_cast<const double*>(block) + row;
  const float* narrow = static_cast<const float*>(block) + 6 * int64(rows) + row;
  const int* whole = reinterpret_cast<const int*>(narrow) + 4 * int64(rows);
  Parameters p;
  p.top_p = wide[0];
  p.min_p_drop = wide[rows];
  p.seed = reinterpret_cast<const int64*>(wide)[2 * rows];
  p.temperature = narrow[0];
  p.repetition = narrow[rows];
  p.presence = narrow[2 * rows];
  p.frequency = narrow[3 * rows];
  p.top_k = whole[0];
  p.greedy = whole[rows];
  p.mask_row = whole[2 * rows];
  p.logprobs = whole[3 * rows];
  return p;
}

DEVICE bool cuts_by_count(const Parameters& p, int limit) { return p.top_k > 0 && p.top_k < limit; }
// Whether a threshold has to be searched for.
DEVICE bool selects(const Parameters& p, int limit) { return !p.greedy && (cuts_by_count(p, limit) || p.top_p < 1.0); }

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

// The best of logits that are seen in order of their ids. NaN is never better.
struct Best {
  float logit = float_of(INFINITE | 0x80000000u);
  int id = -1;
  DEVICE void see(int at, float value) {
    if (value > logit) {
      logit = value;
      id = at;
    }
  }
  DEVICE uint64 rank() const { return id < 0 ? uint64(NO_RANK) : rank_of(logit, id); }
};

// x of step 3. Where the best is +inf, all its equals share the chance and the others have none.
DEVICE float scaled(float logit, float best, float temperature) {
  if (bits_of(best) == INFINITE) return logit == best ? 0.0f : float_of(INFINITE | 0x80000000u);
  return (logit - best) / temperature;
}
// The integer part of 2^40 exp(x), x <= 0: sums of masses do not depend on their order.
DEVICE uint64 mass_of(float x) { return uint64(exponential(x) * 0x1p40f); }

// ---- The workspace, 16-byte aligned: states (rows), slices (rows, slices), histograms (rows, 2), scratch (rows,
// vocab).
struct Histogram {  // of ranks, the highest in bin 0; a mass is low + 2^32 high
  uint32 count[BINS], low[BINS], high[BINS];
};
enum : int { HISTOGRAM_WORDS = 3 * BINS };
struct alignas(16) State {
  uint64 best;  // NO_RANK: no token can be drawn
  uint64 cut;   // tokens of this rank and above may be drawn
};
enum : uint32 { HAS_NAN = 1, IS_OPEN = 2 };
struct alignas(16) Slice {
  uint64 best;       // of the processed logits
  uint64 forbidden;  // the best of the forbidden ids, as if they were not
  uint64 raw_mass;   // of the raw logits, their slice's best: 2^40
  double score;      // the largest x + g
  int drawn;         // and its id
  float raw_best;
  uint32 flags;  // IS_OPEN: before penalties, an id that is not forbidden has a logit above -inf
  uint32 zero;   // 48 bytes, all of them written
};
struct Workspace {
  State* states;
  Slice* slices;
  Histogram* histograms;
  float* scratch;
};

DEVICE int slices_of(int limit) { return (limit + SLICE - 1) / SLICE; }
// What belongs to `row`; the two histograms are of the processed and of the raw logits.
DEVICE Workspace workspace_of(unsigned char* base, int rows, int row, int vocab, int limit) {
  State* states = reinterpret_cast<State*>(base);
  Slice* slices = reinterpret_cast<Slice*>(states + rows);
  Histogram* histograms = reinterpret_cast<Histogram*>(slices + int64(rows) * slices_of(limit));
  float* scratch = reinterpret_cast<float*>(histograms + 2 * int64(rows));
  return {states + row, slices + int64(row) * slices_of(limit), histograms + 2 * int64(row),
          scratch + int64(row) * vocab};
}

// ---- Reductions. `join` is associative and commutative; every lane, or thread, gets the result.
template <typename T, typename Join>
DEVICE T warp_joined(T value, Join join) {
  UNROLL
  for (int apart = WARP / 2; apart > 0; apart /= 2) value = join(value, shuffle_xor(value, apart));
  return value;
}
DEVICE uint64 warp_best(uint64 value) { return warp_joined(value, larger_rank); }

template <typename Join>
DEVICE uint64 block_joined(uint64 value, Join join) {
  SHARED_ARRAY(uint64, parts, MOST_WARPS);
  value = warp_joined(value, join);
  sync_block();  // the call before may still be read
  if (lane_index() == 0) parts[warp_index()] = value;
  sync_block();
  return warp_joined(lane_index() < warp_count() ? parts[lane_index()] : uint64(0), join);  // 0 changes no result
}

// The best rank of a whole row and whether only forbidden ids remain; made by every warp for itself.
struct Summary {
  uint64 best;
  bool has_nan, is_open;
};
DEVICE Summary summary_of(const Slice* slices, int limit) {
  uint64 best = NO_RANK, forbidden = NO_RANK;
  uint32 flags = 0;
  NO_UNROLL
  for (int i = lane_index(); i < slices_of(limit); i += WARP) {
    best = larger_rank(best, slices[i].best);
    forbidden = larger_rank(forbidden, slices[i].forbidden);
    flags |= slices[i].flags;
  }
  best = warp_best(best);
  forbidden = warp_best(forbidden);
  const bool has_nan = lanes_where(flags & HAS_NAN) != 0, is_open = lanes_where(flags & IS_OPEN) != 0;
  return {has_nan ? uint64(NO_RANK) : is_open ? best : forbidden, has_nan, is_open};
}

// max and ln sum exp(logit - max) of a row's raw logits, in the order of slices and lanes; by every warp for itself.
struct Normaliser {
  float best;
  double log_sum;
};
DEVICE Normaliser normaliser_of(const Slice* slices, int limit) {
  float best = float_of(INFINITE | 0x80000000u);
  NO_UNROLL
  for (int i = lane_index(); i < slices_of(limit); i += WARP) best = larger(best, slices[i].raw_best);
  best = warp_joined(best, larger);
  double sum = 0.0;
  NO_UNROLL
  for (int i = lane_index(); i < slices_of(limit); i += WARP) {
    if (slices[i].raw_mass) sum += double(slices[i].raw_mass) * exponential(scaled(slices[i].raw_best, best, 1.0f));
  }
  sum = warp_joined(sum, [](double a, double b) { return a + b; });
  return {best, logarithm(sum * 0x1p-40)};
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

// visit(id, logit) for this thread's part of [begin, end), ids ascending; begin is a multiple of four. LOADS are under way
// at once.
template <int LOADS, typename Visit>
DEVICE void visit_logits(const float* row, int begin, int end, bool wide, Visit visit) {
  const int apart = 4 * thread_count();
  NO_UNROLL
  for (int first = begin + 4 * thread_index(); first < end; first += LOADS * apart) {
    Four fours[LOADS] = {};
    UNROLL
    for (int j = 0; j < LOADS; ++j) {
      if (first + j * apart < end) fours[j] = load_four(row, first + j * apart, end, wide);
    }
    UNROLL
    for (int j = 0; j < LOADS; ++j) {
      UNROLL
      for (int i = 0; i < 4; ++i) {
        if (first + j * apart + i < end) visit(first + j * apart + i, fours[j].at[i]);
      }
    }
  }
}

// ---- Philox4x32-10 (Salmon et al., SC 2011): the numbers of ids 4 block..4 block + 3.
DEVICE Words4 philox(int64 seed, uint32 position, uint32 block) {
  uint32 c0 = block, c1 = position, c2 = 0, c3 = 0, k0 = uint32(seed), k1 = uint32(uint64(seed) >> 32);
  UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64 a = 0xd2511f53ull * c0, b = 0xcd9e8d57ull * c2;
    c0 = uint32(b >> 32) ^ c1 ^ k0;
    c2 = uint32(a >> 32) ^ c3 ^ k1;
    c1 = uint32(b);
    c3 = uint32(a);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// 32 random bits as a float strictly between 0 and 1; the product is exact, so fused is as good as unfused.
DEVICE float unit_float(uint32 bits) {
  const float spread = fused_multiply_add(float(bits), 0x1p-32f, 0x1p-33f);
  return spread < 0x1.fffffep-1f ? spread : 0x1.fffffep-1f;
}

// The best score x + g and its id, of tokens that are seen in order of their ids.
struct Draw {
  double score;
  int id;
  // g = -ln(-ln(1 - v)) in double, as the definition has it. Since -ln(1 - v) > v, x - ln(v) bounds it from above: few
  // tokens need more. The winner's bound errs by less than 1e-5.
  DEVICE void see(int at, float x, float v) {
    if (x - logarithm(v) + 1e-3f < float(score)) return;
    const double value = double(x) - logarithm(-logarithm(1.0 - double(v)));
    if (value > score) {
      score = value;
      id = at;
    }
  }
};
DEVICE Draw better_draw(const Draw& a, const Draw& b) {
  return a.score > b.score || (a.score == b.score && uint32(a.id) < uint32(b.id)) ? a : b;
}
// Of all lanes: the id decides between equal scores, none (-1) last.
DEVICE Draw warp_draw(Draw mine) {
  UNROLL
  for (int apart = WARP / 2; apart > 0; apart /= 2) {
    mine = better_draw(mine, {shuffle_xor(mine.score, apart), shuffle_xor(mine.id, apart)});
  }
  return mine;
}
