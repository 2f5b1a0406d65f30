// sample: one token a row of logits, by every rule of rvllm/sampling/sampler.py and draw.py, whose steps these are.
//
// A chain of kernels, one after another in one stream or graph:
//     sample_scan    reads every logit: what steps 1 and 2 make of it, the best, and of each group of 8 the largest, or
//                    where all are drawn from, 5, a bound of its scores. The last block of a row that is greedy or given,
//                    and tells no log-probability, writes its token.
//     sample_bound   finds from the groups where the tokens of a row with top_p alone, or a large top_k, must be
//     sample_weigh   reads the logits again: lists those tokens, sums the masses that log-probabilities and top_p need
//     sample_finish  finds the tokens that can matter by their groups, or in that list, makes the cut of step 4 and draws
//                    among what is kept; log-probabilities
// sample_bound and sample_weigh may be left out where no row has log-probabilities, top_p without a top_k below the limit,
// or a top_k of more than 256 and below the limit; all but the first where every row is greedy or given without
// log-probabilities. Where a row is so flat that no short list holds what matters, sample_finish goes over the whole row
// with one block.
//
// logits (rows, vocab) f32, never written. Ids from vocab_limit on do not exist: their logits are not looked at.
// parameters: 92 rows bytes, the arrays of sample.cuh's Parameters one after another.
// positions (rows) u32: of the token to draw.
// workspace: rows (155728 + 1056 units) bytes, units = ceil(vocab_limit / 1024); what is in it does not matter.
// counters (rows) u32: 0, and 0 again afterwards.
// tokens, next_ids (rows) i32. -1: a logit is NaN, -2: no token has a logit above -inf; next_ids is 0 for both.
// logprobs (rows) f32, where the row asks. top_ids i32 and top_logprobs f32, (rows, 20): the first n of each where the
//   row asks for n <= 20, high to low, ties by id; where there are fewer, -1 and -inf. Nothing else is written, but the
//   drawn token is counted in the slot of a row with penalties (sample_edits.cuh).
// launch: scan, weigh: grid (1..units, rows), block 256, with scan's number of blocks as `slices` of finish; bound,
//   finish: grid (rows), block 512. No dynamic shared memory. Any power of two from 32 to those numbers of threads, and
//   any number of blocks, gives the same bits.
// bound: 4 vocab bytes a row each for scan and weigh; some 20 integer operations a token of a row without top_k and top_p.
// assumes: logits and workspace start on 16 bytes, parameters on 8; vocab_limit <= vocab; rows <= 65535; no two rows with
//   edits have one slot.
// tiers: t70 t90
// spills: at most 512 bytes
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

// From where on the tokens of a row that is weighed for top_k or top_p are listed; NO_CUT where they are too many.
DEVICE uint64 draw_bound(Search& search, const Workspace& work, const Parameters& p, const State& state, int slices,
                         int limit) {
  if (limit <= LISTED) return state.cut;
  const float best = logit_of(state.best);
  uint64 bound = NO_CUT;
  if (cuts_by_count(p, limit)) {
    if (state.mode & OPEN) {
      Ranks ranks = whole_row(raw_row(work.maxima, work.groups, groups_of(limit)));
      bound = cut_of(search, ranks, state.cut, weights_of(p, best, false), 0, nullptr);
    }
    // Fewer groups than wanted reach the floor: few tokens do.
    if (bound == NO_CUT && p.top_k <= LONG_LIST / GROUP) bound = state.cut;
  } else {
    const float mass = row_mass_about(work.slices, p, slices, best);
    if (bits_of(best) != INFINITE && mass < 0x1p22f && state.mode & OPEN) {
      const float wanted = float(p.top_p) * mass * (1.0f + 0x1p-10f);
      bound = bound_by_mass(search, work.maxima, groups_of(limit), best, score_scale(p.temperature), wanted);
    }
    if (bound == NO_CUT && p.min_p_drop > -double(float_of(INFINITE))) bound = state.cut;
  }
  return bound == NO_CUT ? bound : larger_rank(bound & ~0xffffffffull, state.cut);
}

// Which token a row's best rank is: the first of its group that has this logit.
DEVICE int best_token(const Row& row, uint64 best) {
  const int group = GROUP * id_of(best);
  int token = -1;
  UNROLL
  for (int first = group + 4; first >= group; first -= 4) {
    const Four four = first < row.limit ? row.four(first) : Four{};
    UNROLL
    for (int i = 3; i >= 0; --i) {
      if (first + i < row.limit && four.at[i] == logit_of(best)) token = first + i;
    }
  }
  return token;
}

