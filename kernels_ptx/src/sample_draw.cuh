// Step 5: Gumbel-max with random numbers that depend on seed, position and id alone (rvllm/sampling/philox.py), among what
// step 4 keeps.
#pragma once

#include "sample_select.cuh"

// ---- Philox4x64-10 (Salmon et al., SC 2011): the upper halves (part 0) or the lower ones (part 1) of the bits of ids
// 16 block..16 block + 15, two of them in a word.
enum : int { BLOCK_IDS = 16 };
struct Words8 {
  uint32 word[BLOCK_IDS / 2];
  // By choices and not by an index, which would put the words into memory.
  DEVICE uint32 at(int i) const {
    const uint32 a = i & 1 ? word[1] : word[0], b = i & 1 ? word[3] : word[2];
    const uint32 c = i & 1 ? word[5] : word[4], d = i & 1 ? word[7] : word[6];
    return i & 4 ? (i & 2 ? d : c) : (i & 2 ? b : a);
  }
};
// The i-th of the sixteen halves.
DEVICE uint32 half_of(const Words8& words, int i) { return words.at(i / 2) >> (i % 2 * 16) & 0xffffu; }
DEVICE uint64 upper_product(uint64 a, uint64 b) {
  const uint64 a_low = uint32(a), a_high = a >> 32, b_low = uint32(b), b_high = b >> 32;
  const uint64 middle = a_high * b_low + (a_low * b_low >> 32);
  return a_high * b_high + (middle >> 32) + ((a_low * b_high + uint32(middle)) >> 32);
}
DEVICE Words8 philox(int64 seed, uint32 position, uint32 block, uint32 part) {
  uint64 c0 = uint64(block) + 1, c1 = position, c2 = part, c3 = 0, k0 = uint64(seed), k1 = 0;
  UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64 first = 0xd2e7470ee14c6c93ull, second = 0xca5a826395121157ull;
    const uint64 c0_next = upper_product(second, c2) ^ c1 ^ k0, c2_next = upper_product(first, c0) ^ c3 ^ k1;
    c1 = second * c2;
    c3 = first * c0;
    c0 = c0_next;
    c2 = c2_next;
    k0 += 0x9e3779b97f4a7c15ull;
    k1 += 0xbb67ae8584caa73bull;
  }
  return {{uint32(c0), uint32(c0 >> 32), uint32(c1), uint32(c1 >> 32), uint32(c2), uint32(c2 >> 32), uint32(c3),
           uint32(c3 >> 32)}};
}

// The random bits of the i-th of the block's ids.
struct Bits {
  Words8 upper, lower;
  DEVICE uint32 of(int i) const {
    const uint32 high = upper.at(i / 2), low = lower.at(i / 2);
    return i % 2 ? (high & 0xffff0000u) | low >> 16 : high << 16 | (low & 0xffffu);
  }
};
DEVICE Bits random_bits(int64 seed, uint32 position, int block) {
  return {philox(seed, position, uint32(block), 0), philox(seed, position, uint32(block), 1)};
}

// 32 random bits as a float strictly between 0 and 1; the product is exact, so fused is as good as unfused.
DEVICE float unit_float(uint32 bits) {
  const float spread = fused_multiply_add(float(bits), 0x1p-32f, 0x1p-33f);
  return spread < 0x1.fffffep-1f ? spread : 0x1.fffffep-1f;
}

// ---- Bounds of scores, in powers of two and without the best logit: found while that is still looked for, by the upper
// half of the bits alone. Since g < -ln(v), log2(v) >= log2(half) - 16, and a logarithm is above what the bits of a float
// say, linear between powers of two, they are bounds from above; of half 0, which says little, too.
DEVICE float score_scale(float temperature) { return 0x1.715476p+0f / temperature; }
DEVICE float score_bound(float logit, float scale, uint32 half) {
  const float exact = float_of(0x4b000000u | half) - 0x1p23f;
  return fused_multiply_add(logit, scale, fused_multiply_add(float(int(bits_of(exact))), -0x1p-23f, 143.0f));
}

