// rope_angles: cos and sin of angle = position * inv_freq[clamp(length - threshold, 0, variants - 1)], times scale.
//
// positions, lengths (tokens) i32; inv_freq (variants, half) f32; out (tokens, 2, half) f32, cos then sin; half is
// rotary / 2. The angle is a float product, as in transformers. Of |angle| <= 2^30, cos and sin are within 0.501 ulp.
// launch: grid (ceil(tokens half / 256)), block 256, no dynamic shared memory. One thread: one angle.
// bound: 8 half bytes a token, once a step; about 30 float64 operations an angle.
// assumes: variants >= 1; positions >= 0; out overlaps nothing.
// tiers: t70 t90
#include "intrinsics.cuh"

// angle = quarter pi/2 + rest, |rest| <= pi/4 (Cody and Waite 1980). pi/2 is the sum of two float64, good to 2^-107;
// the fused multiply-adds round only their results, so even the smallest rest of a float angle up to 2^30 keeps 40
// bits.
DEVICE double reduce_angle(float angle, int64& quarter) {
  const double pi_2_high = 0x1.921fb54442d18p+0, pi_2_low = 0x1.1a62633145c07p-54;
  quarter = nearest_integer(double(angle) * 0x1.45f306dc9c883p-1);  // 2 / pi
  const double rest = fused_multiply_add(-double(quarter), pi_2_high, double(angle));
  return fused_multiply_add(-double(quarter), pi_2_low, rest);
}

// Taylor series to the 13th and 14th power; what is left out is below 2^-45 for |x| <= pi/4.
DEVICE double sine(double x) {
  const double y = x * x;
  double series = 1.0 / 6227020800.0;  // 1 / 13!
  series = fused_multiply_add(series, y, -1.0 / 39916800.0);
  series = fused_multiply_add(series, y, 1.0 / 362880.0);
  series = fused_multiply_add(series, y, -1.0 / 5040.0);
  series = fused_multiply_add(series, y, 1.0 / 120.0);
  series = fused_multiply_add(series, y, -1.0 / 6.0);
  return fused_multiply_add(series * y, x, x);
}

DEVICE double cosine(double x) {
  const double y = x * x;
  double series = -1.0 / 87178291200.0;  // -1 / 14!
  series = fused_multiply_add(series, y, 1.0 / 479001600.0);
  series = fused_multiply_add(series, y, -1.0 / 3628800.0);
  series = fused_multiply_add(series, y, 1.0 / 40320.0);
  series = fused_multiply_add(series, y, -1.0 / 720.0);
  series = fused_multiply_add(series, y, 1.0 / 24.0);
  series = fused_multiply_add(series, y, -0.5);
  return fused_multiply_add(series, y, 1.0);
}

KERNEL(256)
void rope_angles_f32(const int* positions, const int* lengths, const float* inv_freq, float* out, int tokens, int half,
                     int variants, int threshold, float scale) {
  begin_grid();
  const int64 index = int64(block_x()) * thread_count() + thread_index();
  if (index >= int64(tokens) * half) return;
  const int token = int(index / half), i = int(index % half);
  const int above = lengths[token] - threshold;
  const int variant = above < 0 ? 0 : above < variants ? above : variants - 1;
  const float angle = float(positions[token]) * inv_freq[int64(variant) * half + i];

  int64 quarter;
  const double rest = reduce_angle(angle, quarter);
  const double c = cosine(rest), s = sine(rest);
  const double turned_c = quarter % 2 == 0 ? c : s, turned_s = quarter % 2 == 0 ? s : c;
  const int turn = int(quarter & 3);  // cos: + - - +, sin: + + - -
  float* token_out = out + int64(token) * 2 * half;
  token_out[i] = float(turn == 1 || turn == 2 ? -turned_c : turned_c) * scale;
  token_out[half + i] = float(turn >= 2 ? -turned_s : turned_s) * scale;
}
