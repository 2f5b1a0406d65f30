// One block at a time of a grid, every thread a fiber: who runs next, who waits for what, and what is an error.
//
// A thread runs until it meets a barrier, a warp operation or an atomic, so the schedule decides which unsynchronised
// accesses happen first. One schedule finds what another hides: a missing barrier shows when one warp runs far ahead.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <functional>
#include <list>
#include <map>
#include <vector>

#include "fiber.h"
#include "seen.h"

namespace shim {

constexpr int MOST_THREADS = 1024;
constexpr int BARRIERS = 16;
constexpr size_t MOST_SPARE = 2;  // blocks that a library keeps: a process may have few mappings, and a stack takes two
constexpr int CANARY_BYTES = 256;     // behind the shared memory
constexpr int MOST_TURNS = 20000000;  // of one block: seconds, so a thread spins for what never comes

struct Copy {
  void* to;
  const void* from;
  int valid, bytes;
};

// A product that a warpgroup has started: this thread's part of it.
struct Product {
  float* d;
  int count;
  uint64_t a, b;
  bool brain;
};

// What was started and happens later, in groups that are waited for in their order.
template <typename T>
struct Groups {
  struct Member {
    T what;
    size_t group;
  };
  std::vector<Member> members;
  size_t open = 0;  // the group that is not yet committed
  size_t done = 0;  // members that have happened

  void clear() {
    members.clear();
    open = done = 0;
  }

  // Complete the oldest committed groups until `left` remain.
  template <typename F>
  void finish(size_t left, F happen) {
    while (done < members.size() && members[done].group + left < open) happen(members[done++].what);
    if (done < members.size()) return;
    members.clear();
    done = 0;
  }
};

struct Thread {
  Fiber fiber;
  bool finished = false;
  const char* waits_for = nullptr;  // null: it spins
  const uint32_t* word = nullptr;   // it waits until other blocks have brought this
  uint32_t least = 0;               // to so much
  Groups<Copy> copies;
  Groups<Product> products;  // of the thread's warpgroup
};

// A word on which threads wait for others and for bytes (mbarrier).
struct Arrivals {
  int count = 0, missing = 0;
  int64_t bytes = 0;  // that are expected and have not come
  uint32_t phase = 0;
};

// What the copy engine was asked for and has not yet done.
struct Box {
  void* word;
  int64_t bytes;
  std::function<void()> copy;
};

struct Barrier {
  int expected = 0;  // threads; 0: every thread of the block that has not finished
  int arrived = 0;
  std::vector<int> waiting;
};

// Where the lanes of one mask meet. Slots are doubled: a lane may already fill the next operation's while others still
// read this one's, but it cannot finish that one before they have arrived there too.
struct Meeting {
  uint32_t lanes;
  uint32_t arrived = 0;
  int turn = 0;
  const char* operation = nullptr;
  alignas(16) unsigned char slots[2][LANES][SLOT_BYTES];
};

struct Warp {
  uint32_t finished = 0;
  std::list<Meeting> meetings;  // a list, since lanes hold references across switches

  // For the next block. The places where its lanes have met stay: they are large.
  void clear() {
    finished = 0;
    for (Meeting& meeting : meetings) meeting.arrived = 0, meeting.turn = 0;
  }
};

// An array of fixed size in shared memory: one for all blocks, so that it is put away for a block that waits for others.
struct Fixed {
  void* array;
  size_t bytes;
  std::vector<unsigned char> kept;
};

// A block under way.
struct Block {
  int block[3] = {};
  Thread threads[MOST_THREADS];
  Warp warps[MOST_THREADS / LANES];
  Barrier barriers[BARRIERS];
  uint32_t runnable[MOST_THREADS / LANES] = {};
  int current = 0;
  int unfinished = 0;
  unsigned char* shared = nullptr;
  std::vector<Fixed> poisoned;  // those that this block has met
  bool late_is_there = false;
  Barrier all_late;
  std::map<void*, Arrivals> arrivals;
  std::vector<Box> boxes;
};

struct Machine {
  Launch* launch = nullptr;
  void (*kernel)(void**) = nullptr;
  void** arguments = nullptr;
  Block* now = nullptr;
  std::vector<Block*> waiting;  // for what others will do
  std::vector<Block*> spare;    // with stacks that can be used again; few between launches: see MOST_SPARE
  bool gives_way = false;
  int turns = 0;  // of the block that is there, since it last went on
  bool failed = false;
  Home home;
  uint64_t random_state = 0;
  std::vector<std::vector<unsigned char>> late;  // what is in the late memory in the end
  bool late_is_seen = false;
};

inline Machine machine;
Seen seen;

inline void run_with(Block* block) {
  machine.now = block;
  memcpy(seen.block, block->block, sizeof(seen.block));
  seen.shared = block->shared;
}

// splitmix64 (Steele, Lea and Flood 2014)
inline uint32_t random_below(uint32_t bound) {
  uint64_t z = machine.random_state += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return uint32_t((z ^ (z >> 31)) % bound);
}

inline Thread& current_thread() { return machine.now->threads[machine.now->current]; }

void let_others_run(bool for_good = false);

// End the launch with a message. Called on a fiber, it does not return.
void fail(const char* format, ...) {
  char* message = machine.launch->message;
  const size_t room = sizeof(machine.launch->message);
  int used = snprintf(message, room, "block (%d, %d, %d), thread %d: ", machine.now->block[0], machine.now->block[1],
                      machine.now->block[2], machine.now->current);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message + used, room - used, format, arguments);
  va_end(arguments);
  machine.failed = true;
  let_others_run(true);
}

