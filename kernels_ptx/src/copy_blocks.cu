// copy_blocks: cache block pairs[i].to = pairs[i].from in every plane, byte for byte. A plane is one layer's keys or
// values, whose blocks lie one after another.
//
// planes (planes) u64, the address of each plane's block 0; words (planes) i32, 16-byte words of one of its blocks;
// pairs (pairs, 2) i32, the block that is read and the one that is written.
// launch: grid (pairs, planes), block 256, no dynamic shared memory. One block: a cache block of one plane.
// bound: 32 bytes a word.
// assumes: planes start on 16 bytes; no block is written that another pair reads or writes.
// tiers: t70
#include "element.cuh"

KERNEL(256) void copy_blocks(const uint64* planes, const int* words, const int* pairs) {
  begin_grid();
  const int count = words[block_y()];
  const int* pair = pairs + 2 * block_x();
  unsigned char* plane = reinterpret_cast<unsigned char*>(planes[block_y()]);
  const unsigned char* from = plane + 16 * (int64(pair[0]) * count);
  unsigned char* to = plane + 16 * (int64(pair[1]) * count);
  NO_UNROLL
  for (int word = thread_index(); word < count; word += thread_count()) {
    store_words4(to + 16 * int64(word), load_words4(from + 16 * int64(word)));
  }
}
