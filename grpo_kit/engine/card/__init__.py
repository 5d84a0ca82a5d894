"""The fast ways that only a CUDA card takes, and their checks."""
