"""The kernels: CUDA sources, and the PTX built from them, as package data. Knows nothing of who launches them."""
