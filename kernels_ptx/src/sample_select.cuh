// Find where an order of ranks is cut, without sorting: a radix search over histograms of counts or masses, from the
// highest eleven bits of the rank down, or of how far it is from the lowest. All sums are integers, so their order is free. One block works on one row.
#pragma once

#include "sample_edits.cuh"

enum : int { DIGIT_BITS = 11 };
enum : uint64 { NO_CUT = ~0ull };

DEVICE void clear(Histogram& histogram, bool by_mass) {
  uint32* words = histogram.count;
  NO_UNROLL
  for (int i = thread_index(); i < BINS * (by_mass ? 3 : 1); i += thread_count()) words[i] = 0;
}

// Adds a mass, of 64 bits, by atomics of 32: each carry is seen by exactly one of them.
DEVICE void add_mass(Histogram& to, int bin, uint32 low, uint32 high) {
  const uint32 old = atomic_add(&to.low[bin], low);
  high += old + low < old ? 1 : 0;
  if (high) atomic_add(&to.high[bin], high);
}

// How ranks are weighed, each as 1 or by its mass, and how much is wanted of them: `count`, or top_p of all mass.
struct Weights {
  bool by_mass;
  float best, temperature;
  double top_p;
  int count;
  DEVICE uint64 mass(uint64 rank) const { return mass_of(scaled(logit_of(rank), best, temperature)); }
  DEVICE void add(Histogram& to, int bin, uint64 rank) const {
    atomic_add(&to.count[bin], 1u);
    if (!by_mass) return;
    const uint64 mass = this->mass(rank);
    if (mass) add_mass(to, bin, uint32(mass), uint32(mass >> 32));
  }
  DEVICE uint64 of(const Histogram& from, int bin) const {
    return by_mass ? uint64(from.high[bin]) << 32 | from.low[bin] : uint64(from.count[bin]);
  }
  // From 1 on; rounded up.
  DEVICE uint64 wanted(uint64 all) const {
    if (!by_mass) return uint64(count);
    const double part = top_p * double(all);
    const uint64 whole = uint64(part);
    return whole + (double(whole) < part ? 1 : 0);
  }
};

DEVICE int first_bin(uint64 rank) { return BINS - 1 - int(rank >> (64 - DIGIT_BITS)); }

struct Sum {
  uint64 weight;
  uint32 count;
};

// What one block shares.
struct Search {
  Histogram histogram;
  uint64 list[LISTED];
  Sum totals[MOST_WARPS];
  Sum before;  // the bin that holds the cut
  int bin;
  uint32 count, listed;
};

// A row; where other blocks have made one, a list in global memory of its ranks from `far_from` on, in any order; and once
// it is short enough one in shared memory, from `listed_from` on.
struct Ranks {
  Row row;
  const uint64* far;
  int far_count;
  uint64 far_from, listed_from;
};
DEVICE Ranks whole_row(const Row& row) { return {row, nullptr, 0, ~0ull, ~0ull}; }

DEVICE bool has_list(const Ranks& ranks, uint64 lowest) {
  return ranks.listed_from <= lowest || ranks.far_from <= lowest;
}
// visit(rank) of every rank from `lowest` on, where a list has them: the short one, if it can be.
template <typename Visit>
DEVICE void visit_list(const Search& search, const Ranks& ranks, uint64 lowest, Visit visit) {
  enum : int { LOADS = 4 };
  const bool is_short = ranks.listed_from <= lowest;
  const uint64* list = is_short ? search.list : ranks.far;
  const int count = is_short ? int(search.listed) : ranks.far_count;
  NO_UNROLL
  for (int start = thread_index(); start < count; start += LOADS * thread_count()) {
    uint64 found[LOADS];
    UNROLL
    for (int j = 0; j < LOADS; ++j) {
      const int i = start + j * thread_count();
      found[j] = i < count ? list[i] : uint64(NO_RANK);
    }
    NO_UNROLL
    for (int j = 0; j < LOADS; ++j) {
      if (found[0] >= lowest && found[0] != NO_RANK) visit(found[0]);
      UNROLL
      for (int i = 1; i < LOADS; ++i) found[i - 1] = found[i];
    }
  }
}
template <typename Visit>
DEVICE void visit_ranks(const Search& search, const Ranks& ranks, uint64 lowest, Visit visit) {
  if (has_list(ranks, lowest)) {
    visit_list(search, ranks, lowest, visit);
  } else {
    ranks.row.visit_all([&](int id, float logit) {
      const uint64 rank = rank_of(logit, id);
      if (rank >= lowest) visit(rank);
    });
  }
}

