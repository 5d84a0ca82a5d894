"""The oracle: losses, gradients and first steps of today's trainer, on record, for another trainer to be compared with."""
