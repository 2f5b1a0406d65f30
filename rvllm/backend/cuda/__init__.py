"""The CUDA backend. Importing it touches no driver; `driver` does when it is asked."""
