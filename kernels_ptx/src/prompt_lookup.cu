// prompt_lookup: what a step has guessed right is taken over, and the next one's guesses are made: `accepted` and
// `lookup` of rvllm/sampling/lookup.py, for every sequence of a step that verifies guesses.
//
// places (sequences, 3) i32: a sequence's first row, its room r for guesses, and which past is its own. Its rows are
//   first .. first + r: its last token, then its guesses. With r = 0 it has no past, and its token is moved on.
// state (sequences, 2) i32: how many tokens it has, all but the one to draw, and how many of its guesses count; both are
//   the next step's afterwards.
// pasts (pasts, longest_past) i32: its tokens, to which those that are now sure are added.
// drawn (rows) i32: what was drawn behind each row's token.
// ids (rows) i32: the step's tokens, then those of the next one. Rows beyond the guesses that count have the last token.
// kv_lengths (rows) i32, positions (rows) u32: written for the next step, the former less one, as begin_step wants them.
// told (sequences + rows) i32, for the host: how many of each sequence's guesses count in the next step, and its ids.
// launch: grid (sequences), block a multiple of 32 up to 1024, no dynamic shared memory.
// bound: latency; 4 bytes a token of the past.
// assumes: guesses that count <= r <= 31; 1 <= shortest <= longest; a past has room for r + 1 more tokens.
// tiers: t70
#include "reduce.cuh"

enum : int { FIRST = 0, ROOM = 1, PAST = 2, PLACE_WORDS = 3, LENGTH = 0, GUESSED = 1, STATE_WORDS = 2 };

// Leading guesses, the tokens behind the first, that are what was drawn before them; the same in every lane.
DEVICE int accepted(const int* ids, const int* drawn, int guessed) {
  const int lane = lane_index();
  const bool right = lane < guessed && ids[lane + 1] == drawn[lane];
  const uint32 wrong = lanes_where(!right);
  int count = 0;
  while (!(wrong >> count & 1)) ++count;  // the last lane has no guess
  return count;
}

// Of the places that the past's last tokens stand before, where the most of them do, and of those the last: how many in
// the upper half, and behind how many tokens in the lower. 0: nowhere `shortest` of them do.
DEVICE uint64 best_place(const int* past, int length, int shortest, int longest) {
  enum : int { AHEAD = 4 };
  const int last = past[length - 1];
  uint64 best = 0;
  NO_UNROLL
  for (int first = 1 + thread_index(); first < length; first += AHEAD * thread_count()) {
    int tokens[AHEAD];
    UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      const int end = first + i * thread_count();
      tokens[i] = past[(end < length ? end : length) - 1];
    }
    UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      const int end = first + i * thread_count();
      if (end >= length || tokens[i] != last) continue;
      const int most = longest < end ? longest : end;
      int size = 1;
      while (size < most && past[end - 1 - size] == past[length - 1 - size]) ++size;
      const uint64 found = uint64(size) << 32 | uint32(end);
      if (size >= shortest && found > best) best = found;
    }
  }
  return block_joined(best, [](uint64 a, uint64 b) { return a > b ? a : b; });
}

KERNEL(1024)
void prompt_lookup_i32(const int* places, int* state, int* pasts, const int* drawn, int* ids, int* kv_lengths,
                       uint32* positions, int* told, int sequences, int longest_past, int shortest, int longest) {
  begin_grid();
  const int sequence = block_x();
  const int *place = places + PLACE_WORDS * sequence, first = place[FIRST], room = place[ROOM];
  int *own = state + STATE_WORDS * sequence, *past = pasts + int64(place[PAST]) * longest_past;
  const int right = accepted(ids + first, drawn + first, own[GUESSED]), before = own[LENGTH];
  const int length = before + right + 1, last = drawn[first + right];
  if (room > 0 && thread_index() <= right) past[before + thread_index()] = drawn[first + thread_index()];
  sync_block();
  const uint64 best = room > 0 ? best_place(past, length, shortest, longest) : 0;
  const int end = int(uint32(best)), apart = length - end, guessed = best == 0 ? 0 : room;
  if (thread_index() <= room) {
    const int at = thread_index(), row = first + at;
    const int id = at == 0 || best == 0 ? last : past[end + (at - 1) % apart];
    ids[row] = id;
    told[sequences + row] = id;
    kv_lengths[row] = length + at - 1;
    positions[row] = uint32(length + at);
  }
  if (thread_index() > 0) return;
  own[LENGTH] = length;
  own[GUESSED] = guessed;
  told[sequence] = guessed;
}
