"""Watching a run: red flags, diversity, the live chart, completions to read."""