inline void set_runnable(int thread) { machine.now->runnable[thread / LANES] |= 1u << thread % LANES; }

// Let others run first: another warp too, since this thread may wait for what that one does.
void yield() {
  machine.gives_way = true;
  let_others_run();
}

void need_whole_warp(const char* operation) {
  if (machine.now->warps[machine.now->current / LANES].finished != 0) fail("%s, but the warp lacks lanes", operation);
}

// ---- Barriers

inline void open_if_full(Barrier& barrier) {
  const int needed = barrier.expected ? barrier.expected : machine.now->unfinished;
  if (barrier.arrived == 0 || barrier.arrived < needed) return;
  for (int thread : barrier.waiting) set_runnable(thread);
  barrier.waiting.clear();
  barrier.arrived = 0;
}

void arrive(int id, int expected, bool waits) {
  if (id < 0 || id >= BARRIERS) fail("barrier %d does not exist", id);
  if (expected % LANES != 0) fail("barrier %d counts %d threads, which are not whole warps", id, expected);
  Barrier& barrier = machine.now->barriers[id];
  if (barrier.arrived > 0 && barrier.expected != expected) {
    fail("barrier %d counts %d threads here and %d elsewhere", id, expected, barrier.expected);
  }
  barrier.expected = expected;
  ++barrier.arrived;
  if (waits) {
    const int self = machine.now->current;
    barrier.waiting.push_back(self);
    machine.now->runnable[self / LANES] &= ~(1u << self % LANES);
  }
  open_if_full(barrier);
  if (waits) {
    current_thread().waits_for = "a barrier of the block";
    let_others_run();
    current_thread().waits_for = nullptr;
  }
}

// ---- Warp operations

inline void meet_if_complete(Warp& warp, int warp_index, Meeting& meeting) {
  if (meeting.arrived == 0 || (meeting.lanes & ~(meeting.arrived | warp.finished)) != 0) return;
  for (int lane = 0; lane < LANES; ++lane) {
    if (meeting.arrived >> lane & 1) {
      set_runnable(warp_index * LANES + lane);
    } else {
      memset(meeting.slots[meeting.turn][lane], POISON, SLOT_BYTES);
    }
  }
  meeting.arrived = 0;
  meeting.turn ^= 1;
}

// A call of memcpy for each would cost more than the copy.
inline void put(unsigned char* slot, const void* shown, int bytes) {
  const auto* from = static_cast<const unsigned char*>(shown);
  int at = 0;
  for (; at + 8 <= bytes; at += 8) __builtin_memcpy(slot + at, from + at, 8);
  for (; at + 4 <= bytes; at += 4) __builtin_memcpy(slot + at, from + at, 4);
  for (; at < bytes; ++at) slot[at] = from[at];
}

