// The lists from which the blocks of attention take their work. begin_step makes them.
//
// A list is a word with the number of its items, of decoding one with the keys of a split at least (attention_splits.cuh),
// two of nothing, and the items, of four words each. It has room for an item a block, so that a block may read its
// first one before it knows whether that is there.
#pragma once

#include "intrinsics.cuh"

// Words of an item; new tokens of a sequence that a block of attention_prefill takes at most.
enum : int { ITEM_WORDS = 4, QUERIES = 64 };

// The splits [first, end) of a sequence's first kv_length keys, for the query of the last of them: row `row` of the step.
// This step writes none but the last `fresh` of those keys, if so many.
struct DecodeItem {
  int row, sequence, kv_length, first, end, fresh;
};

// New tokens of a sequence: rows [row, row + rows) of the step, at `position` and after.
struct PrefillItem {
  int row, rows, position, sequence;

  DEVICE int keys() const { return position + rows; }  // how many the last one sees, without a window
};

DEVICE int item_count(const int* work) { return work[0]; }
DEVICE int smallest_chunk(const int* work) { return work[1]; }

DEVICE DecodeItem decode_item(const int* work, int index) {
  const Words4 words = load_words4(work + ITEM_WORDS * (1 + index));
  const uint32 packed = words.word[3];
  return {int(words.word[0]),  int(words.word[1]),       int(words.word[2]),
          int(packed & 0x3fu), int(packed >> 6 & 0x3fu), int(packed >> 12)};
}

DEVICE PrefillItem prefill_item(const int* work, int index) {
  const Words4 words = load_words4(work + ITEM_WORDS * (1 + index));
  return {int(words.word[0]), int(words.word[1]), int(words.word[2]), int(words.word[3])};
}

DEVICE void put_item(int* work, int index, const DecodeItem& item) {
  store_words4(work + ITEM_WORDS * (1 + index), {{uint32(item.row), uint32(item.sequence), uint32(item.kv_length),
                                                  uint32(item.first | item.end << 6) | uint32(item.fresh) << 12}});
}

DEVICE void put_item(int* work, int index, const PrefillItem& item) {
  store_words4(work + ITEM_WORDS * (1 + index),
               {{uint32(item.row), uint32(item.rows), uint32(item.position), uint32(item.sequence)}});
}
