"""The update's memory at full scale by a card's allocator: counted, not run. Beside kit.plan_memory.

    python -m benchmarks.card.full_memory

One chunk of Qwen2.5-1.5B's shapes, cut as the plan of each card cuts it, goes forward and backward with tensors that
have sizes and no data (benchmarks.memory); when each tensor comes and goes is noted, and the pretend card's allocator
is asked for the same bytes in the same order. Its memory is never written, so it needs none of the host's.
Saves results/card_memory.json.

Simplifications: no QLoRA; of the optimizer one tensor a parameter; one chunk behind others. The kit asks for expandable
segments, which the pretend card has not: what they would join lies idle between tensors here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.card.expect import LENGTHS, PROMPT_TOKENS, plan_of
from benchmarks.card.peaks import CARDS, MODEL, Peaks
from benchmarks.memory import fake_model, measure_chunk, norms_of_a_card
from benchmarks.result import RESULTS, ROOT, command_line, origin, write_result
from grpo_kit.engine.optim.choose import OPTIMIZERS
from grpo_kit.models._model_facts import config_of

GIB = 2**30
RIG = ROOT / "tests" / "pretend_card"
LENGTH = LENGTHS[1]
NAMES = {card.name: card.name.lower().replace(" ", "") for card in CARDS}  # the pretend card's


def allocations(kind: str, plan: Any) -> list[tuple[int, int]]:
    """(tensor, its bytes, 0 when it goes) in the order of one chunk, weights, gradients and optimizer first."""
    from torch._subclasses import FakeTensorMode

    full = kind == "full"
    scored = round(plan.chunk_tokens * 8 * LENGTH / (PROMPT_TOKENS - 1 + 8 * LENGTH))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(config_of(MODEL), torch.bfloat16, lora=not full)
        trained = [p for p in model.parameters() if p.requires_grad]
        a_weight = OPTIMIZERS["adamw-8bit-split"].state_of(2) if full else 8.0
        states = [(-1 - place, round(a_weight * p.numel())) for place, p in enumerate(trained)]
        with norms_of_a_card(model):
            events = measure_chunk(
                model,
                tokens=plan.chunk_tokens,
                scored=scored,
                checkpointed=plan.checkpointed_layers,
                gradients=True,
                autocast=not full,
                dense_mask=False,
            )["events"]
    return states + events


def by_the_allocator(events: list[tuple[int, int]]) -> dict[str, float]:
    """GiB that the card's allocator gave and took from the card at most; in a process that has a pretend card."""
    import card

    card.put("poison", 0)
    held: dict[int, Any] = {}
    try:
        for tensor, size in events:
            if size:
                held[tensor] = torch.empty(size, dtype=torch.uint8, device="cuda")
            else:
                held.pop(tensor, None)
        ended = "fits"
    except torch.OutOfMemoryError:
        ended = "out of memory"
    stats = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    return {"ended": ended, "allocated GiB": stats[0], "reserved GiB": stats[1]}


def on_a_card(name: str, events: list[tuple[int, int]]) -> dict[str, Any]:
    """by_the_allocator of that pretend card."""
    code = "import sys, json, card; card.install(sys.argv[1]); from benchmarks.card import full_memory as f; "
    code += "print(json.dumps(f.by_the_allocator(json.load(open(sys.argv[2])))))"
    paths = os.pathsep.join([str(RIG), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        (asked := Path(folder) / "events.json").write_text(json.dumps(events))
        command = [sys.executable, "-c", code, NAMES[name], str(asked)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"the pretend card ended with:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def row(peaks: Peaks, kind: str) -> dict[str, Any]:
    """One card and tuning: the plan's update and the allocator's."""
    plan = plan_of(kind, peaks, LENGTH)
    planned = (
        sum(size for part, size in plan.parts["update"].items() if part != "reserve") / GIB
    )
    found = {"card": peaks.name, "tuning": kind, "chunk tokens": plan.chunk_tokens}
    found |= {"checkpointed layers": plan.checkpointed_layers, "planned GiB": planned}
    found |= {"planned with reserve GiB": plan.peak_gib, "usable GiB": plan.usable_gib}
    return found | on_a_card(peaks.name, allocations(kind, plan))


def main() -> None:
    """All cards that have bfloat16, save."""
    command_line(__doc__).parse_args()
    result = origin(
        "python -m benchmarks.card.full_memory", "torch", "transformers", "peft"
    ) | {"rows": []}
    for peaks in CARDS:
        for kind in ("full", "LoRA") if peaks.bf16 else ():
            result["rows"].append(row(peaks, kind))
            print(result["rows"][-1], flush=True)
    write_result(RESULTS / "card_memory.json", result)


if __name__ == "__main__":
    main()
