// begin_step: what a step's kernels read of its sequences, from what the host sent, or from the step before.
//
// message i32: fresh, sequences n, decodes, tokens, rows, columns, 0, 0. Then, of a fresh step, kv_lengths (n), floors
//   (n), query_starts (n + 1), rows (rows), ids (tokens). Then the block tables (groups, n, columns), or with 0 columns
//   none: they are what they were. The first `decodes` sequences bring one token. Of a step that is not fresh, every
//   sequence brings the token after its last, and ids has it already.
// Out, of i32: ids, positions, lengths, slots (tokens), lengths being max(position + 1, the sequence's floor);
//   kv_lengths, floors (sequences), query_starts (sequences + 1), rows (most_rows), block_tables (sequences,
//   max_blocks); decode_work, the splits of sequences that bring one token, and prefill_work, the tokens of those that
//   bring more, those that see the most keys first: lists of attention_work.cuh. Then the message is that of a step
//   which follows with the same tables: so a launch with no message before it advances the step before.
// Padding: tokens get id 0, position 0, length 0 and slot -1, rows get 0. No list has an item of it.
// launch: grid (1), block a multiple of 32 up to 1024, no dynamic shared memory. One launch a cache group in order of
//   their numbers; slots, block_tables, decode_work and window are the group's.
// tokens, sequences: of the bucket, at least the step's. pieces: items of decode_work that fill the GPU; it gets at most
//   pieces + sequences, and prefill_work at most prefill_room, behind which it has room for as many again.
//   prefill_room 0: every token of a sequence that brings more is an item of decode_work, with all its splits, so that its
//   bits are those it has where it is the one that its sequence brings; then it gets at most pieces + tokens.
// bound: latency.
// assumes: block_size 16, 32 or 64; every page of a token is in its sequence's table; 16-byte aligned lists.
// tiers: t70 t90
#include "attention_splits.cuh"
#include "attention_work.cuh"

enum : int { HEAD_WORDS = 8, FRESH = 0, SEQUENCES = 1, DECODES = 2, TOKENS = 3, MESSAGE_ROWS = 4, COLUMNS = 5 };

struct Message {
  const int* words;
  bool fresh;
  int sequences, decodes, tokens, rows, columns;

  DEVICE explicit Message(const int* words)
      : words(words),
        fresh(words[FRESH] != 0),
        sequences(words[SEQUENCES]),
        decodes(fresh ? words[DECODES] : sequences),
        tokens(fresh ? words[TOKENS] : sequences),
        rows(fresh ? words[MESSAGE_ROWS] : sequences),
        columns(words[COLUMNS]) {}

  DEVICE const int* kv_lengths() const { return words + HEAD_WORDS; }
  DEVICE const int* floors() const { return kv_lengths() + sequences; }
  DEVICE const int* query_starts() const { return floors() + sequences; }
  DEVICE const int* wanted_rows() const { return query_starts() + sequences + 1; }
  DEVICE const int* ids() const { return wanted_rows() + rows; }
  DEVICE const int* table(int group) const {
    return (fresh ? ids() + tokens : words + HEAD_WORDS) + int64(group) * sequences * columns;
  }
};

// What the groups share.
struct Shared {
  int *ids, *positions, *lengths, *kv_lengths, *floors, *query_starts, *rows, *prefill_work;
};

struct Group {
  int *slots, *block_tables, *decode_work;
  int number, window;
};

struct Sizes {
  int tokens, most_rows, max_blocks, block_size, pieces, prefill_room;
};

// Take over what the host says of the sequences, or move each one token on.
DEVICE void take_sequences(const Message& message, const Shared& to, const Sizes& sizes) {
  const int n = message.sequences;
  for (int i = thread_index(); i <= n; i += thread_count()) {
    to.query_starts[i] = message.fresh ? message.query_starts()[i] : i;
    if (i == n) break;
    to.kv_lengths[i] = message.fresh ? message.kv_lengths()[i] : to.kv_lengths[i] + 1;
    if (message.fresh) to.floors[i] = message.floors()[i];
  }
  for (int i = thread_index(); i < sizes.most_rows; i += thread_count()) {
    to.rows[i] = i >= message.rows ? 0 : message.fresh ? message.wanted_rows()[i] : i;
  }
  for (int i = thread_index(); i < sizes.tokens; i += thread_count()) {
    if (i >= message.tokens) {
      to.ids[i] = 0;
    } else if (message.fresh) {
      to.ids[i] = message.ids()[i];
    }
  }
}