// The token that a row has without a draw; -1, -2: none at all.
DEVICE int certain_token(const Summary& summary, const Parameters& p, const float* raw, int vocab, int limit) {
  if (summary.best == NO_RANK) return summary.has_nan ? -1 : -2;
  if (p.given >= 0) return p.given;
  return best_token(changed_row(raw, vocab, limit, p, summary.is_open), summary.best);
}

// What is known of a row that is not plain once all its slices have been looked at.
DEVICE State state_of(const Summary& summary, const Parameters& p) {
  State state = {};
  state.best = summary.best;
  state.raw_best = logit_of(summary.raw_best);
  state.mode = (summary.best == NO_RANK ? DONE : is_drawn(p) ? 0u : KNOWN) | (summary.is_open ? OPEN : 0u);
  if (summary.best != NO_RANK) state.cut = min_p_floor(p, logit_of(summary.best));
  return state;
}

struct Slices {
  int begin, end;  // this block's
};
DEVICE Slices slice_of(int limit) {
  const int each = (units_of(limit) + grid_x() - 1) / grid_x() * UNIT, begin = block_x() * each;
  return {begin, begin + each < limit ? begin + each : limit};
}

DEVICE Look look_of(const Workspace& work, const Parameters& p, const float* raw, uint32 position, int vocab,
                    int limit) {
  Look look = {};
  look.raw = raw;
  look.vocab = vocab;
  look.limit = limit;
  look.raws = p.logprobs >= 0;
  look.masses = cuts_by_mass_alone(p, limit);
  look.position = position;
  look.seed = p.seed;
  look.edited = is_edited(p);
  if (is_drawn(p)) look.maxima = work.maxima;
  if (p.logprobs > 0) look.raw_maxima = work.maxima + work.groups;
  look.scores = is_drawn(p) && !selects(p, limit);
  if (look.scores || look.masses) look.scale = score_scale(p.temperature);
  return look;
}

// Blocks of 256, with registers for four of them on a multiprocessor.
KERNEL(1024)
void sample_scan(const float* logits, const void* parameters, const uint32* positions, unsigned char* workspace,
                 uint32* counters, int* tokens, int* next_ids, int rows, int vocab, int vocab_limit) {
  SHARED_ARRAY(Edits, edits, 1);
  begin_grid();
  const int row = block_y();
  const Slices own = slice_of(vocab_limit);
  const Workspace work = workspace_of(workspace, rows, row, vocab_limit);
  const float* raw = logits + int64(row) * vocab;
  const Look look = look_of(work, parameters_of(parameters, rows, row), raw, positions[row], vocab, vocab_limit);
  const Seen seen = scan(*edits, look, parameters, rows, row, own.begin, own.end);
  const Parameters p = parameters_of(parameters, rows, row);
  Slice slice = {};
  slice.best = block_joined(seen.best.rank(), larger_rank);
  if (look.raws) slice.raw_best = block_joined(seen.raw.rank(), larger_rank);
  if (p.edits & (FORBIDDEN | BARRED)) slice.forbidden = block_joined(seen.forbidden.rank(), larger_rank);
  const uint32 flags = (seen.has_nan ? HAS_NAN : 0u) | (seen.open ? OPEN : 0u);
  slice.flags = uint32(block_joined(flags, [](uint64 a, uint64 b) { return a | b; }));
  if (look.masses && slice.best != NO_RANK) {
    const float part = power_of_two((seen.best.logit - logit_of(slice.best)) * look.scale);
    slice.mass = block_sum(seen.best.id < 0 ? 0.0f : seen.mass * part);
  }
  if (thread_index() == 0) work.slices[block_x()] = slice;
  if (!is_plain(p)) {
    if (block_x() == 0 && thread_index() == 0) work.state->token = grid_x();
    return;
  }
  sync_block();
  if (!arrives_last(counters + row) || warp_index() != 0) return;
  const Summary summary = summary_of(work.slices, grid_x());
  if (thread_index() != 0) return;
  write_token(p, row, certain_token(summary, p, raw, vocab, vocab_limit), words_of(vocab), tokens, next_ids);
}

