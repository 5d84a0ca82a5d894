"""The oracle: TRL's losses and the former trainer's runs, on record, for the loop to be compared with."""
