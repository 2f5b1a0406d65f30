// rope_kv: rotate every head of q and k, (a, b) -> (a cos - b sin, b cos + a sin) of dimensions i and i + half; hand on
// q, write k and v to the cache's slots. Dimensions from 2 half on are copied.
//
// qkv (tokens, (heads + 2 kv_heads) head_dim) X, rows q | k | v; angles (tokens, 2, half) f32, cos then sin;
// slots (tokens) i32, block * block_size + place in it, negative: neither k nor v is written;
// cache (2, blocks, kv_heads, block_size, head_dim) X, keys then values; out (tokens, heads head_dim) X.
// _e4m3: cache holds codes (e4m3.cuh) of what was rotated in float, scales (2, blocks, kv_heads, block_size) f32.
// launch: grid (tokens), block 256, no dynamic shared memory. One block: a token; one thread: 8 pairs, or one; of
//   codes one warp: a row.
// bound: 4 (heads + 2 kv_heads) head_dim + 8 half bytes a token; with codes (4 heads + 6 kv_heads) head_dim + 8 half +
//   8 kv_heads.
// assumes: head_dim is even, 2 half <= head_dim; no two tokens share a slot; out may not overlap qkv; all start on
//   16 bytes.
// tiers: t70 t80 t90
#include "e4m3.cuh"

struct Heads {
  int heads, kv_heads, head_dim, half, blocks, block_size;
};

// Which of the cache's rows of head_dim elements belongs to a slot, keys then values.
DEVICE int64 cache_row(bool value, int kv_head, int slot, const Heads& shape) {
  const int64 block = (value ? shape.blocks : 0) + int64(slot / shape.block_size);
  return (block * shape.kv_heads + kv_head) * shape.block_size + slot % shape.block_size;
}

// Where head `head` of a q | k | v row goes; null where that is nowhere.
template <typename X>
DEVICE X* head_target(int head, int slot, X* cache, X* out_row, const Heads& shape) {
  if (head < shape.heads) return out_row + int64(head) * shape.head_dim;
  if (slot < 0) return nullptr;
  const bool value = head >= shape.heads + shape.kv_heads;
  const int kv_head = head - shape.heads - (value ? shape.kv_heads : 0);
  return cache + cache_row(value, kv_head, slot, shape) * shape.head_dim;
}

// N pairs, (a, b) each. Rotated dimensions are half apart, the others are simply the next 2 N.
template <int N>
struct Pairs {
  int first, second;  // dimensions of a and of b
  Pack<float, N> a, b;
};

// N pairs of a head from the `pair`th on, rotated if `rotates`.
template <int N, typename X>
DEVICE Pairs<N> pairs_of(const X* from, const float* cos_sin, int pair, bool rotates, int half) {
  Pairs<N> pairs;
  pairs.first = pair < half ? pair : 2 * pair;
  pairs.second = pair < half ? pair + half : pairs.first + N;
  const Pack<X, N> a = load<N>(from + pairs.first), b = load<N>(from + pairs.second);
  UNROLL
  for (int i = 0; i < N; ++i) {
    pairs.a.at[i] = to_float(a.at[i]);
    pairs.b.at[i] = to_float(b.at[i]);
  }
  if (rotates && pair < half) {
    const Pack<float, N> cos = load<N>(cos_sin + pair), sin = load<N>(cos_sin + half + pair);
    UNROLL
    for (int i = 0; i < N; ++i) {
      const float x = pairs.a.at[i], y = pairs.b.at[i];
      pairs.a.at[i] = x * cos.at[i] - y * sin.at[i];
      pairs.b.at[i] = y * cos.at[i] + x * sin.at[i];
    }
  }
  return pairs;
}

template <int N, typename X>
DEVICE void store_rounded(X* to, const Pack<float, N>& values) {
  Pack<X, N> pack;
  UNROLL
  for (int i = 0; i < N; ++i) pack.at[i] = rounded<X>(values.at[i]);
  store(to, pack);
}

