// sample: one token a row of logits, by every rule of rvllm/sampling/sampler.py and draw.py, whose steps these are.
//
// A chain of kernels, one after another in one stream or graph; nothing has to be cleared between two runs:
//     sample_prepare   1, 2: bias, allowed and forbidden ids, penalties; the best of each slice of 4096 logits
//     sample_weigh     histograms of the logits that min_p leaves, and of the raw ones
//     sample_select    4: the rank from which on min_p, top_k and top_p keep tokens; the best raw log-probabilities
//     sample_draw      3, 5: Gumbel-max in each slice
//     sample_finish    the token, and its raw log-probability
// Where every row is greedy and none asks for the best log-probabilities, the first and the last are enough.
//
// logits (rows, vocab) f32, never written. Ids from vocab_limit on do not exist: their logits are not looked at.
// parameters: 56 rows bytes, the arrays of sample.cuh's Parameters one after another: f64 top_p, min_p_drop; s64 seed;
//   f32 temperature, repetition, presence, frequency; i32 top_k, greedy, mask_row, logprobs.
// positions (rows) u32: of the token to draw.
// Edits of row r, in any order, no id twice, are entries edit_starts[r]..edit_starts[r + 1] - 1 of edit_ids i32,
//   edit_counts u32 (how often the id is in the output), edit_flags u32 (1: in prompt or output, 2: forbidden, 4: has a
//   bias) and edit_bias f32. Ids from vocab_limit on are ignored.
// masks (any, ceil(vocab / 32)) u32: bit id % 32 of word id / 32 allows id.
// workspace: rows (49168 + 48 slices + 4 vocab) bytes, slices = ceil(vocab_limit / 4096).
// tokens, next_ids (rows) i32. -1: a logit is NaN, -2: no token has a logit above -inf; next_ids is 0 for both.
// logprobs (rows) f32, where the row asks. top_ids i32 and top_logprobs f32, (rows, 20): the first n of each where the
//   row asks for n <= 20, high to low, ties by id; where there are fewer, -1 and -inf. Nothing else is written.
// launch: prepare, draw: grid (slices, rows), block 256; weigh: grid (slices, rows, 2), block 256; select: grid
//   (rows, 2), block 1024; finish: grid (rows), block 32. No dynamic shared memory. Any power of two from 32 to those
//   numbers of threads gives the same bits.
// bound: 4 vocab bytes a row each for prepare, weigh, select and draw; some 20 integer operations a token drawn from.
// assumes: logits and workspace start on 16 bytes, parameters on 8; vocab_limit <= vocab; rows <= 65535.
// tiers: t70
#include "sample_select.cuh"

// Where the row's logits are once they are processed.
DEVICE bool is_changed(const Parameters& p, const int* edit_starts, int row) {
  return p.mask_row >= 0 || edit_starts[row] != edit_starts[row + 1];
}

struct Edits {
  const int* ids;
  const uint32* counts;
  const uint32* flags;
  const float* bias;
};
enum : uint32 { SEEN = 1, FORBIDDEN = 2, BIASED = 4 };

DEVICE bool is_allowed(const uint32* mask, int id) { return mask == nullptr || (mask[id / 32] >> (id % 32) & 1); }

DEVICE float biased(const Edits& edits, int entry, float logit, const uint32* mask) {
  if (!is_allowed(mask, edits.ids[entry])) return float_of(INFINITE | 0x80000000u);
  return edits.flags[entry] & BIASED ? logit + edits.bias[entry] : logit;
}

// Step 2. Each operation is rounded.
DEVICE float penalised(const Parameters& p, const Edits& edits, int entry, float logit) {
  const uint32 count = edits.counts[entry];
  if (edits.flags[entry] & SEEN) logit = logit > 0.0f ? logit / p.repetition : logit * p.repetition;
  if (count == 0) return logit;
  logit -= p.frequency * float(count);
  return logit - p.presence;
}

// visit(entry, id) of the row's edits in [begin, end).
template <typename Visit>
DEVICE void visit_edits(const Edits& edits, const int* starts, int row, int begin, int end, Visit visit) {
  NO_UNROLL
  for (int entry = starts[row] + thread_index(); entry < starts[row + 1]; entry += thread_count()) {
    const int id = edits.ids[entry];
    if (id >= begin && id < end) visit(entry, id);
  }
}

