// Step 5: Gumbel-max with random numbers that depend on seed, position and id alone (rvllm/sampling/philox.py).
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
