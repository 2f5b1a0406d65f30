// A row as it is drawn from: steps 1 and 2 of rvllm/sampling/sampler.py, made anew wherever a logit is looked at.
//
// A slot's bits are PLANES arrays of ceil(vocab / 32) u32, bit id % 32 of word id / 32 for each id: in the prompt, in the
// output, with a bias, forbidden (by min_tokens), barred (by a bad word).
#pragma once

#include "sample.cuh"

enum : int { IN_PROMPT = 0, IN_OUTPUT = 1, WITH_BIAS = 2, IS_FORBIDDEN = 3, IS_BARRED = 4, PLANES = 5 };

DEVICE int words_of(int vocab) { return (vocab + 31) / 32; }
DEVICE bool has_bit(const uint32* plane, int id) { return plane[id / 32] >> (id % 32) & 1; }
// The place of the lowest bit that is set: a power of two as a float is exact.
DEVICE int lowest_bit(uint32 bits) { return int(bits_of(float(bits & (0u - bits))) >> 23) - 127; }

// Ids whose logits are changed, and ids that the mask leaves; 32 of them.
DEVICE uint32 edited_bits(const Parameters& p, int word, int words) {
  const uint32* at = p.bits + word;
  uint32 bits = 0;
  if (p.edits & PENALISED) bits |= at[IN_PROMPT * words] | at[IN_OUTPUT * words];
  if (p.edits & BIASED) bits |= at[WITH_BIAS * words];
  if (p.edits & FORBIDDEN) bits |= at[IS_FORBIDDEN * words];
  if (p.edits & BARRED) bits |= at[IS_BARRED * words];
  return bits;
}
DEVICE uint32 allowed_bits(const Parameters& p, int word) { return p.mask == nullptr ? ~0u : p.mask[word]; }

// Step 2 for a logit that the prompt or the output holds, `count` times the output. Each operation is rounded.
DEVICE float penalised(const Parameters& p, float logit, uint32 count) {
  logit = logit > 0.0f ? logit / p.repetition : logit * p.repetition;
  if (count == 0) return logit;
  logit -= p.frequency * float(count);
  return logit - p.presence;
}

struct Edited {
  float logit;  // of a forbidden id as if it were not
  bool forbidden;
  bool open;  // it is not, and before penalties its logit is above -inf
};
// A logit of an id that the mask leaves.
DEVICE Edited edit(const Parameters& p, int id, float logit, int words) {
  bool prompt = false, output = false, forbidden = false;
  uint32 count = 0;
  if (p.edits & PENALISED) {
    prompt = has_bit(p.bits + IN_PROMPT * words, id);
    output = has_bit(p.bits + IN_OUTPUT * words, id);
    count = p.counts[id];  // read before it is known to mean something: one wait for all
  }
  if (p.edits & FORBIDDEN) forbidden = has_bit(p.bits + IS_FORBIDDEN * words, id);
  if (p.edits & BARRED) forbidden |= has_bit(p.bits + IS_BARRED * words, id);
  if (p.edits & BIASED && has_bit(p.bits + WITH_BIAS * words, id)) logit += p.bias[id];
  const bool open = !forbidden && logit > minus_infinite();
  if (prompt || output) logit = penalised(p, logit, output ? count : 0);
  return {logit, forbidden, open};
}

DEVICE bool is_edited(const Parameters& p) { return p.edits != 0 || p.mask != nullptr; }

// The logits of a row below `limit`, changed by what `p` says where it says so; `open`: forbidden ids become -inf. The
// parameters are kept by value: an address of them would put them into memory.
struct Row {
  const float* raw;
  int vocab, limit;
  bool edited, open;
  Parameters p;

  DEVICE Four changed(Four four, int first) const {
    if (!edited) return four;
    const int words = words_of(vocab);
    const uint32 allowed = allowed_bits(p, first / 32) >> (first % 32) & 15u;
    const uint32 exist = limit - first < 4 ? (1u << (limit - first)) - 1 : 15u;  // others have no counts, either
    const uint32 some = edited_bits(p, first / 32, words) >> (first % 32) & allowed & exist;
    UNROLL
    for (int i = 0; i < 4; ++i) {
      if (!(allowed >> i & 1)) four.at[i] = minus_infinite();
    }
    if (some == 0) return four;
    NO_UNROLL
    for (int i = 0; i < 4; ++i) {  // turned on by one each time: a place that is not known would be in memory
      float logit = four.at[0];
      if (some >> i & 1) {
        const Edited one = edit(p, first + i, logit, words);
        logit = open && one.forbidden ? minus_infinite() : one.logit;
      }
      four = {{four.at[1], four.at[2], four.at[3], logit}};
    }
    return four;
  }
  DEVICE Four four(int first) const { return changed(load_four(raw, first, limit, vocab % 4 == 0), first); }
  DEVICE float one(int id) const {
    const Four four = this->four(id & ~3);
    const float low = id & 1 ? four.at[1] : four.at[0], high = id & 1 ? four.at[3] : four.at[2];
    return id & 2 ? high : low;
  }

  // visit(id, logit) for this thread's part of [begin, end), ids ascending; begin is a multiple of four. LOADS are under
  // way at once.
  template <int LOADS, typename Visit>
  DEVICE void visit(int begin, int end, Visit visit) const {
    const int apart = 4 * thread_count();
    NO_UNROLL
    for (int start = begin + 4 * thread_index(); start < end; start += LOADS * apart) {
      Four fours[LOADS] = {};
      UNROLL
      for (int j = 0; j < LOADS; ++j) {
        if (start + j * apart < end) fours[j] = load_four(raw, start + j * apart, limit, vocab % 4 == 0);
      }
      UNROLL
      for (int j = 0; j < LOADS; ++j) {
        const int first = start + j * apart;
        if (first >= end) continue;
        const Four four = changed(fours[j], first);
        UNROLL
        for (int i = 0; i < 4; ++i) {
          if (first + i < end) visit(first + i, four.at[i]);
        }
      }
    }
  }

  // The same of all of the row, with less code and at less speed.
  template <typename Visit>
  DEVICE void visit_all(Visit visit) const {
    NO_UNROLL
    for (int first = 4 * thread_index(); first < limit; first += 4 * thread_count()) {
      Four rest = four(first);
      NO_UNROLL
      for (int i = 0; i < 4 && first + i < limit; ++i) {
        visit(first + i, rest.at[0]);
        rest = {{rest.at[1], rest.at[2], rest.at[3], 0.0f}};
      }
    }
  }
};
DEVICE Row raw_row(const float* raw, int vocab, int limit) { return {raw, vocab, limit, false, false, {}}; }
DEVICE Row changed_row(const float* raw, int vocab, int limit, const Parameters& p, bool open) {
  return {raw, vocab, limit, is_edited(p), open, p};
}

// Counts a drawn token in its slot; one thread of the row.
DEVICE void count_token(const Parameters& p, int token, int words) {
  if (!(p.edits & PENALISED) || token < 0) return;
  uint32& output = p.bits[IN_OUTPUT * words + token / 32];
  const uint32 bit = 1u << (token % 32);
  p.counts[token] = output & bit ? p.counts[token] + 1 : 1;
  output |= bit;
}