Slots meet(const char* operation, uint32_t lanes, const void* shown, int bytes) {
  const int warp_index = machine.now->current / LANES, lane = machine.now->current % LANES;
  Warp& warp = machine.now->warps[warp_index];
  if (!(lanes >> lane & 1)) fail("%s over lanes %08x, of which lane %d is none", operation, lanes, lane);
  Meeting* meeting = nullptr;
  for (Meeting& known : warp.meetings) {
    if (known.lanes == lanes) meeting = &known;
  }
  if (meeting == nullptr) {
    warp.meetings.emplace_back();
    meeting = &warp.meetings.back();
    meeting->lanes = lanes;
  }
  if (meeting->arrived != 0 && meeting->operation != operation && strcmp(meeting->operation, operation) != 0) {
    fail("%s, but other lanes of the warp are at %s", operation, meeting->operation);
  }
  const int turn = meeting->turn;
  meeting->operation = operation;
  meeting->arrived |= 1u << lane;
  put(meeting->slots[turn][lane], shown, bytes);
  machine.now->runnable[warp_index] &= ~(1u << lane);
  meet_if_complete(warp, warp_index, *meeting);
  current_thread().waits_for = operation;
  let_others_run();
  current_thread().waits_for = nullptr;
  return meeting->slots[turn];
}

// ---- Other blocks

void wait_until(const uint32_t* word, uint32_t least) {
  Thread& self = current_thread();
  while (*word < least) {
    self.word = word;
    self.least = least;
    self.waits_for = "other blocks";
    machine.now->runnable[machine.now->current / LANES] &= ~(1u << machine.now->current % LANES);
    let_others_run();
  }
  self.waits_for = nullptr;
}

// Threads of a block go on whose words have come; whether there are any.
inline bool wake(Block& block) {
  bool any = false;
  for (int thread = 0; thread < machine.launch->block; ++thread) {
    Thread& waiting = block.threads[thread];
    if (waiting.word == nullptr || *waiting.word < waiting.least) continue;
    waiting.word = nullptr;
    block.runnable[thread / LANES] |= 1u << thread % LANES;
    any = true;
  }
  return any;
}

inline bool waits_for_blocks(const Block& block) {
  for (const Thread& thread : block.threads) {
    if (thread.word != nullptr) return true;
  }
  return false;
}

// ---- What the grid before writes

inline void hide_late() {
  machine.now->late_is_there = false;
  machine.late_is_seen = false;
  const Launch& launch = *machine.launch;
  for (int i = 0; i < launch.late_count; ++i) memset(launch.late[i].at, POISON, launch.late[i].bytes);
}

inline void see_late() {
  if (machine.late_is_seen) return;
  machine.late_is_seen = true;
  const Launch& launch = *machine.launch;
  for (int i = 0; i < launch.late_count; ++i) memcpy(launch.late[i].at, machine.late[i].data(), launch.late[i].bytes);
}

inline void show_late() {
  machine.now->late_is_there = true;
  see_late();
}

// All threads of the block wait for the grid before; those that have ended count as waiting.
inline void wait_for_late() {
  const int self = machine.now->current;
  ++machine.now->all_late.arrived;
  machine.now->all_late.waiting.push_back(self);
  machine.now->runnable[self / LANES] &= ~(1u << self % LANES);
  open_if_full(machine.now->all_late);
  current_thread().waits_for = "the grid before";
  let_others_run();
  current_thread().waits_for = nullptr;
  show_late();
}

// ---- The life of a thread

inline void finish_thread() {
  Warp& warp = machine.now->warps[machine.now->current / LANES];
  current_thread().finished = true;
  current_thread().fiber.ended = true;
  warp.finished |= 1u << machine.now->current % LANES;
  machine.now->runnable[machine.now->current / LANES] &= ~(1u << machine.now->current % LANES);
  --machine.now->unfinished;
  for (Meeting& meeting : warp.meetings) meet_if_complete(warp, machine.now->current / LANES, meeting);
  for (Barrier& barrier : machine.now->barriers) {
    if (barrier.expected == 0) open_if_full(barrier);
  }
  open_if_full(machine.now->all_late);
}

inline void thread_main() {
  started(machine.home, current_thread().fiber);
  machine.kernel(machine.arguments);
  finish_thread();
  let_others_run(true);
  abort();
}

// The first runnable thread at or after `from`, upwards and around within [begin, end); -1 if there is none.
inline int next_runnable(int from, int begin, int end) {
  for (int step = 0, thread = from; step < end - begin;) {
    if (thread >= end) thread = begin;
    const uint32_t word = machine.now->runnable[thread / LANES] >> thread % LANES;
    if (word & 1) return thread;
    const int skipped = word ? __builtin_ctz(word) : LANES - thread % LANES;
    step += skipped;
    thread += skipped;
  }
  return -1;
}

