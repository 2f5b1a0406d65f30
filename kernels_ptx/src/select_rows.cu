// select_rows: out = x[rows], the positions whose logits are wanted.
//
// x (tokens, hidden) X; rows (rows) i32; out (rows, hidden) X.
// launch: grid (rows, ceil(hidden / 2048)), block 256, no dynamic shared memory. One block: 2048 elements of a row.
// bound: 4 hidden bytes a row.
// assumes: 0 <= rows < tokens; out overlaps nothing; x and out start on 16 bytes.
// tiers: t70 t90
#include "gather_rows.cuh"

KERNEL(256) void select_rows_f16(const half_t* x, const int* rows, half_t* out, int hidden) {
  gather_row(rows, x, out, hidden);
}

KERNEL(256) void select_rows_bf16(const bfloat_t* x, const int* rows, bfloat_t* out, int hidden) {
  gather_row(rows, x, out, hidden);
}