KERNEL(512)
void sample_bound(const float* logits, const void* parameters, unsigned char* workspace, int* tokens, int* next_ids,
                  int rows, int vocab, int vocab_limit) {
  SHARED_ARRAY(Search, shared, 1);
  begin_grid();
  const int row = block_x();
  const Parameters p = parameters_of(parameters, rows, row);
  if (!is_weighed(p, vocab_limit)) return;
  const Workspace work = workspace_of(workspace, rows, row, vocab_limit);
  const int slices = work.state->token;
  const Summary summary = summary_of(work.slices, slices);
  State state = state_of(summary, p);
  if (state.mode & (DONE | KNOWN) && thread_index() == 0) {
    state.token = certain_token(summary, p, logits + int64(row) * vocab, vocab, vocab_limit);
    write_token(p, row, state.token, words_of(vocab), tokens, next_ids);
  }
  if (!(state.mode & (DONE | KNOWN)) && selects(p, vocab_limit) && !is_short(p, vocab_limit)) {
    state.mode |= LISTS;
    state.bounds[0] = draw_bound(*shared, work, p, state, slices, vocab_limit);
    if (state.bounds[0] == NO_CUT) {
      state.mode |= FLAT;
      clear(*work.histogram, true);
    }
  }
  sync_block();
  if (thread_index() == 0) *work.state = state;
}

// What the blocks of a row list, each first by itself: a place in the row's list is waited for once.
enum : int { HELD = HISTOGRAM_WORDS / 2 };
struct Held {
  uint64* ranks;  // HELD of them
  uint32* count;  // more than there is room for: the others are in the row's list already
};
DEVICE void append(const Workspace& work, const Held& held, uint64 rank) {
  uint32 place = atomic_add(held.count, 1u);
  uint64* list = held.ranks;
  uint32 room = HELD;
  if (place >= HELD) {
    place = atomic_add(&work.state->listed[0], 1u);
    list = work.list;
    room = LONG_LIST;
  }
  if (place < room) list[place] = rank;
}
DEVICE void add_held(const Workspace& work, const Held& held) {
  SHARED_ARRAY(uint32, first, 1);
  sync_block();
  const uint32 count = *held.count < HELD ? *held.count : uint32(HELD);
  if (thread_index() == 0) first[0] = atomic_add(&work.state->listed[0], count);
  sync_block();
  NO_UNROLL
  for (uint32 i = thread_index(); i < count; i += thread_count()) {
    if (first[0] + i < LONG_LIST) work.list[first[0] + i] = held.ranks[i];
  }
}

DEVICE void add_to_mass(uint64* to, uint64 mass) {
  mass = block_joined(mass, [](uint64 a, uint64 b) { return a + b; });
  if (thread_index() == 0) atomic_add(to, mass);
}

// A block's part of the raw logits, and of the others.
DEVICE void weigh_raw(const Workspace& work, const Row& row, int begin, int end) {
  const float best = work.state->raw_best;
  uint64 mass = 0;
  row.visit<4>(begin, end, [&](int, float logit) { mass += mass_of(scaled(logit, best, 1.0f)); });
  add_to_mass(&work.state->raw_mass, mass);
}
DEVICE void weigh(Histogram& histogram, const Workspace& work, const Row& row, const Parameters& p, bool flat,
                  int begin, int end) {
  const float best = logit_of(work.state->best);
  const uint64 cut = work.state->cut, bound = work.state->bounds[0];
  const bool by_mass = cuts_by_mass_alone(p, row.limit);
  const Weights weights = weights_of(p, best, by_mass);
  SHARED_ARRAY(uint32, count, 1);
  const Held held = {reinterpret_cast<uint64*>(histogram.count), count};
  uint64 mass = 0;
  if (thread_index() == 0) count[0] = 0;
  if (flat) clear(histogram, true);
  sync_block();
  row.visit<4>(begin, end, [&](int id, float logit) {
    const uint64 rank = rank_of(logit, id);
    if (rank < cut) return;
    if (by_mass) mass += mass_of(scaled(logit, best, p.temperature));
    if (flat) {
      weights.add(histogram, first_bin(rank), rank);
    } else if (rank >= bound) {
      append(work, held, rank);
    }
  });
  if (by_mass) add_to_mass(&work.state->mass, mass);
  if (!flat) {
    add_held(work, held);
    return;
  }
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
  begin_grid();
  const int row = block_y();
  const Slices own = slice_of(vocab_limit);
  const Parameters p = parameters_of(parameters, rows, row);
  if (!is_weighed(p, vocab_limit)) return;
  const Workspace work = workspace_of(workspace, rows, row, vocab_limit);
  const uint32 mode = work.state->mode;
  if (mode & DONE) return;
  const float* raw = logits + int64(row) * vocab;
  if (p.logprobs >= 0) weigh_raw(work, raw_row(raw, vocab, vocab_limit), own.begin, own.end);
  if (!(mode & LISTS)) return;
  const Row changed = changed_row(raw, vocab, vocab_limit, p, (mode & OPEN) != 0);
  weigh(*shared, work, changed, p, (mode & FLAT) != 0, own.begin, own.end);
}

