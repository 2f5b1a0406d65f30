"""Hugging Face and GGUF models: configuration, weights, and one short file an architecture. Knows no device."""
