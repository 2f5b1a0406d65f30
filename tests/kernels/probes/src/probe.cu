// probe: one small kernel for each part of intrinsics.cuh, for the tests of the machine that runs kernels on the host.
//
// launch: as each kernel says; all arrays are global.
// tiers: t70 t90
#include "element.cuh"
#include "reduce.cuh"

// out[i]: float bits of the half i, and the half and bfloat bits of the float values[i]. grid (count / 64), block 64.
KERNEL(64)
void probe_conversions(const float* values, float* floats, half_t* halves, bfloat_t* bfloats) {
  const int i = block_x() * thread_count() + thread_index();
  floats[i] = to_float(half_t{uint16(i)});
  halves[i] = rounded<half_t>(values[i]);
  bfloats[i] = rounded<bfloat_t>(values[i]);
}

// One float function of each value. out (7, count). grid (count / 64), block 64.
KERNEL(64)
void probe_functions(const float* values, float* out, int count) {
  const int i = block_x() * thread_count() + thread_index();
  const float x = values[i];
  out[i] = exponential(x);
  out[count + i] = hyperbolic_tangent(x);
  out[2 * count + i] = error_function(x);
  out[3 * count + i] = power_of_two(x);
  out[4 * count + i] = square_root(larger(x, -x));
  out[5 * count + i] = fused_multiply_add(x, x, -1.0f);
  out[6 * count + i] = float(nearest_integer(double(x)));
}

// Lane arithmetic: out[0][i] the value of lane (i + 5) % 32, out[1][i] of lane i ^ 3, out[2][i] who is odd, out[3][i]
// the sum over the half warp that i is in, each half meeting on its own. block 32.
KERNEL(32)
void probe_lanes(const int* values, int* out) {
  const int lane = lane_index(), value = values[lane];
  out[lane] = shuffle(value, (lane + 5) % WARP);
  out[32 + lane] = shuffle_xor(value, 3);
  out[64 + lane] = int(lanes_where(value % 2 != 0));
  const uint32 half_warp = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  int sum = value;
  if (lane < 16) {  // the halves part ways
    for (int apart = 8; apart > 0; apart /= 2) sum += shuffle_xor(sum, apart, half_warp);
  } else {
    for (int apart = 1; apart < 16; apart *= 2) sum += shuffle_xor(sum, apart, half_warp);
  }
  sync_warp();
  out[96 + lane] = sum;
}

// out[block] = the sum of the block's values. grid (any), block up to 256.
KERNEL(256) void probe_block_sum(const float* values, float* out) {
  const float sum = block_sum(values[block_x() * thread_count() + thread_index()]);
  if (thread_index() == thread_count() - 1) out[block_x()] = sum;
}

// out = values, each block's reversed through shared memory. `barrier` 0 leaves the barrier out: a fault, to be found.
KERNEL(256) void probe_reverse(const int* values, int* out, int barrier) {
  DYNAMIC_SHARED(memory);
  int* kept = reinterpret_cast<int*>(memory);
  const int first = block_x() * thread_count();
  kept[thread_index()] = values[first + thread_index()];
  if (barrier) sync_block();
  out[first + thread_index()] = kept[thread_count() - 1 - thread_index()];
}

// The same in rounds: `after` 0 leaves out the barrier that keeps a fast warp from overwriting what a slow one reads.
KERNEL(256) void probe_rounds(const int* values, int* out, int rounds, int after) {
  SHARED_ARRAY(int, kept, 256);
  int sum = 0;
  for (int round = 0; round < rounds; ++round) {
    kept[thread_index()] = values[round * thread_count() + thread_index()];
    sync_block();
    sum += kept[(thread_index() + 33) % thread_count()];
    if (after) sync_block();
  }
  out[thread_index()] = sum;
}

// Warp 0 makes values that warps 1..3 take, over two numbered barriers: full (1) and empty (2). block 128.
KERNEL(128) void probe_numbered_barriers(const int* values, int* out, int rounds) {
  SHARED_ARRAY(int, stage, 32);
  int sum = 0;
  for (int round = 0; round < rounds; ++round) {
    if (warp_index() == 0) {
      if (round > 0) barrier_wait(2, 128);
      stage[lane_index()] = values[round * WARP + lane_index()];
      barrier_arrive(1, 128);
    } else {
      barrier_wait(1, 128);
      sum += stage[lane_index()];
      if (round + 1 < rounds) barrier_arrive(2, 128);
    }
  }
  if (warp_index() > 0) out[thread_index() - WARP] = sum;
}

