// sample: one token a row of logits, by every rule of rvllm/sampling/sampler.py and draw.py, whose steps these are.
//
// A chain of kernels, one after another in one stream or graph:
//     sample_scan    reads every logit: what steps 1 and 2 make of it, the best, the maxima of groups of 8. The last
//                    block of a row that is greedy or given, and tells no log-probability, writes its token.
//     sample_bound   finds from the maxima where the tokens of a row with top_k or top_p must be
//     sample_weigh   reads the logits again: lists those that can matter, sums the masses
//     sample_draw    the same for rows without top_k and top_p: Gumbel-max, 5, in each slice
//     sample_finish  finds the cut of step 4 in the list and draws among what is kept; log-probabilities
// sample_weigh may be left out where no row has top_k, top_p or log-probabilities, sample_draw where no row is drawn from
// without top_k and top_p, and all but the first where every row is greedy or given without log-probabilities. Where a
// row is so flat that no short list holds what matters, sample_finish goes over the whole row with one block.
//
// logits (rows, vocab) f32, never written. Ids from vocab_limit on do not exist: their logits are not looked at.
// parameters: 92 rows bytes, the arrays of sample.cuh's Parameters one after another.
// positions (rows) u32: of the token to draw.
// workspace: rows (172112 + 1072 units) bytes, units = ceil(vocab_limit / 1024); what is in it does not matter.
// counters (rows) u32: 0, and 0 again afterwards.
// tokens, next_ids (rows) i32. -1: a logit is NaN, -2: no token has a logit above -inf; next_ids is 0 for both.
// logprobs (rows) f32, where the row asks. top_ids i32 and top_logprobs f32, (rows, 20): the first n of each where the
//   row asks for n <= 20, high to low, ties by id; where there are fewer, -1 and -inf. Nothing else is written, but the
//   drawn token is counted in the slot of a row with penalties (sample_edits.cuh).
// launch: scan, weigh, draw: grid (1..units, rows), block 256, with draw's number of blocks as `slices` of finish; bound:
//   grid (rows), block 512; finish: grid (rows), block 256. No dynamic shared memory. Any power of two from 32 to those
//   numbers of threads, and any number of blocks, gives the same bits.
// bound: 4 vocab bytes a row each for scan, weigh and draw; some 30 integer operations a token that is drawn from.
// assumes: logits and workspace start on 16 bytes, parameters on 8; vocab_limit <= vocab; rows <= 65535; no two rows with
//   edits have one slot.
// tiers: t70
#include "sample_draw.cuh"
#include "sample_scan.cuh"

DEVICE void write_token(const Parameters& p, int row, int token, int words, int* tokens, int* next_ids) {
  tokens[row] = token;
  next_ids[row] = token < 0 ? 0 : token;
  count_token(p, token, words);
}

// The lowest rank that min_p keeps. Larger takes the number where inf - inf is none.
DEVICE uint64 min_p_floor(const Parameters& p, float best) {
  const float floor = larger(float(double(best) + p.min_p_drop), -0x1.fffffep+127f);
  return rank_of(floor, -1) & ~0xffffffffull;
}

// Top_k goes first, and top_p by mass in what that leaves.
DEVICE Weights weights_of(const Parameters& p, float best, bool by_mass) {
  return {by_mass, best, p.temperature, p.top_p, p.top_k};
}
DEVICE Weights raw_weights(const Parameters& p) { return {false, 0.0f, 1.0f, 1.0, p.logprobs}; }

// A rank, at least `floor`, from which on the logits weigh `wanted` for sure, since the maxima of their groups do;
// NO_CUT where those do not.
DEVICE uint64 bound_of(Search& search, const float* maxima, int groups, int limit, uint64 floor, const Weights& weights,
                       uint64 wanted) {
  if (limit <= LISTED) return floor;
  Ranks ranks = whole_row(raw_row(maxima, groups, (limit + GROUP - 1) / GROUP));
  const uint64 cut = cut_of(search, ranks, floor, weights, wanted, nullptr);
  return cut == NO_CUT ? cut : larger_rank(cut & ~0xffffffffull, floor);
}

// From where on the tokens of a row with top_k or top_p are listed.
DEVICE uint64 draw_bound(Search& search, const Workspace& work, const Parameters& p, const State& state, int slices,
                         int limit) {
  const float best = logit_of(state.best);
  uint64 bound = NO_CUT;
  if (cuts_by_count(p, limit)) {
    if (state.mode & OPEN || limit <= LISTED) {
      bound = bound_of(search, work.maxima, work.groups, limit, state.cut, weights_of(p, best, false), 0);
    }
    // Fewer groups than wanted reach the floor: few tokens do.
    if (bound == NO_CUT && p.top_k <= LONG_LIST / GROUP) bound = state.cut;
  } else {
    const float mass = row_mass_about(work.slices, p, slices, best);
    const bool known = bits_of(best) != INFINITE && mass < 0x1p22f && state.mode & OPEN;
    const double wanted = known ? p.top_p * double(mass) * (1.0 + 0x1p-10) * 0x1p40 : 0.0;
    if (known || limit <= LISTED) {
      bound =
          bound_of(search, work.maxima, work.groups, limit, state.cut, weights_of(p, best, true), uint64(wanted) + 1);
    }
    if (bound == NO_CUT && p.min_p_drop > -double(float_of(INFINITE))) bound = state.cut;
  }
  return bound;
}