inline int pick(int last, int threads) {
  switch (machine.launch->schedule) {
    case REVERSE:
      for (int step = 1; step <= threads; ++step) {
        const int thread = (last - step + 2 * threads) % threads;
        if (machine.now->runnable[thread / LANES] >> thread % LANES & 1) return thread;
      }
      return -1;
    case RANDOM:
      return next_runnable(random_below(threads), 0, threads);
    case ONE_WARP: {
      const int begin = last / LANES * LANES, end = begin + LANES < threads ? begin + LANES : threads;
      const int same_warp = machine.gives_way ? -1 : next_runnable(last, begin, end);
      machine.gives_way = false;
      return same_warp >= 0 ? same_warp : next_runnable(random_below(threads), 0, threads);
    }
    default:
      return next_runnable(last + 1 < threads ? last + 1 : 0, 0, threads);
  }
}

inline void report_deadlock(int threads) {
  int used =
      snprintf(machine.launch->message, sizeof(machine.launch->message),
               "deadlock in block (%d, %d, %d):", machine.now->block[0], machine.now->block[1], machine.now->block[2]);
  for (int thread = 0; thread < threads; ++thread) {
    const size_t room = sizeof(machine.launch->message) - used;
    if (machine.now->threads[thread].finished || room < 80) continue;
    used += snprintf(machine.launch->message + used, room, " thread %d waits for %s;", thread,
                     machine.now->threads[thread].waits_for ? machine.now->threads[thread].waits_for : "memory");
  }
  machine.failed = true;
}

inline void start_threads(int threads) {
  machine.now->unfinished = threads;
  machine.now->all_late = Barrier();
  machine.now->arrivals.clear();
  machine.now->boxes.clear();
  for (Barrier& barrier : machine.now->barriers) barrier = Barrier();
  for (Warp& warp : machine.now->warps) warp.clear();
  memset(machine.now->runnable, 0, sizeof(machine.now->runnable));
  if (threads % LANES != 0) machine.now->warps[threads / LANES].finished = ~0u << threads % LANES;
  for (int thread = 0; thread < threads; ++thread) {
    machine.now->threads[thread].finished = false;
    machine.now->threads[thread].waits_for = nullptr;
    machine.now->threads[thread].word = nullptr;
    machine.now->threads[thread].copies.clear();
    machine.now->threads[thread].products.clear();
    machine.now->threads[thread].fiber.prepare(thread_main);
    set_runnable(thread);
  }
}

// Whether the block goes on, with which thread: -1 if all wait.
inline bool goes_on(int last, int* thread) {
  if (machine.now->unfinished == 0 || machine.failed || machine.turns == MOST_TURNS) return false;
  *thread = pick(last, machine.launch->block);
  return true;
}

inline Fiber& turn_of(int thread) {
  ++machine.turns;
  machine.now->current = seen.thread = thread;
  return current_thread().fiber;
}

// Called on a fiber: to the thread whose turn it is. Where there is none, home.
void let_others_run(bool for_good) {
  Fiber& self = current_thread().fiber;
  int thread = -1;
  if (!goes_on(machine.now->current, &thread) || thread < 0) return leave(machine.home, self, for_good);
  if (Fiber& other = turn_of(thread); &other != &self) pass(machine.home, self, other, for_good);
}

// Until the block has ended, or waits for others.
inline void run_threads(int threads) {
  int thread = -1;
  machine.turns = 0;
  machine.now->current = machine.launch->schedule == REVERSE ? 0 : threads - 1;
  while (goes_on(machine.now->current, &thread)) {
    if (thread >= 0) {
      enter(machine.home, turn_of(thread));
    } else if (!wake(*machine.now)) {
      break;
    }
  }
  if (machine.now->unfinished == 0 || machine.failed) return;
  if (machine.turns == MOST_TURNS || !waits_for_blocks(*machine.now)) report_deadlock(threads);
}

#ifdef SHIM_SANITIZED
constexpr int SHARED_CANARY_BYTES = 0;  // the sanitizer sees every byte beyond the end
#else
constexpr int SHARED_CANARY_BYTES = CANARY_BYTES;
#endif

inline void retire(Block* block) {
  free(block->shared);
  machine.spare.push_back(block);
}

