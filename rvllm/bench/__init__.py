"""What `rvllm benchmark` runs: the engine alone, checked, timed, and held to the limits of its device."""
