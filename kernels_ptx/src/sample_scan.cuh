// The first look at a slice of a row: its best logits, raw and as they are drawn from, and the largest of each group, by
// which the tokens that matter are found without a sort. Logits that are edited are few: the look goes past them, and they
// are added afterwards, each by a thread.
#pragma once

#include "sample_draw.cuh"

// What a block shares of a part of a row that has edits.
enum : int { PART = 32768, EDITS = 2048 };
struct Edits {
  uint32 hidden[PART / 32];  // ids that are edited, or not allowed
  int ids[EDITS];            // the edited ones among the allowed; more than there is room for: not all
  uint32 count;
};

// What a thread has seen of a row. Ids are those of groups.
struct Seen {
  Best best, forbidden, raw;
  float mass;  // about, the best one's: 1; no number where that is infinite
  bool has_nan, open;
  // The mass of another best.
  DEVICE void weigh_from(float old, float scale) {
    if (best.logit > old) mass *= power_of_two((old - best.logit) * scale);
  }
};

struct Eight {
  float at[GROUP];
};
// A group; -inf from `end` on.
DEVICE Eight load_group(const float* row, int first, int end, bool wide) {
  Eight eight;
  if (wide && first + GROUP <= end) {
    const Words4 low = load_words4(row + first), high = load_words4(row + first + 4);
    UNROLL
    for (int i = 0; i < 4; ++i) {
      eight.at[i] = float_of(low.word[i]);
      eight.at[4 + i] = float_of(high.word[i]);
    }
  } else {
    UNROLL
    for (int i = 0; i < GROUP; ++i) eight.at[i] = first + i < end ? row[first + i] : minus_infinite();
  }
  return eight;
}
DEVICE float largest(const Eight& eight) {
  float top = eight.at[0];
  UNROLL
  for (int i = 1; i < GROUP; ++i) top = larger(top, eight.at[i]);
  return top;
}
DEVICE bool has_nan(const Eight& eight) {
  bool found = false;
  UNROLL
  for (int i = 0; i < GROUP; i += 2) found |= unordered(eight.at[i], eight.at[i + 1]);
  return found;
}

DEVICE void find_edits(Edits& edits, const Parameters& p, int begin, int end, int words) {
  if (thread_index() == 0) edits.count = 0;
  sync_block();
  NO_UNROLL
  for (int word = begin / 32 + thread_index(); 32 * word < end; word += thread_count()) {
    const uint32 edited = edited_bits(p, word, words), allowed = allowed_bits(p, word);
    edits.hidden[word - begin / 32] = edited | ~allowed;
    uint32 left = edited & allowed & (end - 32 * word < 32 ? (1u << (end - 32 * word)) - 1 : ~0u);
    NO_UNROLL
    for (; left != 0; left &= left - 1) {
      const uint32 place = atomic_add(&edits.count, 1u);
      if (place < EDITS) edits.ids[place] = 32 * word + lowest_bit(left);
    }
  }
  sync_block();
}

DEVICE void raise(float* value, float to) {
  uint32* bits = reinterpret_cast<uint32*>(value);
  uint32 old = bits_of(*value);
  while (to > float_of(old)) {
    const uint32 met = atomic_compare_swap(bits, old, bits_of(to));
    if (met == old) return;
    old = met;
  }
}

// How a row is looked at: where something is kept of each group, and whether that is a bound of its scores.
struct Look {
  const float* raw;
  int vocab, limit;
  float* maxima;  // null: nothing is kept
  float* raw_maxima;
  bool scores, raws, masses;
  float scale;  // from logits to scores
  uint32 position;
  int64 seed;
  bool edited;
};

// Adds an edited logit. What the look has kept of its group is there, for this thread.
DEVICE void see_edited(Seen& seen, const Look& look, const Parameters& p, int id) {
  const Edited one = edit(p, id, look.raw[id], words_of(look.vocab));
  seen.open |= one.open;
  if (one.forbidden) {
    seen.forbidden.see_any(id / GROUP, one.logit);
    return;
  }
  const float old = seen.best.logit;
  seen.best.see_any(id / GROUP, one.logit);
  if (look.masses && one.logit > minus_infinite()) {
    seen.weigh_from(old, look.scale);
    seen.mass += power_of_two((one.logit - seen.best.logit) * look.scale);
  }
  if (look.maxima == nullptr) return;
  float kept = one.logit;
  if (look.scores) {
    const Words8 random = philox(p.seed, look.position, uint32(id / BLOCK_IDS), 0);
    kept = score_bound(kept, look.scale, half_of(random, id % BLOCK_IDS));
  }
  raise(look.maxima + id / GROUP, kept);
}

