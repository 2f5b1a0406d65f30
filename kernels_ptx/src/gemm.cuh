// Many tokens times a weight: what the entries of gemm, gemm_add, gemm_act_mul and gemm_f32 share.
//
// A block has SIDE tokens and SIDE slots (linear_out.cuh), and all of the depth. Every sum is made in the order of the
// depth, whatever the tile: a token's bits depend neither on its neighbours nor on SIDE.
#pragma once

#if TIER >= 80
#include "gemm_mma.cuh"
#else
#include "gemm_fma.cuh"
#endif