// The token that a row has without a draw; -1, -2: none at all.
DEVICE int certain_token(const Summary& summary, const Parameters& p) {
  return summary.has_nan ? -1 : summary.best == NO_RANK ? -2 : p.given >= 0 ? p.given : id_of(summary.best);
}

struct Slices {
  int begin, end;  // this block's
};
DEVICE Slices slice_of(int limit) {
  const int each = (units_of(limit) + grid_x() - 1) / grid_x() * UNIT, begin = block_x() * each;
  return {begin, begin + each < limit ? begin + each : limit};
}

KERNEL(256)
void sample_scan(const float* logits, const void* parameters, unsigned char* workspace, uint32* counters, int* tokens,
                 int* next_ids, int rows, int vocab, int vocab_limit) {
  const int row = block_y();
  const Slices own = slice_of(vocab_limit);
  const Parameters p = parameters_of(parameters, rows, row);
  const Workspace work = workspace_of(workspace, rows, row, vocab_limit);
  const float* raw = logits + int64(row) * vocab;

  const Seen seen = scan(work, p, raw, own.begin, own.end, vocab, vocab_limit);
  Slice slice = {};
  slice.best = block_joined(seen.best.rank(), larger_rank);
  slice.raw_best = is_edited(p) ? block_joined(seen.raw.rank(), larger_rank) : slice.best;
  if (p.edits & (FORBIDDEN | BARRED)) slice.forbidden = block_joined(seen.forbidden.rank(), larger_rank);
  slice.flags = uint32(block_joined(seen.flags, [](uint64 a, uint64 b) { return a | b; }));
  if (cuts_by_mass_alone(p, vocab_limit) && slice.best != NO_RANK) {
    const Row all = changed_row(raw, vocab, own.end, p, true);
    slice.mass = mass_about(all, p, logit_of(slice.best), own.begin, own.end);
  }
  if (thread_index() == 0) work.slices[block_x()] = slice;
  if (!is_plain(p)) {
    if (block_x() == 0 && thread_index() == 0) work.state->token = grid_x();
    return;
  }
  sync_block();
  if (!arrives_last(counters + row)) return;
  const int token = certain_token(summary_of(work.slices, grid_x()), p);
  if (thread_index() == 0) write_token(p, row, token, words_of(vocab), tokens, next_ids);
}

KERNEL(512)
void sample_bound(const void* parameters, unsigned char* workspace, int* tokens, int* next_ids, int rows, int vocab,
                  int vocab_limit) {
  SHARED_ARRAY(Search, shared, 1);
  const int row = block_x();
  const Parameters p = parameters_of(parameters, rows, row);
  if (is_plain(p)) return;
  const Workspace work = workspace_of(workspace, rows, row, vocab_limit);
  const int slices = work.state->token;
  const Summary summary = summary_of(work.slices, slices);
  State state = {};
  state.best = summary.best;
  state.raw_best = logit_of(summary.raw_best);
  state.token = certain_token(summary, p);
  const bool fails = summary.best == NO_RANK;
  if (fails || !is_drawn(p)) {
    state.mode = fails ? DONE : KNOWN;
    if (thread_index() == 0) write_token(p, row, state.token, words_of(vocab), tokens, next_ids);
  } else {
    state.cut = min_p_floor(p, logit_of(summary.best));
    state.mode = (summary.is_open ? OPEN : 0u) | (selects(p, vocab_limit) ? 0u : DIRECT);
    if (!(state.mode & DIRECT)) state.bounds[0] = draw_bound(*shared, work, p, state, slices, vocab_limit);
    if (state.bounds[0] == NO_CUT) {
      state.mode |= FLAT;
      clear(*work.histogram);
    }
  }
  sync_block();
  if (p.logprobs > 0 && !fails) {
    const uint64 lowest = LOWEST_RANK;
    state.bounds[1] = bound_of(*shared, work.maxima + work.groups, work.groups, vocab_limit, lowest, raw_weights(p), 0);
    if (state.bounds[1] == NO_CUT) state.bounds[1] = lowest;
  }
  if (thread_index() == 0) *work.state = state;
}

