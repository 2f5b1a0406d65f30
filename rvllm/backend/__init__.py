"""What runs a program: numpy on any machine, our kernels on an NVIDIA GPU. Knows ops and steps; not requests."""
