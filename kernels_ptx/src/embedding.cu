// embedding: out = table[ids].
//
// ids (tokens) i32; table (vocab, hidden) X; out (tokens, hidden) X.
// launch: grid (tokens, ceil(hidden / 2048)), block 256, no dynamic shared memory. One block: 2048 elements of a row.
// bound: 4 hidden bytes a token.
// assumes: 0 <= ids < vocab; out overlaps nothing; table and out start on 16 bytes.
// tiers: t70 t90
#include "gather_rows.cuh"

KERNEL(256) void embedding_f16(const int* ids, const half_t* table, half_t* out, int hidden) {
  gather_row(ids, table, out, hidden);
}

KERNEL(256) void embedding_bf16(const int* ids, const bfloat_t* table, bfloat_t* out, int hidden) {
  gather_row(ids, table, out, hidden);
}
