// What a kernel's code sees of the machine that runs it. Knows nothing of how: machine.cc is compiled once, and each
// library of a kernel, which includes no more than this, is linked with it.
#pragma once

#include <cstdint>
#include <cstring>

namespace shim {

enum Schedule { ROUND_ROBIN, REVERSE, RANDOM, ONE_WARP };  // ONE_WARP: until all its threads wait or yield; then any

constexpr int LANES = 32;
constexpr int SLOT_BYTES = 64;  // what a lane shows the others in one operation
constexpr unsigned char POISON = 0xff;

// Memory that the grid before is still writing: poison in every block until all its threads have waited for that grid.
struct Late {
  unsigned char* at;
  uint64_t bytes;
};

struct Launch {
  int grid[3];
  int block;
  int shared_bytes;
  int schedule;
  uint64_t seed;
  char message[1024];
  int late_count;
  Late late[8];
};

// Of the thread that runs now.
struct Seen {
  int thread;
  int threads;
  int block[3];
  int grid[3];
  unsigned char* shared;
};
extern Seen seen;

using Slots = const unsigned char (*)[SLOT_BYTES];

// 0, or 1 with launch.message set. The kernel is called in every thread, with these arguments.
int run(Launch& launch, void (*kernel)(void**), void** arguments);

// End the launch with a message. Called on a fiber, it does not return.
void fail(const char* format, ...);
const void* aligned(const void* address, size_t bytes);  // the address, or a failure
void poison_once(void* array, size_t bytes);

void yield();
void wait_until(const uint32_t* word, uint32_t least);
void arrive(int id, int expected, bool waits);
// Show `bytes` to the other lanes, wait for theirs; gives the slots of all lanes, whole until this thread next waits.
Slots meet(const char* operation, uint32_t lanes, const void* shown, int bytes);
void need_whole_warp(const char* operation);  // for what the hardware does with all lanes of a warp or not at all

// ---- Matrices. What is stood for by bits of 16 is told by `brain`: bfloat16, else IEEE's half.
float half_value(uint16_t bits);
uint16_t half_bits(float value);
void matrix_product(float* d, const void* a, const void* b, int registers, bool brain);  // of a; b has half as many
void products_8x8x4(float* d, const void* a, const void* b);
void load_matrices(uint32_t* to, int matrices, bool transposed, const void* row);
uint32_t turned_matrix(uint32_t pair);
void warpgroup_product(float* d, int count, uint64_t a, uint64_t b, bool brain);
void commit_products();
void wait_products(size_t left);

// ---- Copies
void copy_async(void* to, const void* from, int valid, int bytes);
void commit_copies();
void wait_copies(size_t left);
void begin_arrivals(void* word, int count);
void arrive_once(void* word, int64_t expected_bytes);
void wait_arrivals(void* word, uint32_t parity);
void copy_box(void* to, const void* map, int column, int row, void* word);
void copy_bytes(void* to, const void* from, int bytes, void* word);
void wait_for_previous_grid();

template <typename T>
T from_lane(Slots slots, int lane) {
  T value;
  memcpy(&value, slots[lane], sizeof(T));
  return value;
}

}  // namespace shim