// The ranks from `lowest` on become the list; there are at most LISTED.
DEVICE void make_list(Search& search, Ranks& ranks, uint64 lowest) {
  if (thread_index() == 0) search.listed = 0;
  sync_block();
  visit_ranks(search, ranks, lowest, [&](uint64 rank) { search.list[atomic_add(&search.listed, 1u)] = rank; });
  ranks.listed_from = lowest;
  sync_block();
}

// Takes the list that other blocks have made, all of the ranks from `lowest` on, if it is whole.
DEVICE void take_list(Search& search, Ranks& ranks, const uint64* list, uint32 count, int room, uint64 lowest) {
  if (count > uint32(room)) return;
  ranks.far = list;
  ranks.far_count = int(count);
  ranks.far_from = lowest;
  if (count <= LISTED) make_list(search, ranks, lowest);
}

// Turns a thread's sum into that of all threads before it; gives the sum of all. Between two calls there must be a
// sync_block().
DEVICE Sum sum_before(Search& search, Sum& mine) {
  const Sum own = mine;
  UNROLL
  for (int apart = 1; apart < WARP; apart *= 2) {
    const int from = lane_index() - apart;
    const Sum other = {shuffle(mine.weight, from), shuffle(mine.count, from)};
    if (from >= 0) mine = {mine.weight + other.weight, mine.count + other.count};
  }
  if (lane_index() == WARP - 1) search.totals[warp_index()] = mine;
  mine = {mine.weight - own.weight, mine.count - own.count};
  sync_block();
  Sum all = {};
  NO_UNROLL
  for (int warp = 0; warp < warp_count(); ++warp) {
    if (warp == warp_index()) mine = {mine.weight + all.weight, mine.count + all.count};
    all = {all.weight + search.totals[warp].weight, all.count + search.totals[warp].count};
  }
  return all;
}

// The histogram of the ranks in [low, low + 2^width) from `lowest` on, by their digit above the lowest `next` bits.
DEVICE void count_ranks(Search& search, const Ranks& ranks, const Weights& weights, uint64 lowest, uint64 low,
                        int width, int next) {
  clear(search.histogram, weights.by_mass);
  sync_block();
  visit_ranks(search, ranks, larger_rank(low, lowest), [&](uint64 rank) {
    if (width == 64 || (rank - low) >> width == 0) {
      weights.add(search.histogram, BINS - 1 - int((rank - low) >> next), rank);
    }
  });
  sync_block();
}

DEVICE void copy_histogram(Search& search, const Histogram& from) {
  uint32* words = search.histogram.count;
  const uint32* counted = from.count;
  NO_UNROLL
  for (int i = thread_index(); i < HISTOGRAM_WORDS; i += thread_count()) words[i] = counted[i];
  sync_block();
}

// Finds the bin in which the running sum of weights reaches `wanted`, 0: what the weights want of all. False where the sum
// never does. The number of threads is a power of two.
DEVICE bool find_bin(Search& search, const Weights& weights, uint64& wanted) {
  const int bins = BINS / thread_count(), first = bins * thread_index();
  Sum before = {};
  NO_UNROLL
  for (int bin = first; bin < first + bins; ++bin) {
    before = {before.weight + weights.of(search.histogram, bin), before.count + search.histogram.count[bin]};
  }
  const uint64 all = sum_before(search, before).weight;
  if (wanted == 0) wanted = weights.wanted(all);
  if (wanted > all) return false;
  NO_UNROLL
  for (int bin = first; bin < first + bins; ++bin) {
    const uint64 weight = weights.of(search.histogram, bin);
    if (before.weight < wanted && wanted <= before.weight + weight) {
      search.before = before;
      search.bin = bin;
      search.count = search.histogram.count[bin];
    }
    before = {before.weight + weight, before.count + search.histogram.count[bin]};
  }
  sync_block();
  return true;
}

