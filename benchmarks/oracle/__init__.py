"""The oracle: what today's trainer does, on record, for another trainer to be compared with."""