// The best score x + g and its id.
struct Draw {
  double score;
  int id;
  // g = -ln(-ln(1 - v)) in double, as the definition has it. Since -ln(1 - v) > v, x - ln(v) bounds it from above: few
  // tokens need more. The winner's bound errs by less than 1e-5.
  DEVICE void see(int at, float x, float v) {
    if (x - logarithm(v) + 1e-3f < float(score)) return;
    const double value = double(x) - logarithm(-logarithm(1.0 - double(v)));
    if (value > score || (value == score && uint32(at) < uint32(id))) {
      score = value;
      id = at;
    }
  }
};
DEVICE Draw better_draw(const Draw& a, const Draw& b) {
  return a.score > b.score || (a.score == b.score && uint32(a.id) < uint32(b.id)) ? a : b;
}
DEVICE Draw no_draw() { return {-double(float_of(INFINITE)), -1}; }
// Of all lanes: the id decides between equal scores, none (-1) last.
DEVICE Draw warp_draw(Draw mine) {
  UNROLL
  for (int apart = WARP / 2; apart > 0; apart /= 2) {
    mine = better_draw(mine, {shuffle_xor(mine.score, apart), shuffle_xor(mine.id, apart)});
  }
  return mine;
}
// Of all threads; every one gets it. Between two calls there must be a sync_block().
DEVICE Draw block_draw(Draw mine) {
  SHARED_ARRAY(Draw, parts, MOST_WARPS);
  mine = warp_draw(mine);
  if (lane_index() == 0) parts[warp_index()] = mine;
  sync_block();
  return warp_draw(parts[lane_index() < warp_count() ? lane_index() : 0]);
}

// The best draw among those of the row's tokens from the cut on that this thread has.
DEVICE Draw draw_all(const Row& row, const Parameters& p, uint32 position, float best, uint64 cut) {
  Draw draw = no_draw();
  NO_UNROLL
  for (int first = BLOCK_IDS * thread_index(); first < row.limit; first += BLOCK_IDS * thread_count()) {
    uint32 kept = 0;
    NO_UNROLL
    for (int part = 0; part < BLOCK_IDS && first + part < row.limit; part += 4) {
      const Four four = row.four(first + part);
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const int id = first + part + i;
        if (id < row.limit && rank_of(four.at[i], id) >= cut) kept |= 1u << (part + i);
      }
    }
    if (kept == 0) continue;
    const Bits bits = random_bits(p.seed, position, first / BLOCK_IDS);
    NO_UNROLL
    for (; kept != 0; kept &= kept - 1) {
      const int i = lowest_bit(kept);
      draw.see(first + i, scaled(row.one(first + i), best, p.temperature), unit_float(bits.of(i)));
    }
  }
  return draw;
}

DEVICE void see_token(Draw& draw, const Parameters& p, uint32 position, float best, int id, float logit) {
  const Bits bits = random_bits(p.seed, position, id / BLOCK_IDS);
  draw.see(id, scaled(logit, best, p.temperature), unit_float(bits.of(id % BLOCK_IDS)));
}

// ---- The cut of step 4, and the draw.
// Top_k goes first, and top_p by mass in what that leaves.
DEVICE Weights weights_of(const Parameters& p, float best, bool by_mass) {
  return {by_mass, best, p.temperature, p.top_p, p.top_k};
}
DEVICE Weights raw_weights(const Parameters& p, float best) { return {false, best, 1.0f, 1.0, p.logprobs}; }