// Adds a rank to a row's list. One for which there is no room is only counted.
DEVICE void append(uint64* list, uint32* listed, int room, uint64 rank) {
  const uint32 place = atomic_add(listed, 1u);
  if (place < uint32(room)) list[place] = rank;
}

DEVICE void add_to_mass(uint64* to, uint64 mass) {
  mass = block_joined(mass, [](uint64 a, uint64 b) { return a + b; });
  if (thread_index() == 0) atomic_add(to, mass);
}

// A block's part of the raw logits, and of the others.
DEVICE void weigh_raw(const Workspace& work, const Row& row, const Parameters& p, int begin, int end) {
  const float best = work.state->raw_best;
  const uint64 bound = p.logprobs > 0 ? work.state->bounds[1] : uint64(NO_CUT);
  uint64 mass = 0;
  row.visit<4>(begin, end, [&](int id, float logit) {
    mass += mass_of(scaled(logit, best, 1.0f));
    const uint64 rank = rank_of(logit, id);
    if (rank >= bound) append(work.lists + LONG_LIST, &work.state->listed[1], LISTED, rank);
  });
  add_to_mass(&work.state->raw_mass, mass);
}
DEVICE void weigh(Histogram& histogram, const Workspace& work, const Row& row, const Parameters& p, bool flat,
                  int begin, int end) {
  const float best = logit_of(work.state->best);
  const uint64 cut = work.state->cut, bound = work.state->bounds[0];
  const bool by_mass = cuts_by_mass_alone(p, row.limit);
  const Weights weights = weights_of(p, best, by_mass);
  uint64 mass = 0;
  if (flat) {
    clear(histogram);
    sync_block();
  }
  row.visit<4>(begin, end, [&](int id, float logit) {
    const uint64 rank = rank_of(logit, id);
    if (rank < cut) return;
    if (by_mass) mass += mass_of(scaled(logit, best, p.temperature));
    if (flat) {
      weights.add(histogram, first_bin(rank), rank);
    } else if (rank >= bound) {
      append(work.lists, &work.state->listed[0], LONG_LIST, rank);
    }
  });
  if (by_mass) add_to_mass(&work.state->mass, mass);
  if (!flat) return;
  sync_block();
  NO_UNROLL
  for (int bin = thread_index(); bin < BINS; bin += thread_count()) {
    if (histogram.count[bin] == 0) continue;
    atomic_add(&work.histogram->count[bin], histogram.count[bin]);
    if (by_mass) add_mass(*work.histogram, bin, histogram.low[bin], histogram.high[bin]);
  }
}

KERNEL(256)
void sample_weigh(const float* logits, const void* parameters, unsigned char* workspace, int rows, int vocab,
                  int vocab_limit) {
  SHARED_ARRAY(Histogram, shared, 1);
  const int row = block_y();
  const Slices own = slice_of(vocab_limit);
  const Parameters p = parameters_of(parameters, rows, row);
  if (is_plain(p)) return;
  const Workspace work = workspace_of(workspace, rows, row, vocab_limit);
  const uint32 mode = work.state->mode;
  if (mode & DONE) return;
  const float* raw = logits + int64(row) * vocab;
  if (p.logprobs >= 0) weigh_raw(work, raw_row(raw, vocab, vocab_limit), p, own.begin, own.end);
  if (mode & (KNOWN | DIRECT)) return;
  const Row changed = changed_row(raw, vocab, vocab_limit, p, (mode & OPEN) != 0);
  weigh(*shared, work, changed, p, (mode & FLAT) != 0, own.begin, own.end);
}

KERNEL(256)
void sample_draw(const float* logits, const void* parameters, const uint32* positions, unsigned char* workspace,
                 int rows, int vocab, int vocab_limit) {
  const int row = block_y();
  const Slices own = slice_of(vocab_limit);
  const Parameters p = parameters_of(parameters, rows, row);
  if (!is_drawn(p) || selects(p, vocab_limit)) return;
  const Workspace work = workspace_of(workspace, rows, row, vocab_limit);
  const uint32 mode = work.state->mode;
  if (mode & DONE) return;
  const Row changed = changed_row(logits + int64(row) * vocab, vocab, vocab_limit, p, (mode & OPEN) != 0);
  const float best = logit_of(work.state->best);
  const Draw draw = block_draw(draw_between(changed, p, positions[row], best, work.state->cut, own.begin, own.end));
  if (thread_index() == 0) {
    work.slices[block_x()].score = draw.score;
    work.slices[block_x()].drawn = draw.id;
  }
}

