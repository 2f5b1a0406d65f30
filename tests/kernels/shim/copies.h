// Copies that are under way while a kernel goes on, and the words on which it waits for them.
#pragma once

#include "machine.h"

namespace shim {

// ---- Copies of a thread. One happens as late as it may, and until then its target is poison: a missing wait reads that,
// and a source that is overwritten too early is copied wrong. In the reverse schedule it happens at once: then what is
// written over its target too early stays there.

inline void finish(const Copy& copy) {
  memset(copy.to, 0, size_t(copy.bytes));
  memcpy(copy.to, copy.from, size_t(copy.valid));
}

void copy_async(void* to, const void* from, int valid, int bytes) {
  memset(const_cast<void*>(aligned(to, size_t(bytes))), POISON, size_t(bytes));
  const Copy copy = {to, aligned(from, size_t(bytes)), valid, bytes};
  if (machine.launch->schedule == REVERSE) return finish(copy);
  Groups<Copy>& copies = current_thread().copies;
  copies.members.push_back({copy, copies.open});
}

void commit_copies() { ++current_thread().copies.open; }
void wait_copies(size_t left) { current_thread().copies.finish(left, finish); }

// ---- Arrivals, and the copy engine: a box comes as late as it may, in any order, when nothing else can happen

inline Arrivals& arrivals_at(void* word) {
  const auto found = machine.now->arrivals.find(word);
  if (found == machine.now->arrivals.end()) fail("an arrival at %p, where none was begun", word);
  return found->second;
}

inline void end_phase_if_all_came(Arrivals& arrivals) {
  if (arrivals.missing > 0 || arrivals.bytes != 0) return;
  ++arrivals.phase;
  arrivals.missing = arrivals.count;
}

void arrive_once(void* word, int64_t expected_bytes) {
  Arrivals& arrivals = arrivals_at(word);
  if (arrivals.missing == 0) fail("more arrivals than the word at %p counts", word);
  arrivals.bytes += expected_bytes;
  --arrivals.missing;
  end_phase_if_all_came(arrivals);
}

inline void bring_box(size_t index) {
  const Box box = machine.now->boxes[index];
  machine.now->boxes.erase(machine.now->boxes.begin() + int64_t(index));
  box.copy();
  Arrivals& arrivals = machine.now->arrivals[box.word];
  arrivals.bytes -= box.bytes;
  end_phase_if_all_came(arrivals);
}

inline void bring_all_boxes() {
  while (!machine.now->boxes.empty()) bring_box(0);
}

void wait_arrivals(void* word, uint32_t parity) {
  while ((arrivals_at(word).phase & 1) == parity) {
    current_thread().waits_for = "arrivals";
    if (!machine.now->boxes.empty() && random_below(4) == 0)
      bring_box(random_below(uint32_t(machine.now->boxes.size())));
    yield();
  }
  current_thread().waits_for = nullptr;
}

void begin_arrivals(void* word, int count) {
  Arrivals& arrivals = machine.now->arrivals[word];
  arrivals = {};
  arrivals.count = arrivals.missing = count;
}

// What a kernel is told of a matrix (tests/kernels/device.py).
struct HostMap {
  const unsigned char* matrix;
  int64_t rows, columns;
  int32_t box_rows;
};

inline void bring_rows(unsigned char* to, const HostMap& map, int column, int row) {
  for (int i = 0; i < map.box_rows; ++i) {
    for (int piece = 0; piece < 8; ++piece) {
      unsigned char* at = to + i * 128 + (piece ^ i % 8) * 16;
      memset(at, 0, 16);
      const int64_t from = column + piece * 8, there = std::min<int64_t>(map.columns - from, 8);
      if (row + i >= map.rows || there <= 0) continue;
      memcpy(at, map.matrix + ((row + i) * map.columns + from) * 2, size_t(there) * 2);
    }
  }
}

void copy_box(void* to, const void* map, int column, int row, void* word) {
  HostMap box;
  memcpy(&box, aligned(map, 64), sizeof(box));
  if (reinterpret_cast<uintptr_t>(to) % 1024 != 0) fail("a box at %p, which is not on 1024 bytes", to);
  unsigned char* bytes = static_cast<unsigned char*>(to);
  memset(bytes, POISON, size_t(box.box_rows) * 128);
  const auto copy = [=] { bring_rows(bytes, box, column, row); };
  machine.now->boxes.push_back({word, int64_t(box.box_rows) * 128, copy});
  arrivals_at(word);
}

void copy_bytes(void* to, const void* from, int bytes, void* word) {
  if (bytes <= 0 || bytes % 16 != 0) fail("a copy of %d bytes", bytes);
  const void* source = aligned(from, 16);
  memset(const_cast<void*>(aligned(to, 16)), POISON, size_t(bytes));
  machine.now->boxes.push_back({word, bytes, [=] { memcpy(to, source, size_t(bytes)); }});
  arrivals_at(word);
}

// Copies that are started before it read what is there before it.
void wait_for_previous_grid() {
  if (machine.launch->late_count == 0 || machine.now->late_is_there) return;
  Groups<Copy>& copies = current_thread().copies;
  while (copies.done < copies.members.size()) finish(copies.members[copies.done++].what);
  bring_all_boxes();
  wait_for_late();
}

}  // namespace shim