// The rank from which on top_k and top_p keep tokens, of those from `lowest` on; NO_CUT where these lack mass.
DEVICE uint64 kept_from(Search& search, Ranks& ranks, const Parameters& p, float best, uint64 lowest, uint64 mass,
                        const Histogram* counted) {
  const bool by_count = cuts_by_count(p, ranks.row.limit);
  uint64 cut = lowest;
  NO_UNROLL
  for (int step = by_count ? 0 : 1; step < (p.top_p < 1.0 ? 2 : 1); ++step) {
    const Weights weights = weights_of(p, best, step == 1);
    const uint64 found = cut_of(search, ranks, cut, weights, by_count ? 0 : weights.wanted(mass), counted);
    if (found == NO_CUT && step == 1) return NO_CUT;
    if (found != NO_CUT) cut = found;
    counted = nullptr;
  }
  return cut;
}

// Of a row without top_k and top_p: what is kept of the groups of tokens that can have the best score is not less.
DEVICE float least_bound(const Workspace& work, const Row& row, const Parameters& p, uint32 position, float scale,
                         const State& state) {
  const float best = logit_of(state.best), top = best * scale;
  Best highest;
  NO_UNROLL
  for (int group = thread_index(); group < groups_of(row.limit); group += thread_count()) {
    highest.see(group, work.maxima[group]);
  }
  // The score of one of the best, and so the best one's at least: the best token is kept whatever min_p takes away.
  const int leader = id_of(block_joined(highest.rank(), larger_rank));
  const int id = GROUP * (thread_index() < GROUP ? leader : id_of(state.best)) + thread_index() % GROUP;
  Draw draw = no_draw();
  if (thread_index() < 2 * GROUP && id < row.limit) {
    const float logit = row.one(id);
    if (rank_of(logit, id) >= state.cut) see_token(draw, p, position, best, id, logit);
  }
  draw = block_draw(draw);
  // What rounding does to bounds of tokens that are near the best one, and more.
  const float error = (larger(top, -top) + 64.0f) * 0x1p-20f + 0x1p-6f;
  return float(draw.score * 0x1.71547652b82fep+0 + double(best) * double(scale)) - error;
}

// Finds the cut of a row and draws; leaves the cut in `state`.
DEVICE Draw pick(Search& search, const Workspace& work, const Row& row, const Parameters& p, uint32 position,
                 State& state) {
  const float best = logit_of(state.best), scale = score_scale(p.temperature), top = best * scale;
  const bool few = is_short(p, row.limit), all = !selects(p, row.limit);
  Ranks ranks = whole_row(row);
  uint64 lowest = state.cut;
  bool is_cut = all;
  if (state.mode & OPEN && (few || (all && larger(top, -top) < 0x1p20f))) {
    float least = 0.0f;
    if (all) {
      least = least_bound(work, row, p, position, scale, state);
    } else {
      if (row.limit > LISTED) lowest = bound_of_few(search, work.maxima, groups_of(row.limit), p.top_k, lowest);
      least = logit_of(lowest);
    }
    const bool whole = gather(search, ranks, work.maxima, groups_of(row.limit), least, lowest);
    state.bounds[0] = lowest;
    state.listed[0] = search.listed;
    if (whole && few && search.listed <= FEW) {
      state.cut = cut_of_few(search, weights_of(p, best, true), p.top_k);
      is_cut = true;
    }
    if (!whole) lowest = state.cut;
  } else if (state.mode & LISTS && !(state.mode & FLAT)) {
    take_list(search, ranks, work.list, state.listed[0], LONG_LIST, state.bounds[0]);
    if (ranks.far != nullptr) lowest = state.bounds[0];
  }
  NO_UNROLL
  while (!is_cut) {
    const Histogram* counted = state.mode & FLAT ? work.histogram : nullptr;
    const uint64 found = kept_from(search, ranks, p, best, lowest, state.mass, counted);
    is_cut = found != NO_CUT || lowest == state.cut;
    if (is_cut) {
      state.cut = found;
    } else {
      ranks = whole_row(row);
      lowest = state.cut;
    }
  }
  if (!has_list(ranks, state.cut)) return draw_all(row, p, position, best, state.cut);
  Draw draw = no_draw();
  visit_list(search, ranks, state.cut,
             [&](uint64 rank) { see_token(draw, p, position, best, id_of(rank), logit_of(rank)); });
  return draw;
}
