"""The fast ways that only a CPU takes."""