// Steps 1 and 2 for a slice: its logits are copied, then those with an edit are made anew. Gives the best of the
// forbidden ids, and whether there is an id that is not forbidden.
DEVICE uint64 process(const float* raw, float* out, const Parameters& p, const Edits& edits, const int* starts, int row,
                      const uint32* mask, int begin, int end, bool wide, bool& is_open) {
  visit_logits<2>(raw, begin, end, wide, [&](int id, float logit) {
    out[id] = is_allowed(mask, id) ? logit : float_of(INFINITE | 0x80000000u);
  });
  sync_block();
  uint64 forbidden = NO_RANK;
  visit_edits(edits, starts, row, begin, end, [&](int entry, int id) {
    const float before = biased(edits, entry, raw[id], mask);
    const float logit = penalised(p, edits, entry, before);
    if (edits.flags[entry] & FORBIDDEN) {
      out[id] = float_of(INFINITE | 0x80000000u);
      const uint64 rank = rank_of(logit, id);
      if (rank >= LOWEST_RANK) forbidden = larger_rank(forbidden, rank);
    } else {
      out[id] = logit;
      is_open = is_open || rank_of(before, id) >= LOWEST_RANK;
    }
  });
  sync_block();
  return forbidden;
}

KERNEL(256)
void sample_prepare(const float* logits, const void* parameters, const int* edit_starts, const int* edit_ids,
                    const uint32* edit_counts, const uint32* edit_flags, const float* edit_bias, const uint32* masks,
                    unsigned char* workspace, int rows, int vocab, int vocab_limit) {
  const int row = block_y(), slice = block_x(), begin = slice * SLICE;
  const int end = begin + SLICE < vocab_limit ? begin + SLICE : vocab_limit;
  const bool wide = vocab % 4 == 0;
  const Parameters p = parameters_of(parameters, rows, row);
  const Workspace work = workspace_of(workspace, rows, row, vocab, vocab_limit);
  const float* raw = logits + int64(row) * vocab;

  Best best;
  bool has_nan = false;
  visit_logits<4>(raw, begin, end, wide, [&](int id, float logit) {
    best.see(id, logit);
    has_nan = has_nan || logit != logit;
  });
  const uint64 raw_best = block_joined(best.rank(), larger_rank);
  uint64 slice_best = raw_best, forbidden = NO_RANK;
  bool is_open = true;
  if (is_changed(p, edit_starts, row)) {
    const uint32* mask = p.mask_row < 0 ? nullptr : masks + int64(p.mask_row) * ((vocab + 31) / 32);
    is_open = false;
    const Edits edits = {edit_ids, edit_counts, edit_flags, edit_bias};
    forbidden = process(raw, work.scratch, p, edits, edit_starts, row, mask, begin, end, wide, is_open);
    Best processed;
    visit_logits<2>(work.scratch, begin, end, wide, [&](int id, float logit) { processed.see(id, logit); });
    is_open = is_open || processed.id >= 0;
    slice_best = block_joined(processed.rank(), larger_rank);
    forbidden = block_joined(forbidden, larger_rank);
  }
  const auto either = [](uint64 a, uint64 b) { return a | b; };
  const uint32 flags = uint32(block_joined((has_nan ? HAS_NAN : 0u) | (is_open ? IS_OPEN : 0u), either));

  uint64 mass = 0;
  if (p.logprobs >= 0 && raw_best != NO_RANK && !(flags & HAS_NAN)) {
    visit_logits<2>(raw, begin, end, wide,
                    [&](int, float logit) { mass += mass_of(scaled(logit, logit_of(raw_best), 1.0f)); });
    mass = block_joined(mass, [](uint64 a, uint64 b) { return a + b; });
  }
  if (thread_index() == 0) {
    const float raw_logit = raw_best == NO_RANK ? float_of(INFINITE | 0x80000000u) : logit_of(raw_best);
    work.slices[slice] = {slice_best, forbidden, mass, 0.0, -1, raw_logit, flags, 0};
  }
  // For sample_weigh to add to.
  uint32 *processed_words = work.histograms[0].count, *raw_words = work.histograms[1].count;
  NO_UNROLL
  for (int i = slice * thread_count() + thread_index(); i < HISTOGRAM_WORDS; i += grid_x() * thread_count()) {
    if (selects(p, vocab_limit)) processed_words[i] = 0;
    if (p.logprobs > 0) raw_words[i] = 0;
  }
}

// Where forbidden ids are all that remains, they may be drawn after all: their logits come back into the slice.
DEVICE void allow_forbidden(const float* raw, float* out, const Parameters& p, const Edits& edits, const int* starts,
                            int row, const uint32* mask, int begin, int end) {
  visit_edits(edits, starts, row, begin, end, [&](int entry, int id) {
    if (edits.flags[entry] & FORBIDDEN) {
      out[id] = penalised(p, edits, entry, biased(edits, entry, raw[id], mask));
    }
  });
  sync_block();
}

// The lowest rank that min_p keeps. Larger takes the number where inf - inf is none.
DEVICE uint64 min_p_floor(const Parameters& p, float best) {
  const float floor = larger(float(double(best) + p.min_p_drop), -0x1.fffffep+127f);
  return rank_of(floor, -1) & ~0xffffffffull;
}

