"""One step of one arm on a card capped at 22.5 GiB, with the optimizer of gpu24: peaks and seconds by phase.

    python -m benchmarks.card.step kit realistic full adamw-8bit-split OUT.json

Arms and work are those of benchmarks.step, weights random in Qwen2.5-1.5B's shapes; the third step is measured.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.card.decode import CAP_GIB
from benchmarks.step import arms
from benchmarks.step.setup import Setup
from benchmarks.step.sizes import SIZES, random_weights
from benchmarks.step.workload import make_workload

if __name__ == "__main__":
    arm, kind, tuning, optimizer, out = sys.argv[1:]
    card = torch.cuda.get_device_properties(0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_GIB * 2**30 / card.total_memory))
    torch.manual_seed(0)
    Config = arms.Config
    arms.Config = lambda **fields: Config(**fields | {"optimizer": optimizer})
    model, tokenizer = random_weights(tuning, "bfloat16")
    work = make_workload(tokenizer, SIZES["gpu"].shape(kind), 0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    setup = Setup(model, tokenizer, work, cuda=True, bf16=True, warmup=2, tuned=(4, False))
    found = asdict(arms.measure(arm, setup, say=print))
    found["work done"] = found.pop("completion_ids") == work.completion_ids
    for name in ("rewards", "timeline"):
        found.pop(name)
    found |= {"arm": arm, "kind": kind, "tuning": tuning, "optimizer": optimizer, "device": card.name}
    found["reserved ever"] = torch.cuda.max_memory_reserved() / 2**30
    Path(out).write_text(json.dumps(found, indent=1) + "\n")
    print(found)