// Of the ranks from `lowest` on, the shortest prefix of their order that weighs `wanted`, 0: what the weights want of all.
// Gives a rank that divides it from the rest, NO_CUT where all together weigh less. `counted`: their histogram by the
// first digit, or null.
DEVICE uint64 cut_of(Search& search, Ranks& ranks, uint64 lowest, const Weights& weights, uint64 wanted,
                     const Histogram* counted) {
  uint64 low = 0;
  uint32 above = 0;  // ranks above the bin
  int width = 64;
  const uint64 highest = rank_of(weights.best, 0) | 0xffffffffu;
  if (counted == nullptr && highest >= lowest) {  // no rank is above the best: digits of what is between
    low = lowest;
    while (width > 1 && (highest - low) >> (width - 1) == 0) --width;
  }
  NO_UNROLL
  while (width > 0) {
    const int next = width > DIGIT_BITS ? width - DIGIT_BITS : 0;
    if (counted != nullptr) {
      copy_histogram(search, *counted);
      counted = nullptr;
    } else {
      count_ranks(search, ranks, weights, lowest, low, width, next);
    }
    if (!find_bin(search, weights, wanted)) return NO_CUT;
    low += uint64(BINS - 1 - search.bin) << next;
    wanted -= search.before.weight;
    above += search.before.count;
    if (search.count == 1) break;
    const uint64 from = larger_rank(low, lowest);
    if (ranks.listed_from > from && above + search.count <= LISTED) make_list(search, ranks, from);
    width = next;
  }
  return larger_rank(low, lowest);
}

// ---- Few tokens of a row, found by what is kept of its groups.

// A rank from which on a row has `count` logits for sure, and mostly not many more: the largest of SETS sets of groups are
// logits, too. Its lowest bits are of no use; `floor` where it has to be lower, or there are too few sets.
enum : int { SETS = 1024, KEY_BITS = 32, BITS_KEPT = 22 };
DEVICE uint64 bound_of_few(Search& search, const float* maxima, int groups, int count, uint64 floor) {
  enum : int { LOADS = 8 };
  uint32* reached = search.histogram.count;
  uint32* keys = search.histogram.low;
  const int sets = groups < SETS ? groups : SETS;
  NO_UNROLL
  for (int i = thread_index(); i < KEY_BITS; i += thread_count()) reached[i] = 0;
  NO_UNROLL
  for (int set = thread_index(); set < sets; set += thread_count()) {
    float top = minus_infinite();
    NO_UNROLL
    for (int start = set; start < groups; start += LOADS * SETS) {
      float found[LOADS];
      UNROLL
      for (int j = 0; j < LOADS; ++j) {
        found[j] = start + j * SETS < groups ? maxima[start + j * SETS] : minus_infinite();
      }
      UNROLL
      for (int j = 0; j < LOADS; ++j) top = larger(top, found[j]);
    }
    keys[set] = uint32(rank_of(top, 0) >> 32);
  }
  sync_block();
  uint32 bound = 0;  // bit by bit the largest that `count` sets reach
  NO_UNROLL
  for (int bit = KEY_BITS - 1; bit >= KEY_BITS - BITS_KEPT; --bit) {
    const uint32 next = bound | 1u << bit;
    NO_UNROLL
    for (int set = thread_index(); set < sets; set += thread_count()) {
      if (keys[set] >= next) atomic_add(&reached[bit], 1u);
    }
    sync_block();
    if (reached[bit] >= uint32(count)) bound = next;
  }
  return larger_rank(uint64(bound) << 32, floor);
}