// The rank from which on top_k and top_p keep tokens, of those from `lowest` on; NO_CUT where these lack mass.
DEVICE uint64 kept_from(Search& search, Ranks& ranks, const Parameters& p, float best, uint64 lowest, uint64 mass,
                        const Histogram* counted) {
  const bool by_count = cuts_by_count(p, ranks.row.limit);
  uint64 cut = lowest;
  if (by_count) {
    const uint64 found = cut_of(search, ranks, lowest, weights_of(p, best, false), 0, counted);
    if (found != NO_CUT) cut = found;
  }
  if (p.top_p == 1.0) return cut;
  const Weights weights = weights_of(p, best, true);
  return cut_of(search, ranks, cut, weights, by_count ? 0 : weights.wanted(mass), by_count ? nullptr : counted);
}

struct Picked {
  Draw draw;
  uint64 cut;
};
DEVICE Picked pick(Search& search, const Workspace& work, const Row& row, const Parameters& p, uint32 position,
                   const State& state, int slices) {
  const float best = logit_of(state.best);
  Picked picked = {no_draw(), state.cut};
  if (state.mode & DIRECT) {
    NO_UNROLL
    for (int i = thread_index(); i < slices; i += thread_count()) {
      picked.draw = better_draw(picked.draw, {work.slices[i].score, work.slices[i].drawn});
    }
    return picked;
  }
  Ranks ranks = whole_row(row);
  picked.cut = NO_CUT;
  if (!(state.mode & FLAT)) take_list(search, ranks, work.lists, state.listed[0], LONG_LIST, state.bounds[0]);
  if (ranks.far != nullptr) picked.cut = kept_from(search, ranks, p, best, state.bounds[0], state.mass, nullptr);
  if (picked.cut == NO_CUT) {
    ranks = whole_row(row);
    picked.cut = kept_from(search, ranks, p, best, state.cut, state.mass, state.mode & FLAT ? work.histogram : nullptr);
  }
  picked.draw = ranks.far != nullptr || ranks.listed_from <= picked.cut
                    ? draw_listed(search, ranks, p, position, best, picked.cut)
                    : draw_between(row, p, position, best, picked.cut, 0, row.limit);
  return picked;
}

// The best `logprobs` raw logits of a row, in order.
DEVICE void list_best(Search& search, const Workspace& work, const Row& row, const Parameters& p, const State& state,
                      double log_sum, int* ids, float* logprobs) {
  Ranks ranks = whole_row(row);
  take_list(search, ranks, work.lists + LONG_LIST, state.listed[1], LISTED, state.bounds[1]);
  sync_block();
  uint64 cut = cut_of(search, ranks, state.bounds[1], raw_weights(p), 0, nullptr);
  if (cut == NO_CUT) cut = state.bounds[1];
  if (ranks.listed_from > cut) make_list(search, ranks, cut);
  for (int i = thread_index(); i < p.logprobs; i += thread_count()) {
    ids[i] = -1;
    logprobs[i] = minus_infinite();
  }
  sync_block();
  visit_ranks(search, ranks, cut, [&](uint64 rank) {
    const float x = scaled(logit_of(rank), state.raw_best, 1.0f);
    if (bits_of(x) == (INFINITE | 0x80000000u)) return;
    int place = 0;
    NO_UNROLL
    for (int other = 0; other < int(search.listed); ++other) place += search.list[other] > rank ? 1 : 0;
    ids[place] = id_of(rank);
    logprobs[place] = float(double(x) - log_sum);
  });
}

KERNEL(256)
void sample_finish(const float* logits, const void* parameters, const uint32* positions, unsigned char* workspace,
                   int* tokens, int* next_ids, float* logprobs, int* top_ids, float* top_logprobs, int slices, int rows,
                   int vocab, int vocab_limit) {
  SHARED_ARRAY(Search, shared, 1);
  const int row = block_x();
  const Parameters p = parameters_of(parameters, rows, row);
  if (is_plain(p)) return;
  const Workspace work = workspace_of(workspace, rows, row, vocab_limit);
  State state = *work.state;
  if (state.mode & DONE) return;
  const float* at = logits + int64(row) * vocab;
  if (!(state.mode & KNOWN)) {
    const Row changed = changed_row(at, vocab, vocab_limit, p, (state.mode & OPEN) != 0);
    const Picked picked = pick(*shared, work, changed, p, positions[row], state, slices);
    sync_block();
    state.token = block_draw(picked.draw).id;
    if (thread_index() == 0) {
      work.state->cut = picked.cut;
      write_token(p, row, state.token, words_of(vocab), tokens, next_ids);
    }
  }
  if (p.logprobs < 0) return;
  const double log_sum = logarithm(double(state.raw_mass) * 0x1p-40);
  if (thread_index() == 0) {
    logprobs[row] = float(double(scaled(at[state.token], state.raw_best, 1.0f)) - log_sum);
  }
  if (p.logprobs == 0) return;
  sync_block();
  list_best(*shared, work, raw_row(at, vocab, vocab_limit), p, state, log_sum, top_ids + row * MOST_TOPS,
            top_logprobs + row * MOST_TOPS);
}