// The unedited logits of [begin, end), at most PART where there are edits.
template <bool SCORES>
DEVICE void see_groups(Seen& seen, const Look& look, const Edits& edits, int begin, int end) {
  enum : int { LOADS = BLOCK_IDS / GROUP };
  const int apart = SCORES ? 1 : thread_count(), last = groups_of(end);
  const bool wide = look.vocab % 4 == 0;
  NO_UNROLL
  for (int start = begin / GROUP + (SCORES ? LOADS : 1) * thread_index(); start < last;
       start += LOADS * thread_count()) {
    Eight eights[LOADS];
    UNROLL
    for (int j = 0; j < LOADS; ++j) eights[j] = load_group(look.raw, GROUP * (start + j * apart), end, wide);
    Words8 random = {};
    if (SCORES) random = philox(look.seed, look.position, uint32(start / LOADS), 0);
    UNROLL
    for (int j = 0; j < LOADS; ++j) {
      const int group = start + j * apart;
      Eight& eight = eights[j];
      seen.has_nan |= has_nan(eight);
      if (look.raws) {
        const float top = largest(eight);
        seen.raw.see(group, top);
        if (look.raw_maxima != nullptr && group < last) look.raw_maxima[group] = top;
      }
      if (look.edited && group < last) {
        const int first = GROUP * group - begin;
        const uint32 hidden = edits.hidden[first / 32] >> (first % 32);
        UNROLL
        for (int i = 0; i < GROUP; ++i) {
          if (hidden >> i & 1) eight.at[i] = minus_infinite();
        }
      }
      const float top = largest(eight), old = seen.best.logit;
      seen.best.see(group, top);
      if (!SCORES && look.masses && top > minus_infinite()) {
        seen.weigh_from(old, look.scale);
        UNROLL
        for (int i = 0; i < GROUP; ++i) seen.mass += power_of_two((eight.at[i] - seen.best.logit) * look.scale);
      }
      if (look.maxima == nullptr || group >= last) continue;
      float kept = top;
      if (SCORES) {
        UNROLL
        for (int i = 0; i < GROUP; ++i) {
          const float bound = score_bound(eight.at[i], look.scale, half_of(random, GROUP * j + i));
          kept = i == 0 ? bound : larger(kept, bound);
        }
      }
      look.maxima[group] = kept;
    }
  }
}

// The parameters are read anew for each part of the work: registers are scarce.
DEVICE Seen scan(Edits& edits, const Look& look, const void* parameters, int rows, int row, int begin, int end) {
  const int words = words_of(look.vocab);
  Seen seen = {};
  NO_UNROLL
  for (int from = begin; from < end; from += PART) {
    const int to = look.edited && from + PART < end ? from + PART : end;
    if (look.edited) find_edits(edits, parameters_of(parameters, rows, row), from, to, words);
    if (look.scores) {
      see_groups<true>(seen, look, edits, from, to);
    } else {
      see_groups<false>(seen, look, edits, from, to);
    }
    seen.open |= seen.best.logit > minus_infinite();
    if (!look.edited) return seen;
    sync_block();
    const Parameters p = parameters_of(parameters, rows, row);
    const bool whole = edits.count <= EDITS;
    NO_UNROLL
    for (int i = thread_index(); i < (whole ? int(edits.count) : to - from); i += thread_count()) {
      const int id = whole ? edits.ids[i] : from + i;
      const uint32 edited_ids = edited_bits(p, id / 32, words) & allowed_bits(p, id / 32);
      if (whole || edited_ids >> (id % 32) & 1) see_edited(seen, look, p, id);
    }
    sync_block();
  }
  return seen;
}

DEVICE float row_mass_about(const Slice* slices, const Parameters& p, int count, float best) {
  const float scale = score_scale(p.temperature);
  float sum = 0.0f;
  NO_UNROLL
  for (int i = lane_index(); i < count; i += WARP) {
    if (slices[i].best != NO_RANK) sum += slices[i].mass * power_of_two((logit_of(slices[i].best) - best) * scale);
  }
  return warp_sum(sum);
}
