"""One GRPO step after the other: trl's trainer with the kit's guarantees, one file a stage."""
