"""Does a config fit the card? The memory of a step by moment and part, before anything is loaded."""
