// Activation functions: 0 silu, 1 gelu with tanh (Hendrycks and Gimpel 2016), 2 gelu with erf.
#pragma once

#include "element.cuh"

// Off by some 2^-20 of it, where X has 2^-12 at best: a division and an exponential to the last bit take six times as long.
DEVICE float silu(float x) { return x * reciprocal(1.0f + power_of_two(-x * log2_e())); }

DEVICE float gelu_tanh(float x) {
  const float inner = 0.7978845608f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
  return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
}

DEVICE float gelu(float x) { return 0.5f * x * (1.0f + error_function(x * 0.7071067812f)); }  // sqrt(1 / 2)

// Of several at once, so that one branch is for all of them, and what is not asked for is not even fetched.
template <int N>
DEVICE void activate(float (&values)[N], int activation) {
  if (activation == 0) {
    UNROLL
    for (int i = 0; i < N; ++i) values[i] = silu(values[i]);
  } else if (activation == 1) {
    UNROLL
    for (int i = 0; i < N; ++i) values[i] = gelu_tanh(values[i]);
  } else {
    UNROLL
    for (int i = 0; i < N; ++i) values[i] = gelu(values[i]);
  }
}
