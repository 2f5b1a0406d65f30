// Activation functions: 0 silu, 1 gelu with tanh (Hendrycks and Gimpel 2016), 2 gelu with erf.
#pragma once

#include "element.cuh"

DEVICE float silu(float x) { return x / (1.0f + exponential(-x)); }

DEVICE float gelu_tanh(float x) {
  const float inner = 0.7978845608f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
  return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
}

DEVICE float gelu(float x) { return 0.5f * x * (1.0f + error_function(x * 0.7071067812f)); }  // sqrt(1 / 2)

DEVICE float activate(float x, int activation) {
  return activation == 0 ? silu(x) : activation == 1 ? gelu_tanh(x) : gelu(x);
}
