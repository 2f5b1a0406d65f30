// The first look at a slice of a row: its best logits, raw and as they are drawn from, and the maxima of groups, by which the
// tokens that matter are found without a sort.
#pragma once

#include "sample_edits.cuh"

// What a thread has seen of a row.
struct Seen {
  Best best, forbidden, raw;
  uint32 flags;
};

// Four raw logits from `first` on. Gives the best that may be drawn, and of the raw ones.
struct Tops {
  float best, raw;
};
DEVICE Tops see_four(Seen& seen, const Parameters& p, Four four, int first, int end, int words) {
  Tops tops = {minus_infinite(), minus_infinite()};
  if (first >= end) return tops;
  UNROLL
  for (int i = 0; i < 4; ++i) {
    if (first + i >= end) continue;
    seen.raw.see(first + i, four.at[i]);
    if (four.at[i] != four.at[i]) seen.flags |= HAS_NAN;
    tops.raw = larger(tops.raw, four.at[i]);
  }
  if (!is_edited(p)) {
    tops.best = tops.raw;
    return tops;
  }
  const Edited edited = edit(four, first, p, words);
  UNROLL
  for (int i = 0; i < 4; ++i) {
    if (first + i >= end) continue;
    if (edited.open >> i & 1) seen.flags |= OPEN;
    if (edited.forbidden >> i & 1) {
      seen.forbidden.see(first + i, four.at[i]);
    } else {
      seen.best.see(first + i, four.at[i]);
      tops.best = larger(tops.best, four.at[i]);
    }
  }
  return tops;
}

// The largest of a group's values, which two neighbouring lanes hold.
DEVICE void keep_maximum(float* maxima, int first, int end, float top) {
  top = larger(top, shuffle_xor(top, 1));
  if (first % GROUP == 0 && first < end) maxima[first / GROUP] = top;
}

DEVICE Seen scan(const Workspace& work, const Parameters& p, const float* raw, int begin, int end, int vocab,
                 int limit) {
  enum : int { LOADS = 4 };
  Seen seen = {};
  const int apart = 4 * thread_count();
  NO_UNROLL
  for (int start = begin; start < end; start += LOADS * apart) {
    Four fours[LOADS] = {};
    UNROLL
    for (int j = 0; j < LOADS; ++j) {
      const int first = start + j * apart + 4 * thread_index();
      if (first < end) fours[j] = load_four(raw, first, end, vocab % 4 == 0);
    }
    UNROLL
    for (int j = 0; j < LOADS; ++j) {
      if (start + j * apart >= end) continue;
      const int first = start + j * apart + 4 * thread_index();
      const Tops tops = see_four(seen, p, fours[j], first, end, words_of(vocab));
      if (selects(p, limit)) keep_maximum(work.maxima, first, end, tops.best);
      if (p.logprobs > 0) keep_maximum(work.maxima + work.groups, first, end, tops.raw);
    }
  }
  if (!is_edited(p)) {
    seen.best = seen.raw;
    seen.flags |= OPEN;
  }
  return seen;
}

// About the mass of a slice, its best logit's being 1. Where that is infinite it is no number, and not used.
DEVICE float mass_about(const Row& row, const Parameters& p, float best, int begin, int end) {
  const float scale = 0x1.715476p+0f / p.temperature;
  float sum = 0.0f;
  row.visit<2>(begin, end, [&](int, float logit) { sum += power_of_two((logit - best) * scale); });
  return block_sum(sum);
}
DEVICE float row_mass_about(const Slice* slices, const Parameters& p, int count, float best) {
  const float scale = 0x1.715476p+0f / p.temperature;
  float sum = 0.0f;
  NO_UNROLL
  for (int i = lane_index(); i < count; i += WARP) {
    if (slices[i].best != NO_RANK) sum += slices[i].mass * power_of_two((logit_of(slices[i].best) - best) * scale);
  }
  return warp_sum(sum);
}