// The best `logprobs` raw logits of a row, in order.
DEVICE void list_best(Search& search, const Workspace& work, const Row& row, const Parameters& p, State& state,
                      double log_sum, int* ids, float* logprobs) {
  const int groups = groups_of(row.limit);
  const float* maxima = work.maxima + work.groups;
  Ranks ranks = whole_row(row);
  uint64 cut = LOWEST_RANK;
  if (row.limit > LISTED) cut = bound_of_few(search, maxima, groups, p.logprobs, cut);
  const bool whole = gather(search, ranks, maxima, groups, logit_of(cut), cut);
  state.listed[1] = search.listed;
  if (!whole || search.listed > FEW) {
    sync_block();
    const uint64 found = cut_of(search, ranks, cut, raw_weights(p, state.raw_best), 0, nullptr);
    if (found != NO_CUT) cut = found;
    if (ranks.listed_from > cut) make_list(search, ranks, cut);
  }
  for (int i = thread_index(); i < p.logprobs; i += thread_count()) {
    ids[i] = -1;
    logprobs[i] = minus_infinite();
  }
  sync_block();
  visit_list(search, ranks, cut, [&](uint64 rank) {
    const float x = scaled(logit_of(rank), state.raw_best, 1.0f);
    if (bits_of(x) == (INFINITE | 0x80000000u)) return;
    int place = 0;
    NO_UNROLL
    for (int other = 0; other < int(search.listed); ++other) place += search.list[other] > rank ? 1 : 0;
    if (place >= p.logprobs) return;
    ids[place] = id_of(rank);
    logprobs[place] = float(double(x) - log_sum);
  });
}

KERNEL(512)
void sample_finish(const float* logits, const void* parameters, const uint32* positions, unsigned char* workspace,
                   int* tokens, int* next_ids, float* logprobs, int* top_ids, float* top_logprobs, int slices, int rows,
                   int vocab, int vocab_limit) {
  SHARED_ARRAY(Search, shared, 1);
  begin_grid();
  const int row = block_x();
  const Parameters p = parameters_of(parameters, rows, row);
  if (is_plain(p)) return;
  const Workspace work = workspace_of(workspace, rows, row, vocab_limit);
  const float* at = logits + int64(row) * vocab;
  State state;
  if (is_weighed(p, vocab_limit)) {
    state = *work.state;
    if (state.mode & DONE) return;
  } else {
    const Summary summary = summary_of(work.slices, slices);
    state = state_of(summary, p);
    if (state.mode & DONE) {
      if (thread_index() == 0) write_token(p, row, summary.has_nan ? -1 : -2, words_of(vocab), tokens, next_ids);
      return;
    }
  }
  if (!(state.mode & KNOWN)) {
    const Row changed = changed_row(at, vocab, vocab_limit, p, (state.mode & OPEN) != 0);
    const Draw draw = pick(*shared, work, changed, p, positions[row], state);
    sync_block();
    state.token = block_draw(draw).id;
    if (thread_index() == 0) write_token(p, row, state.token, words_of(vocab), tokens, next_ids);
  }
  if (p.logprobs >= 0) {
    const double log_sum = logarithm(double(state.raw_mass) * 0x1p-40);
    if (thread_index() == 0) {
      logprobs[row] = float(double(scaled(at[state.token], state.raw_best, 1.0f)) - log_sum);
    }
    sync_block();
    if (p.logprobs > 0) {
      list_best(*shared, work, raw_row(at, vocab, vocab_limit), p, state, log_sum, top_ids + row * MOST_TOPS,
                top_logprobs + row * MOST_TOPS);
    }
  }
  if (thread_index() == 0) *work.state = state;
}
