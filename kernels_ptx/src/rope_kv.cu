// rope_kv: rotate every head of q and k, (a, b) -> (a cos - b sin, b cos + a sin) of dimensions i and i + half; hand on
// q, write k and v to the cache's slots. Dimensions from 2 half on are copied.
//
// qkv (tokens, (heads + 2 kv_heads) head_dim) X, rows q | k | v; angles (tokens, 2, half) f32, cos then sin;
// slots (tokens) i32, block * block_size + place in it, negative: neither k nor v is written;
// cache (2, blocks, kv_heads, block_size, head_dim) X, keys then values; out (tokens, heads head_dim) X.
// launch: grid (tokens), block 256, no dynamic shared memory. One block: a token; one thread: 8 pairs, or one.
// bound: 4 (heads + 2 kv_heads) head_dim + 8 half bytes a token.
// assumes: head_dim is even, 2 half <= head_dim; no two tokens share a slot; out may not overlap qkv; all start on
//   16 bytes.
// tiers: t70 t80 t90
#include "element.cuh"

struct Heads {
  int heads, kv_heads, head_dim, half, blocks, block_size;
};

// Where head `head` of a q | k | v row goes; null where that is nowhere.
template <typename X>
DEVICE X* head_target(int head, int slot, X* cache, X* out_row, const Heads& shape) {
  if (head < shape.heads) return out_row + int64(head) * shape.head_dim;
  if (slot < 0) return nullptr;
  const bool value = head >= shape.heads + shape.kv_heads;
  const int kv_head = head - shape.heads - (value ? shape.kv_heads : 0);
  const int64 block = (value ? shape.blocks : 0) + int64(slot / shape.block_size);
  return cache + ((block * shape.kv_heads + kv_head) * shape.block_size + slot % shape.block_size) * shape.head_dim;
}

// N pairs from the `pair`th on: rotated dimensions are half apart, the others are simply the next 2 N.
template <int N, typename X>
DEVICE void rotate_pairs(const X* from, X* to, const float* cos_sin, int pair, bool rotates, int half) {
  const int first = pair < half ? pair : 2 * pair;
  const int second = pair < half ? pair + half : first + N;
  Pack<X, N> a = load<N>(from + first), b = load<N>(from + second);
  if (rotates && pair < half) {
    const Pack<float, N> cos = load<N>(cos_sin + pair), sin = load<N>(cos_sin + half + pair);
    UNROLL
    for (int i = 0; i < N; ++i) {
      const float x = to_float(a.at[i]), y = to_float(b.at[i]);
      a.at[i] = rounded<X>(x * cos.at[i] - y * sin.at[i]);
      b.at[i] = rounded<X>(y * cos.at[i] + x * sin.at[i]);
    }
  }
  store(to + first, a);
  store(to + second, b);
}

template <int N, typename X>
DEVICE void rope_kv_token(const X* qkv, const float* angles, const int* slots, X* cache, X* out, const Heads& shape) {
  const int token = block_x();
  const int all_heads = shape.heads + 2 * shape.kv_heads;
  const int chunks = shape.head_dim / 2 / N;
  const X* row = qkv + int64(token) * all_heads * shape.head_dim;
  X* out_row = out + int64(token) * shape.heads * shape.head_dim;
  const float* cos_sin = angles + int64(token) * 2 * shape.half;
  NO_UNROLL
  for (int item = thread_index(); item < all_heads * chunks; item += thread_count()) {
    const int head = item / chunks;
    X* to = head_target(head, slots[token], cache, out_row, shape);
    if (to == nullptr) continue;
    const bool rotates = head < shape.heads + shape.kv_heads;
    rotate_pairs<N>(row + int64(head) * shape.head_dim, to, cos_sin, item % chunks * N, rotates, shape.half);
  }
}

template <typename X>
DEVICE void rope_kv(const X* qkv, const float* angles, const int* slots, X* cache, X* out, const Heads& shape) {
  begin_grid();
  if (shape.half % WIDE == 0 && shape.head_dim % (2 * WIDE) == 0) {
    rope_kv_token<WIDE>(qkv, angles, slots, cache, out, shape);
  } else {
    rope_kv_token<1>(qkv, angles, slots, cache, out, shape);
  }
}

KERNEL(256)
void rope_kv_f16(const half_t* qkv, const float* angles, const int* slots, half_t* cache, half_t* out, int heads,
                 int kv_heads, int head_dim, int half, int blocks, int block_size) {
  rope_kv(qkv, angles, slots, cache, out, {heads, kv_heads, head_dim, half, blocks, block_size});
}

KERNEL(256)
void rope_kv_bf16(const bfloat_t* qkv, const float* angles, const int* slots, bfloat_t* cache, bfloat_t* out, int heads,
                  int kv_heads, int head_dim, int half, int blocks, int block_size) {
  rope_kv(qkv, angles, slots, cache, out, {heads, kv_heads, head_dim, half, blocks, block_size});
}