// A rank from which on the largest of the groups, and so the logits, have about the mass that is wanted, the best one's: 1,
// from a histogram of how far below the best they are, in 64ths of a power of two. NO_CUT where they have less.
DEVICE uint64 bound_by_mass(Search& search, const float* maxima, int groups, float best, float scale, float wanted) {
  enum : int { LOADS = 8 };
  uint32* counts = search.histogram.count;
  clear(search.histogram, false);
  sync_block();
  NO_UNROLL
  for (int start = thread_index(); start < groups; start += LOADS * thread_count()) {
    float found[LOADS];
    UNROLL
    for (int j = 0; j < LOADS; ++j) {
      const int group = start + j * thread_count();
      found[j] = group < groups ? maxima[group] : minus_infinite();
    }
    UNROLL
    for (int j = 0; j < LOADS; ++j) {
      const float bin = (best - found[j]) * scale * 64.0f;
      if (bin < float(BINS)) atomic_add(&counts[int(bin)], 1u);
    }
  }
  sync_block();
  const int bins = BINS / thread_count(), first = bins * thread_index();
  const auto weight = [&](int bin) {
    return uint64(counts[bin]) * uint64(power_of_two(float(bin + 1) * -0x1p-6f) * 0x1p32f);
  };
  Sum before = {};
  NO_UNROLL
  for (int bin = first; bin < first + bins; ++bin) before.weight += weight(bin);
  const uint64 aim = uint64(wanted * 0x1p32f) + 1;
  if (sum_before(search, before).weight < aim) return NO_CUT;
  NO_UNROLL
  for (int bin = first; bin < first + bins; ++bin) {
    const uint64 own = weight(bin);
    if (before.weight < aim && aim <= before.weight + own) search.bin = bin;
    before.weight += own;
  }
  sync_block();
  return rank_of(best - float(search.bin + 2) * 0x1p-6f / scale, 0);
}

// The ranks from `lowest` on, of groups of which at least `least` is kept, become the list; false: it has no room for all.
DEVICE bool gather(Search& search, Ranks& ranks, const float* maxima, int groups, float least, uint64 lowest) {
  enum : int { LOADS = 8 };
  const Row& row = ranks.row;
  if (thread_index() == 0) search.listed = 0;
  sync_block();
  NO_UNROLL
  for (int start = thread_index(); start < groups; start += LOADS * thread_count()) {
    float kept[LOADS];
    UNROLL
    for (int j = 0; j < LOADS; ++j) {
      const int group = start + j * thread_count();
      kept[j] = group < groups ? maxima[group] : minus_infinite();
    }
    uint32 reach = 0;
    UNROLL
    for (int j = 0; j < LOADS; ++j) reach |= kept[j] >= least && kept[j] > minus_infinite() ? 1u << j : 0u;
    NO_UNROLL
    for (; reach != 0; reach &= reach - 1) {
      const int group = start + lowest_bit(reach) * thread_count();
      NO_UNROLL
      for (int first = GROUP * group; first < GROUP * (group + 1) && first < row.limit; first += 4) {
        const Four four = row.four(first);
        UNROLL
        for (int i = 0; i < 4; ++i) {
          const uint64 rank = rank_of(four.at[i], first + i);
          if (first + i >= row.limit || rank < lowest) continue;
          const uint32 place = atomic_add(&search.listed, 1u);
          if (place < LISTED) search.list[place] = rank;
        }
      }
    }
  }
  sync_block();
  if (search.listed > LISTED) return false;
  ranks.listed_from = lowest;
  return true;
}

// Of a list of at most FEW ranks: the last of the first `most` of them, and where top_p cuts those, the last that it leaves.
enum : int { FEW = 512 };
DEVICE uint64 cut_of_few(Search& search, const Weights& weights, int most) {
  uint64* ordered = reinterpret_cast<uint64*>(search.histogram.count);
  const int listed = int(search.listed), count = most < listed ? most : listed;
  NO_UNROLL
  for (int i = thread_index(); i < listed; i += thread_count()) {
    int place = 0;
    for (int other = 0; other < listed; ++other) place += search.list[other] > search.list[i] ? 1 : 0;
    ordered[place] = search.list[i];
  }
  sync_block();
  if (weights.top_p == 1.0) return ordered[count - 1];
  const int each = (count + thread_count() - 1) / thread_count(), first = each * thread_index();
  const int end = first + each < count ? first + each : count;
  Sum before = {};
  NO_UNROLL
  for (int i = first; i < end; ++i) before.weight += weights.mass(ordered[i]);
  const uint64 wanted = weights.wanted(sum_before(search, before).weight);
  NO_UNROLL
  for (int i = first; i < end; ++i) {
    const uint64 mass = weights.mass(ordered[i]);
    if (before.weight < wanted && wanted <= before.weight + mass) search.bin = i;
    before.weight += mass;
  }
  sync_block();
  return ordered[search.bin];
}
