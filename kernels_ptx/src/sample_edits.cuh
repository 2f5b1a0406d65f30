// A row as it is drawn from: steps 1 and 2 of rvllm/sampling/sampler.py, made anew wherever a logit is looked at.
//
// A slot's bits are PLANES arrays of ceil(vocab / 32) u32, bit id % 32 of word id / 32 for each id: in the prompt, in the
// output, with a bias, forbidden (by min_tokens), barred (by a bad word).
#pragma once

#include "sample.cuh"

enum : int { IN_PROMPT = 0, IN_OUTPUT = 1, WITH_BIAS = 2, IS_FORBIDDEN = 3, IS_BARRED = 4, PLANES = 5 };

DEVICE int words_of(int vocab) { return (vocab + 31) / 32; }
// The bits of ids first..first + 3; first is a multiple of four.
DEVICE uint32 four_bits(const uint32* plane, int first) { return plane[first / 32] >> (first % 32) & 15u; }

// Step 2 for a logit that the prompt or the output holds, `count` times the output. Each operation is rounded.
DEVICE float penalised(const Parameters& p, float logit, uint32 count) {
  logit = logit > 0.0f ? logit / p.repetition : logit * p.repetition;
  if (count == 0) return logit;
  logit -= p.frequency * float(count);
  return logit - p.presence;
}

struct Edited {
  uint32 forbidden;  // which of four ids are, their logits as if they were not
  uint32 open;       // which of the others had a logit above -inf before penalties
};
DEVICE Edited edit(Four& four, int first, const Parameters& p, int words) {
  const uint32 allowed = p.mask == nullptr ? 15u : four_bits(p.mask, first);
  uint32 prompt = 0, output = 0, biased = 0, forbidden = 0, open = 0;
  if (p.edits & PENALISED) {
    prompt = four_bits(p.bits + IN_PROMPT * words, first);
    output = four_bits(p.bits + IN_OUTPUT * words, first);
  }
  if (p.edits & BIASED) biased = four_bits(p.bits + WITH_BIAS * words, first);
  if (p.edits & FORBIDDEN) forbidden = four_bits(p.bits + IS_FORBIDDEN * words, first);
  if (p.edits & BARRED) forbidden |= four_bits(p.bits + IS_BARRED * words, first);
  UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32 bit = 1u << i;
    float logit = four.at[i];
    if (biased & bit) logit += p.bias[first + i];
    if (!(allowed & bit)) logit = minus_infinite();
    if (!(forbidden & bit) && logit > minus_infinite()) open |= bit;
    if ((prompt | output) & bit) logit = penalised(p, logit, output & bit ? p.counts[first + i] : 0);
    four.at[i] = logit;
  }
  return {forbidden, open};
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
    const uint32 forbidden = edit(four, first, p, words_of(vocab)).forbidden;
    UNROLL
    for (int i = 0; i < 4; ++i) {
      if (open && (forbidden >> i & 1)) four.at[i] = minus_infinite();
    }
    return four;
  }
  DEVICE Four four(int first) const { return changed(load_four(raw, first, limit, vocab % 4 == 0), first); }

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