inline void begin_block(int64_t index) {
  if (machine.spare.empty()) machine.spare.push_back(new Block());
  machine.now = machine.spare.back();
  machine.spare.pop_back();
  const int *grid = machine.launch->grid, bytes = machine.launch->shared_bytes + SHARED_CANARY_BYTES;
  machine.now->block[0] = int(index % grid[0]);
  machine.now->block[1] = int(index / grid[0] % grid[1]);
  machine.now->block[2] = int(index / grid[0] / grid[1]);
  void* shared = nullptr;
  if (posix_memalign(&shared, 128, bytes) != 0) abort();
  memset(shared, POISON, bytes);
  machine.now->shared = static_cast<unsigned char*>(shared);
  machine.now->poisoned.clear();
  run_with(machine.now);
  start_threads(machine.launch->block);
  hide_late();
}

inline void block_failed(const char* format, long long value, long long other) {
  char* message = machine.launch->message;
  const size_t room = sizeof(machine.launch->message);
  const int* block = machine.now->block;
  const int used = snprintf(message, room, "block (%d, %d, %d) ", block[0], block[1], block[2]);
  snprintf(message + used, room - used, format, value, other);
  machine.failed = true;
}

inline void end_block() {
  const int shared_bytes = machine.launch->shared_bytes;
  if (!machine.now->boxes.empty() && !machine.failed) {
    block_failed("ended before %lld boxes had come", (long long)machine.now->boxes.size(), 0);
  }
  if (machine.launch->late_count > 0 && !machine.now->late_is_there && !machine.failed) {
    block_failed("ended before the grid before it", 0, 0);
  }
  for (int i = 0; i < SHARED_CANARY_BYTES && !machine.failed; ++i) {
    if (machine.now->shared[shared_bytes + i] == POISON) continue;
    block_failed("at its end: byte %lld of %lld bytes of shared memory was written", shared_bytes + i, shared_bytes);
  }
  retire(machine.now);
}

// The block that is there goes on as far as it can.
inline void run_block() {
  run_threads(machine.launch->block);
  if (machine.now->unfinished == 0 || machine.failed) return end_block();
  for (Fixed& fixed : machine.now->poisoned) {
    const auto* bytes = static_cast<unsigned char*>(fixed.array);
    fixed.kept.assign(bytes, bytes + fixed.bytes);
  }
  machine.waiting.push_back(machine.now);
}

// Blocks that waited go on where what they waited for has come.
inline void run_waiting() {
  for (size_t i = 0; i < machine.waiting.size() && !machine.failed;) {
    if (!wake(*machine.waiting[i])) {
      ++i;
      continue;
    }
    run_with(machine.waiting[i]);
    machine.waiting.erase(machine.waiting.begin() + int64_t(i));
    for (const Fixed& fixed : machine.now->poisoned) memcpy(fixed.array, fixed.kept.data(), fixed.bytes);
    if (machine.now->late_is_there) {
      see_late();
    } else {
      hide_late();
    }
    run_block();
    i = 0;
  }
}

// Blocks in an order that the schedule gives: upwards, downwards, or any.
inline void run_grid() {
  const int* grid = machine.launch->grid;
  std::vector<int64_t> order(int64_t(grid[0]) * grid[1] * grid[2]);
  for (size_t i = 0; i < order.size(); ++i) order[i] = int64_t(i);
  for (size_t i = order.size(); i-- > 1;) {
    if (machine.launch->schedule >= RANDOM) std::swap(order[i], order[random_below(uint32_t(i + 1))]);
  }
  if (machine.launch->schedule == REVERSE) std::reverse(order.begin(), order.end());
  for (size_t i = 0; i < order.size() && !machine.failed; ++i) {
    begin_block(order[i]);
    run_block();
    run_waiting();
  }
  if (!machine.waiting.empty() && !machine.failed) {
    machine.now = machine.waiting.front();
    report_deadlock(machine.launch->block);
  }
  for (Block* block : machine.waiting) retire(block);
  machine.waiting.clear();
  for (; machine.spare.size() > MOST_SPARE; machine.spare.pop_back()) delete machine.spare.back();
}

int run(Launch& launch, void (*kernel)(void**), void** arguments) {
  machine.launch = &launch;
  machine.kernel = kernel;
  machine.arguments = arguments;
  seen.threads = launch.block;
  memcpy(seen.grid, launch.grid, sizeof(seen.grid));
  machine.failed = false;
  machine.random_state = launch.seed;
  machine.late.clear();
  for (int i = 0; i < launch.late_count; ++i) {
    machine.late.emplace_back(launch.late[i].at, launch.late[i].at + launch.late[i].bytes);
  }
  run_grid();
  see_late();
  return machine.failed;
}

}  // namespace shim