// Top_k goes first, and top_p by mass in what that leaves; either alone is searched for at once.
DEVICE Weights weights_of(const Parameters& p, float best, bool by_mass) {
  return {by_mass, best, p.temperature, p.top_p, p.top_k};
}
DEVICE Weights raw_weights(const Parameters& p) { return {false, 0.0f, 1.0f, 1.0, p.logprobs}; }

KERNEL(256)
void sample_weigh(const float* logits, const void* parameters, const int* edit_starts, const int* edit_ids,
                  const uint32* edit_counts, const uint32* edit_flags, const float* edit_bias, const uint32* masks,
                  unsigned char* workspace, int rows, int vocab, int vocab_limit) {
  SHARED_ARRAY(Histogram, shared, 1);
  const int row = block_y(), begin = block_x() * SLICE, is_raw = block_z();
  const int end = begin + SLICE < vocab_limit ? begin + SLICE : vocab_limit;
  const Parameters p = parameters_of(parameters, rows, row);
  if (is_raw ? p.logprobs <= 0 : p.greedy != 0) return;
  const Workspace work = workspace_of(workspace, rows, row, vocab, vocab_limit);
  const Summary summary = summary_of(work.slices, vocab_limit);
  if (summary.best == NO_RANK) return;
  const float* raw = logits + int64(row) * vocab;
  const bool changed = !is_raw && is_changed(p, edit_starts, row);
  if (changed && !summary.is_open) {
    const uint32* mask = p.mask_row < 0 ? nullptr : masks + int64(p.mask_row) * ((vocab + 31) / 32);
    const Edits edits = {edit_ids, edit_counts, edit_flags, edit_bias};
    allow_forbidden(raw, work.scratch, p, edits, edit_starts, row, mask, begin, end);
  }
  if (!is_raw && !selects(p, vocab_limit)) return;

  const float best = logit_of(summary.best);
  const uint64 lowest = is_raw ? uint64(LOWEST_RANK) : min_p_floor(p, best);
  const Weights weights = is_raw ? raw_weights(p) : weights_of(p, best, !cuts_by_count(p, vocab_limit));
  clear(*shared);
  sync_block();
  visit_logits<2>(changed ? work.scratch : raw, begin, end, vocab % 4 == 0, [&](int id, float logit) {
    const uint64 rank = rank_of(logit, id);
    if (rank >= lowest) weights.add(*shared, first_bin(rank), rank);
  });
  sync_block();
  Histogram& all = work.histograms[is_raw];
  NO_UNROLL
  for (int bin = thread_index(); bin < BINS; bin += thread_count()) {
    if (shared->count[bin] == 0) continue;
    atomic_add(&all.count[bin], shared->count[bin]);
    if (weights.by_mass) add_mass(all, bin, shared->low[bin], shared->high[bin]);
  }
}

// The best `count` raw logits of a row, in order; from `cut` on there are no more.
DEVICE void list_best(Search& search, Ranks& ranks, const Workspace& work, uint64 cut, int count, int* ids,
                      float* logprobs) {
  if (ranks.listed_from > cut) make_list(search, ranks, cut);
  const Normaliser normaliser = normaliser_of(work.slices, ranks.limit);
  for (int i = thread_index(); i < count; i += thread_count()) {
    ids[i] = -1;
    logprobs[i] = float_of(INFINITE | 0x80000000u);
  }
  sync_block();
  NO_UNROLL
  for (int i = thread_index(); i < int(search.listed); i += thread_count()) {
    const uint64 rank = search.list[i];
    const float x = scaled(logit_of(rank), normaliser.best, 1.0f);
    if (rank < cut || bits_of(x) == (INFINITE | 0x80000000u)) continue;
    int place = 0;
    NO_UNROLL
    for (int other = 0; other < int(search.listed); ++other) place += search.list[other] > rank ? 1 : 0;
    ids[place] = id_of(rank);
    logprobs[place] = float(double(x) - normaliser.log_sum);
  }
}

