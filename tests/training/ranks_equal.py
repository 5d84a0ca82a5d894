"""Runs of two processes, for test_ranks.py: each keeps what its processes sampled, and the weights they end with."""

import sys
from pathlib import Path

import torch
from ranks_run import SETTINGS, in_order, recorded, state_of, trainer_of

torch.set_num_threads(1)
in_order()
for name in SETTINGS:
    folder = Path(sys.argv[1]) / name
    trainer = trainer_of(name, folder / "two", processes=2)
    calls = recorded(trainer)
    trainer.train()
    torch.save((calls, state_of(trainer)), folder / f"{trainer.accelerator.process_index}.pt")
sys.stdout.write(f"done {trainer.accelerator.process_index}\n")
