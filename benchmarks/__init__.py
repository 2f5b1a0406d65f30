"""What measures rvllm. A package, so that no installed one of the same name is found in its place."""
