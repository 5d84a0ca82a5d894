"""Faults drawn at random, and whether the run is then the one that nobody touched."""
