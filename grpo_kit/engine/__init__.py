"""Fast ways through a step, for decoders whose only state is keys and values: same numbers, less work (fast.py)."""
