"""One step of one arm on a card capped at 22.5 GiB, with the optimizer of gpu24: peaks and seconds by phase.

    python -m benchmarks.card.step kit realistic full adamw-8bit-split OUT.json

Arms and work are those of benchmarks.step, weights random in Qwen2.5-1.5B's shapes, in bfloat16 (float32 on a card
without it); the last step is measured (the third). --small: tiny shapes, to see that it runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.card.decode import capped_card
from benchmarks.result import command_line
from benchmarks.step import arms
from benchmarks.step.setup import Setup
from benchmarks.step.sizes import SIZES, WORKLOADS, qwen_config, random_weights, tiny_config
from benchmarks.step.workload import make_workload
from grpo_kit._support.cuda import has_bf16


def main() -> None:
    """Measure, save, print."""
    parser = command_line(__doc__)
    parser.add_argument("arm", choices=arms.ARMS)
    parser.add_argument(
        "kind", choices=[kind for kind in WORKLOADS if kind not in ("main-job", "think")]
    )
    parser.add_argument("tuning", choices=("full", "lora"))
    parser.add_argument(
        "optimizer", help="of the kit's Config, such as adamw or adamw-8bit-split"
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--warmup", type=int, default=2, help="steps before the measured one")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that it runs")
    asked = parser.parse_args()
    name = capped_card()
    torch.manual_seed(0)
    Config = arms.Config
    arms.Config = lambda **fields: Config(**fields | {"optimizer": asked.optimizer})
    bf16, size = has_bf16(), SIZES["smoke" if asked.small else "gpu"]
    shapes = tiny_config() if asked.small else qwen_config()
    model, tokenizer = random_weights(asked.tuning, "bfloat16" if bf16 else "float32", shapes)
    work = make_workload(tokenizer, size.shape(asked.kind), 0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    setup = Setup(
        model, tokenizer, work, cuda=True, bf16=bf16, warmup=asked.warmup, tuned=(4, False)
    )
    found = asdict(arms.measure(asked.arm, setup, say=print))
    found["work done"] = found.pop("completion_ids") == work.completion_ids
    for left_out in ("rewards", "timeline"):
        found.pop(left_out)
    found |= {key: value for key, value in vars(asked).items() if key != "out"} | {
        "device": name
    }
    found["reserved ever"] = torch.cuda.max_memory_reserved() / 2**30
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(found)


if __name__ == "__main__":
    main()