KERNEL(1024)
void sample_select(const float* logits, const void* parameters, const int* edit_starts, unsigned char* workspace,
                   int* top_ids, float* top_logprobs, int rows, int vocab, int vocab_limit) {
  SHARED_ARRAY(Search, shared, 1);
  const int row = block_x(), is_raw = block_y();
  const Parameters p = parameters_of(parameters, rows, row);
  if (is_raw ? p.logprobs <= 0 : p.greedy != 0) return;
  const Workspace work = workspace_of(workspace, rows, row, vocab, vocab_limit);
  const Summary summary = summary_of(work.slices, vocab_limit);
  if (summary.best == NO_RANK) {
    if (thread_index() == 0 && !is_raw) *work.states = {NO_RANK, NO_RANK};
    return;
  }
  const float* raw = logits + int64(row) * vocab;
  const bool changed = !is_raw && is_changed(p, edit_starts, row);
  Ranks ranks = {changed ? work.scratch : raw, vocab_limit, vocab % 4 == 0, ~0ull};
  const float best = logit_of(summary.best);
  uint64 cut = is_raw ? uint64(LOWEST_RANK) : min_p_floor(p, best);
  const Histogram* counted = work.histograms + is_raw;
  NO_UNROLL
  for (int by_mass = 0; by_mass < 2; ++by_mass) {
    if (by_mass ? is_raw || p.top_p == 1.0 : !is_raw && !cuts_by_count(p, vocab_limit)) continue;
    const Weights weights = is_raw ? raw_weights(p) : weights_of(p, best, by_mass);
    cut = cut_of(*shared, ranks, cut, weights, counted);
    counted = nullptr;
  }
  if (is_raw) {
    list_best(*shared, ranks, work, cut, p.logprobs, top_ids + row * MOST_TOPS, top_logprobs + row * MOST_TOPS);
  } else if (thread_index() == 0) {
    *work.states = {summary.best, cut};
  }
}

KERNEL(256)
void sample_draw(const float* logits, const void* parameters, const uint32* positions, const int* edit_starts,
                 unsigned char* workspace, int rows, int vocab, int vocab_limit) {
  const int row = block_y(), begin = block_x() * SLICE;
  const int end = begin + SLICE < vocab_limit ? begin + SLICE : vocab_limit;
  const Parameters p = parameters_of(parameters, rows, row);
  const Workspace work = workspace_of(workspace, rows, row, vocab, vocab_limit);
  if (p.greedy || work.states->best == NO_RANK) return;
  const float* from = is_changed(p, edit_starts, row) ? work.scratch : logits + int64(row) * vocab;
  const float best = logit_of(work.states->best);
  const uint64 cut = work.states->cut;

  Draw draw = {-double(float_of(INFINITE)), -1};
  NO_UNROLL
  for (int first = begin + 4 * thread_index(); first < end; first += 4 * thread_count()) {
    const Four four = load_four(from, first, end, vocab % 4 == 0);
    bool kept[4];
    UNROLL
    for (int i = 0; i < 4; ++i) kept[i] = first + i < end && rank_of(four.at[i], first + i) >= cut;
    if (!(kept[0] || kept[1] || kept[2] || kept[3])) continue;
    const Words4 bits = philox(p.seed, positions[row], uint32(first / 4));
    UNROLL
    for (int i = 0; i < 4; ++i) {
      if (kept[i]) draw.see(first + i, scaled(four.at[i], best, p.temperature), unit_float(bits.word[i]));
    }
  }
  SHARED_ARRAY(Draw, parts, MOST_WARPS);
  draw = warp_draw(draw);
  if (lane_index() == 0) parts[warp_index()] = draw;
  sync_block();
  if (warp_index() > 0) return;
  draw = warp_draw(parts[lane_index() < warp_count() ? lane_index() : 0]);
  if (lane_index() == 0) {
    work.slices[block_x()].score = draw.score;
    work.slices[block_x()].drawn = draw.id;
  }
}

KERNEL(32)
void sample_finish(const float* logits, const void* parameters, unsigned char* workspace, int* tokens, int* next_ids,
                   float* logprobs, int rows, int vocab, int vocab_limit) {
  const int row = block_x();
  const Parameters p = parameters_of(parameters, rows, row);
  const Workspace work = workspace_of(workspace, rows, row, vocab, vocab_limit);
  const Summary summary = summary_of(work.slices, vocab_limit);
  Draw draw = {-double(float_of(INFINITE)), -1};
  if (!p.greedy) {
    NO_UNROLL
    for (int i = lane_index(); i < slices_of(vocab_limit); i += WARP) {
      draw = better_draw(draw, {work.slices[i].score, work.slices[i].drawn});
    }
    draw = warp_draw(draw);
  }
  const int token = summary.has_nan ? -1 : summary.best == NO_RANK ? -2 : p.greedy ? id_of(summary.best) : draw.id;
  if (lane_index() == 0) {
    tokens[row] = token;
    next_ids[row] = token < 0 ? 0 : token;
  }
  if (p.logprobs < 0 || token < 0) return;
  const Normaliser normaliser = normaliser_of(work.slices, vocab_limit);
  const float x = scaled(logits[int64(row) * vocab + token], normaliser.best, 1.0f);
  if (lane_index() == 0) logprobs[row] = float(double(x) - normaliser.log_sum);
}