// A row of k or v by one warp, twice: for its scale, and for its codes.
template <int N, typename X>
DEVICE void store_row(const X* from, const float* cos_sin, bool rotates, const Heads& shape, e4m3_t* to, float* scale) {
  const int end = shape.head_dim / 2;
  uint32 largest = 0;
  NO_UNROLL
  for (int pair = lane_index() * N; pair < end; pair += WARP * N) {
    const Pairs<N> pairs = pairs_of<N>(from, cos_sin, pair, rotates, shape.half);
    UNROLL
    for (int i = 0; i < N; ++i) {
      const uint32 a = bits_of(pairs.a.at[i]) & 0x7fffffffu, b = bits_of(pairs.b.at[i]) & 0x7fffffffu;
      largest = a > largest ? a : largest;
      largest = b > largest ? b : largest;
    }
  }
  UNROLL
  for (int apart = 1; apart < WARP; apart *= 2) {
    const uint32 other = shuffle_xor(largest, apart);
    largest = other > largest ? other : largest;
  }
  const float unit = e4m3_scale(largest);
  if (lane_index() == 0) *scale = unit;
  NO_UNROLL
  for (int pair = lane_index() * N; pair < end; pair += WARP * N) {
    const Pairs<N> pairs = pairs_of<N>(from, cos_sin, pair, rotates, shape.half);
    store_codes<N>(to + pairs.first, pairs.a, unit);
    store_codes<N>(to + pairs.second, pairs.b, unit);
  }
}

template <int N, typename X, typename C>
DEVICE void rope_kv_token(const X* qkv, const float* angles, const int* slots, C* cache, float* scales, X* out,
                          const Heads& shape) {
  const int token = block_x(), slot = slots[token];
  const int all_heads = shape.heads + 2 * shape.kv_heads;
  const int chunks = shape.head_dim / 2 / N;
  const X* row = qkv + int64(token) * all_heads * shape.head_dim;
  X* out_row = out + int64(token) * shape.heads * shape.head_dim;
  const float* cos_sin = angles + int64(token) * 2 * shape.half;
  X* by_threads = nullptr;  // the cache, where a thread's pairs need nothing from the others
  if constexpr (!Stored<C>::SCALED) by_threads = cache;
  NO_UNROLL
  for (int item = thread_index(); item < (Stored<C>::SCALED ? shape.heads : all_heads) * chunks;
       item += thread_count()) {
    const int head = item / chunks;
    X* to = head_target(head, slot, by_threads, out_row, shape);
    if (to == nullptr) continue;
    const bool rotates = head < shape.heads + shape.kv_heads;
    const Pairs<N> pairs =
        pairs_of<N>(row + int64(head) * shape.head_dim, cos_sin, item % chunks * N, rotates, shape.half);
    store_rounded<N>(to + pairs.first, pairs.a);
    store_rounded<N>(to + pairs.second, pairs.b);
  }
  if constexpr (Stored<C>::SCALED) {
    NO_UNROLL
    for (int head = warp_index(); slot >= 0 && head < 2 * shape.kv_heads; head += warp_count()) {
      const int64 at = cache_row(head >= shape.kv_heads, head % shape.kv_heads, slot, shape);
      store_row<N>(row + int64(shape.heads + head) * shape.head_dim, cos_sin, head < shape.kv_heads, shape,
                   cache + at * shape.head_dim, scales + at);
    }
  }
}

template <typename X, typename C>
DEVICE void rope_kv(const X* qkv, const float* angles, const int* slots, C* cache, float* scales, X* out,
                    const Heads& shape) {
  begin_grid();
  if (shape.half % WIDE == 0 && shape.head_dim % (2 * WIDE) == 0) {
    rope_kv_token<WIDE>(qkv, angles, slots, cache, scales, out, shape);
  } else {
    rope_kv_token<1>(qkv, angles, slots, cache, scales, out, shape);
  }
}

KERNEL(256)
void rope_kv_f16(const half_t* qkv, const float* angles, const int* slots, half_t* cache, half_t* out, int heads,
                 int kv_heads, int head_dim, int half, int blocks, int block_size) {
  rope_kv(qkv, angles, slots, cache, nullptr, out, {heads, kv_heads, head_dim, half, blocks, block_size});
}

KERNEL(256)
void rope_kv_e4m3_f16(const half_t* qkv, const float* angles, const int* slots, e4m3_t* cache, float* scales,
                      half_t* out, int heads, int kv_heads, int head_dim, int half, int blocks, int block_size) {
  rope_kv(qkv, angles, slots, cache, scales, out, {heads, kv_heads, head_dim, half, blocks, block_size});
}

KERNEL(256)
void rope_kv_bf16(const bfloat_t* qkv, const float* angles, const int* slots, bfloat_t* cache, bfloat_t* out, int heads,
                  int kv_heads, int head_dim, int half, int blocks, int block_size) {
  rope_kv(qkv, angles, slots, cache, nullptr, out, {heads, kv_heads, head_dim, half, blocks, block_size});
}

KERNEL(256)
void rope_kv_e4m3_bf16(const bfloat_t* qkv, const float* angles, const int* slots, e4m3_t* cache, float* scales,
                       bfloat_t* out, int heads, int kv_heads, int head_dim, int half, int blocks, int block_size) {
  rope_kv(qkv, angles, slots, cache, scales, out, {heads, kv_heads, head_dim, half, blocks, block_size});
}