// Half of the threads never come to the barrier that the others count them for. block 64.
KERNEL(64) void probe_deadlock(int* out) {
  if (warp_index() == 0) barrier_wait(1, 64);
  out[thread_index()] = 1;
}

// Lanes of one warp at two different operations. block 32.
KERNEL(32) void probe_mixed_operations(int* out) {
  out[thread_index()] = lane_index() == 7 ? int(lanes_where(true)) : shuffle(lane_index(), 0);
}

// A vector access at an odd address. block 1.
KERNEL(32) void probe_misaligned(const int* values, int* out) { *out = int(load_words4(values + 1).word[0]); }

// A write behind the block's shared memory, and a read of memory that is not ours if `far`. block 1.
KERNEL(32) void probe_overrun(int* out, int shared_bytes, int far) {
  DYNAMIC_SHARED(memory);
  memory[shared_bytes] = 1;
  out[0] = out[far];
}

// counters[0] += 1 by every thread, [1] the largest thread number, [2] how often the swap from 0 worked; the last block
// to arrive, which a counter in tickets tells, adds up what all left in parts. grid (any), block 64.
KERNEL(64) void probe_atomics(uint32* counters, uint32* tickets, uint32* parts, uint32* out) {
  const uint32 number = uint32(block_x() * thread_count() + thread_index());
  atomic_add(counters, 1u);
  atomic_max(counters + 1, number);
  if (atomic_compare_swap(counters + 2, 0u, number + 1) == 0u) atomic_add(counters + 3, 1u);
  if (thread_index() == 0) {
    parts[block_x()] = number + 1;
    fence();
    if (atomic_add(tickets, 1u) == uint32(grid_x() - 1)) {
      fence();
      uint32 sum = 0;
      for (int block = 0; block < grid_x(); ++block) sum += parts[block];
      *out = sum;
    }
  }
}

// Warp 1 spins on a flag that warp 0 sets after its value. block 64.
KERNEL(64) void probe_flag(uint32* flag, uint32* value, uint32* out) {
  if (warp_index() == 0) {
    if (lane_index() == 0) {
      *value = 7;
      store_release(flag, 1);
    }
  } else if (lane_index() == 0) {
    while (load_acquire(flag) == 0) {
    }
    *out = *value;
  }
}

// Waits for a flag that nobody sets. block 1.
KERNEL(32) void probe_spin(const uint32* flag) {
  while (load_acquire(flag) == 0) {
  }
}

// Two words, then four, then four that are read once, copied. block 1.
KERNEL(32) void probe_words(const uint32* from, uint32* to) {
  wait_for_previous_grid();
  store_words2(to, load_words2(from));
  store_words4(to + 4, load_words4(from + 4));
  store_words4(to + 8, load_words4_once(from + 8));
  start_next_grid();
}

// d (4, 8, 8) = a (4, 8, 4) b (4, 4, 8) + d, four products by one warp's quad pairs. block 32.
KERNEL(32) void probe_mma_884(const half_t* a, const half_t* b, float* d) {
  const int lane = lane_index(), pair = lane % 16 / 4, upper = lane < 16 ? 0 : 4;
  uint32 left[2], right[2];
  for (int i = 0; i < 2; ++i) {
    const half_t* row = a + (pair * 8 + lane % 4 + upper) * 4 + 2 * i;
    left[i] = uint32(row[0].bits) | uint32(row[1].bits) << 16;
    const half_t* column = b + pair * 32 + lane % 4 + upper;
    right[i] = uint32(column[2 * i * 8].bits) | uint32(column[(2 * i + 1) * 8].bits) << 16;
  }
  float* out[8];
  float sums[8];
  for (int i = 0; i < 8; ++i) {
    const int row = (lane & 1) + (i & 2) + upper, column = (i & 4) + (lane & 2) + (i & 1);
    out[i] = d + (pair * 8 + row) * 8 + column;
    sums[i] = *out[i];
  }
  mma_884(sums, left, right, half_t{});
  for (int i = 0; i < 8; ++i) *out[i] = sums[i];
}