DEVICE void take_table(const Message& message, const Group& group, int max_blocks) {
  enum : int { AHEAD = 4 };
  const int* from = message.table(group.number);
  const int count = message.sequences * message.columns;
  NO_UNROLL
  for (int first = thread_index(); first < count; first += AHEAD * thread_count()) {
    int words[AHEAD];
    UNROLL
    for (int i = 0; i < AHEAD; ++i) words[i] = from[smaller_int(first + i * thread_count(), count - 1)];
    UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      const int at = first + i * thread_count();
      if (at < count) group.block_tables[int64(at / message.columns) * max_blocks + at % message.columns] = words[i];
    }
  }
}

// The sequence that brings a token; query_starts[sequence] <= token < query_starts[sequence + 1].
DEVICE int owner_of(int token, const Message& message, const int* query_starts) {
  if (token < message.decodes) return token;
  int low = message.decodes, high = message.sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (query_starts[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

DEVICE void place_tokens(const Message& message, const Shared& shared, const Group& group, const Sizes& sizes) {
  for (int token = thread_index(); token < sizes.tokens; token += thread_count()) {
    int position = 0, length = 0, slot = -1;
    if (token < message.tokens) {
      const int sequence = owner_of(token, message, shared.query_starts);
      position = shared.kv_lengths[sequence] - shared.query_starts[sequence + 1] + token;
      length = larger_int(position + 1, shared.floors[sequence]);
      const int page = position / sizes.block_size;
      const int* table = group.block_tables + int64(sequence) * sizes.max_blocks;
      slot = page < sizes.max_blocks ? table[page] * sizes.block_size + position % sizes.block_size : -1;
    }
    group.slots[token] = slot;
    if (group.number > 0) continue;
    shared.positions[token] = position;
    shared.lengths[token] = length;
  }
}

// The sum of `value` over the threads before this one, and in `total` over all. Between two calls there must be a
// sync_block().
DEVICE int sum_before(int value, int& total) {
  SHARED_ARRAY(int, sums, WARP);
  int upto = value;
  UNROLL
  for (int apart = 1; apart < WARP; apart *= 2) {
    const int lower = shuffle(upto, lane_index() - apart);
    if (lane_index() >= apart) upto += lower;
  }
  if (lane_index() == WARP - 1) sums[warp_index()] = upto;
  sync_block();
  int before = 0;
  total = 0;
  NO_UNROLL
  for (int warp = 0; warp < warp_count(); ++warp) {
    if (warp < warp_index()) before += sums[warp];
    total += sums[warp];
  }
  return before + upto - value;
}

// Rows of a step whose bits depend on no other; rows of one sequence in a step, each of which decodes, at most. Multiples
// of that many keys are splits.
enum : int { ROWS_ALONE = 64, ROWS_OF_A_SEQUENCE = 32, CHUNK_UNIT = 64 };

DEVICE int seen_keys(int kv_length, int window) { return kv_length - first_seen(kv_length - 1, window); }

// The keys of a split at least. Of many rows, so many that whole splits fill the GPU once; a little more, lest every row
// leaves a small rest.
DEVICE int chunk_of_many(int keys, int pieces) {
  const int share = keys / pieces, chunk = share + share / 8;
  return larger_int(SMALLEST_CHUNK, (chunk + CHUNK_UNIT - 1) / CHUNK_UNIT * CHUNK_UNIT);
}

// As many items a sequence as are its keys' share of `pieces`, if it has so many splits; one at least. The last of each,
// which may be short, comes behind all that are not. The number of items.
DEVICE int list_decodes(const int* kv_lengths, int decodes, int window, int smallest, int keys, int pieces, int* work) {
  int listed = 0;
  NO_UNROLL
  for (int last = 0; last < 2; ++last) {
    NO_UNROLL
    for (int from = 0; from < decodes; from += thread_count()) {
      const int sequence = from + thread_index();
      int kv_length = 0, splits = 0, items = 0;
      if (sequence < decodes) {
        kv_length = kv_lengths[sequence];
        splits = splits_of(kv_length, window, smallest).count;
        const int share = int(int64(seen_keys(kv_length, window)) * pieces / keys);
        items = larger_int(1, smaller_int(splits, share));
      }
      const int first = last ? larger_int(0, items - 1) : 0, end = last ? items : items - 1;
      int total;
      const int place = listed + sum_before(larger_int(0, end - first), total);
      for (int i = first; i < end; ++i) {
        put_item(work, place + i - first,
                 DecodeItem{sequence, sequence, kv_length, splits * i / items, splits * (i + 1) / items,
                            ROWS_OF_A_SEQUENCE});
      }
      listed += total;
      sync_block();
    }
  }
  return listed;
}

// An item for each token of the sequences that bring more than one, behind the `listed` ones. Of a sequence's, those
// that see the most keys come first.
DEVICE void list_tokens(const Message& message, const Shared& shared, int window, int listed, int* work) {
  NO_UNROLL
  for (int token = message.decodes + thread_index(); token < message.tokens; token += thread_count()) {
    const int sequence = owner_of(token, message, shared.query_starts);
    const int length = shared.kv_lengths[sequence] - shared.query_starts[sequence + 1] + token + 1;
    put_item(work, listed + message.tokens - 1 - token,
             DecodeItem{token, sequence, length, 0, splits_of(length, window, SMALLEST_CHUNK).count,
                        token - shared.query_starts[sequence] + 1});
  }
}

// Where an item goes among `count`: those that see more keys come first, and of equals the earlier one.
DEVICE int rank_of(int own, int keys, const int* unsorted, int count) {
  int rank = 0;
  NO_UNROLL
  for (int i = 0; i < count; ++i) {
    const int other = prefill_item(unsorted, i).keys();
    rank += other > keys || (other == keys && i < own);
  }
  return rank;
}

DEVICE void list_prefills(const Shared& shared, int decodes, int sequences, int room) {
  int* unsorted = shared.prefill_work + ITEM_WORDS * room;
  int listed = 0;
  NO_UNROLL
  for (int from = decodes; from < sequences; from += thread_count()) {
    const int sequence = from + thread_index();
    int row = 0, count = 0;
    if (sequence < sequences) {
      row = shared.query_starts[sequence];
      count = shared.query_starts[sequence + 1] - row;
    }
    int total;
    const int place = listed + sum_before((count + QUERIES - 1) / QUERIES, total);
    for (int first = 0; first < count; first += QUERIES) {
      const int rows = smaller_int(QUERIES, count - first);
      const int position = shared.kv_lengths[sequence] - count + first;
      put_item(unsorted, place + first / QUERIES, PrefillItem{row + first, rows, position, sequence});
    }
    listed += total;
    sync_block();
  }
  for (int i = thread_index(); i < listed; i += thread_count()) {
    const PrefillItem item = prefill_item(unsorted, i);
    put_item(shared.prefill_work, rank_of(i, item.keys(), unsorted, listed), item);
  }
  if (thread_index() == 0) shared.prefill_work[0] = listed;
}

KERNEL(1024)
void begin_step_i32(int* message, int* ids, int* positions, int* lengths, int* kv_lengths, int* floors,
                    int* query_starts, int* rows, int* prefill_work, int* slots, int* block_tables, int* decode_work,
                    int group, int groups, int window, int tokens, int most_rows, int max_blocks, int block_size,
                    int pieces, int prefill_room) {
  begin_grid();
  const Message sent(message);
  const Shared shared = {ids, positions, lengths, kv_lengths, floors, query_starts, rows, prefill_work};
  const Group own = {slots, block_tables, decode_work, group, window};
  const Sizes sizes = {tokens, most_rows, max_blocks, block_size, pieces, prefill_room};
  if (group == 0) take_sequences(sent, shared, sizes);
  take_table(sent, own, max_blocks);
  sync_block();
  place_tokens(sent, shared, own, sizes);
  int own_keys = 0, keys;
  for (int i = thread_index(); i < sent.decodes; i += thread_count()) own_keys += seen_keys(kv_lengths[i], window);
  sum_before(own_keys, keys);
  sync_block();
  const bool alone = prefill_room == 0 || sent.decodes <= ROWS_ALONE;
  const int smallest = alone ? int(SMALLEST_CHUNK) : chunk_of_many(keys, pieces);
  int listed = list_decodes(kv_lengths, sent.decodes, window, smallest, keys, pieces, decode_work);
  if (prefill_room == 0) {
    list_tokens(sent, shared, window, listed, decode_work);
    listed += sent.tokens - sent.decodes;
  } else if (group == 0) {
    list_prefills(shared, sent.decodes, sent.sequences, prefill_room);
  }
  if (thread_index() == 0) {
    decode_work[0] = listed;
    decode_work[1] = smallest;
  }
  sync_block();
  if (group < groups - 1 || thread_index() > 0) return;
  message[FRESH] = 0;
  message[COLUMNS] = 0;
}
