"""Failures made on purpose: short real runs of SmolLM2-135M that each go wrong in one known way.

    python -m benchmarks.induced_failures                  # all that are not there yet, minutes each on one thread
    python -m benchmarks.induced_failures cold other_script

Each leaves a run folder under runs/induced/<name>, with what was done to it in induced.json. The tests keep small
copies of them (tests/fixtures/flags/induced) and check which red flag each raises, and after how many steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import ROOT, command_line
from grpo_kit import GRPOTrainer, HeldOut, load_policy, preset, tasks
from grpo_kit.engine.fast import fast
from grpo_kit.rewards import ExactAnswer, Language, extract_answer
from grpo_kit.tasks import Task

_WORDS = (
    "house water bread night friend winter river school letter garden mother market window summer forest table "
    "street morning doctor flower music paper animal silver brother station village kitchen island holiday"
).split()


def words_written(completions: Sequence[str], **columns: Any) -> list[float]:
    """One point for 40 words and more: pays for length and for nothing else."""
    return [min(len(text.split()) / 40, 1.0) for text in completions]


def hard_countdown() -> Task:
    """Four numbers, which the model hardly ever solves."""
    return tasks.countdown(n_train=64, n_held_out=8, numbers=(4, 4))


def wrong(completions: Sequence[str], **columns: Any) -> list[float]:
    """The opposite of the exact answer: added to it with equal weight, every completion earns the same."""
    return [1.0 - score for score in ExactAnswer()(completions, **columns)]


wrong.columns = ("answer", "prefill")


def larger(completions: Sequence[str], prefill: Sequence[str], **columns: Any) -> list[float]:
    """Meant for "which is the largest": the number in the answer / 99. That 99 is not in the question is the hole."""
    texts = [
        extract_answer(start + text) for start, text in zip(prefill, completions, strict=True)
    ]
    return [
        min(int(text) / 99, 1.0) if text and text.strip().isdecimal() else 0.0 for text in texts
    ]


def in_points(
    completions: Sequence[str], points: Sequence[float], **columns: Any
) -> list[float]:
    """The exact answer, worth as many points as its row says."""
    scores = ExactAnswer()(completions, **columns)
    return [score * worth for score, worth in zip(scores, points, strict=True)]


def two_sources() -> Task:
    """Rows of two sources, one after the other: 12 whose answers are worth 1 point, then some that are worth 100."""
    task = tasks.largest(n_train=64, n_held_out=8)
    train = [
        {**row, "points": 1.0 if place < 12 else 100.0} for place, row in enumerate(task.train)
    ]
    return replace(task, train=train)


def translate() -> Task:
    """Questions that are answered in Cyrillic letters at first; a reward for Latin ones moves them into English."""
    rows = [
        {"question": f"How do you say '{word}' in Russian?", "answer": ""} for word in _WORDS
    ]
    return Task(
        name="translate",
        train=rows[4:],
        held_out=rows[:4],
        rewards=[Language("latin")],
        reward_weights=[1.0],
        is_correct=lambda text, row: False,
        max_completion_tokens=16,
    )


@dataclass(frozen=True)
class Failure:
    """what: done to the run, in words. flags: those it raises, with the steps it takes. changes: of Config.

    evaluated: measures 16 held-out rows every 3 steps. in_order: rows are taken as they stand.
    prompts: of a step, 8 completions each.
    """

    what: str
    flags: dict[str, int]
    steps: int = 10
    prompts: int = 2
    tuning: str = "full"
    changes: dict[str, Any] = field(default_factory=dict)
    evaluated: bool = False
    in_order: bool = False
    task: Callable[[], Task] = tasks.largest
    rewards: Callable[[], list] | None = None
    weights: list[float] | None = None


FAILURES = {
    "rate_too_high": Failure(
        "learning rate 100 times the profile's, no warmup",
        {"cut off": 3, "sparse reward": 7},
        changes={"learning_rate": 1e-3},
    ),
    "rate_with_beta": Failure(
        "learning rate 30 times the profile's, with a KL term",
        {"KL spike": 5},
        changes={"learning_rate": 3e-4, "beta": 0.04},
    ),
    "cold": Failure(
        "sampling temperature 0.05",
        {"mode collapse": 5, "entropy collapse": 5},
        changes={"temperature": 0.05},
    ),
    "units": Failure(
        "from step 7 on answers are worth 100 in place of 1, and scale='none' lets it through",
        {"gradient spike": 7},
        steps=9,
        changes={"scale": "none"},
        in_order=True,
        task=two_sources,
        rewards=lambda: [in_points],
        weights=[1.0],
    ),
    "pays_for_length": Failure(
        "a reward for the number of words",
        {"length explosion": 9},
        steps=12,
        changes={"max_completion_tokens": 48, "learning_rate": 3e-5},
        rewards=lambda: [words_written],
        weights=[1.0],
    ),
    "hole": Failure(
        "the larger the number the better, whether the question has it or not; exactness is measured, with weight 0",
        {"hacking": 12},
        steps=14,
        changes={"learning_rate": 3e-5},
        evaluated=True,
        rewards=lambda: [larger, ExactAnswer()],
        weights=[1.0, 0.0],
    ),
    "other_script": Failure(
        "a reward for Latin letters, where the questions ask for Russian, and no warmup",
        {"language switch": 3},
        steps=12,
        changes={"learning_rate": 3e-5},
        task=translate,
    ),
    "cancelling": Failure(
        "exact answer and its opposite, in equal parts",
        {"cancelling parts": 5},
        steps=6,
        rewards=lambda: [ExactAnswer(), wrong],
        weights=[0.5, 0.5],
    ),
    "sparse": Failure(
        "countdown with four numbers, nothing but the exact answer counts",
        {"sparse reward": 5},
        steps=8,
        task=hard_countdown,
        rewards=lambda: hard_countdown().rewards[:1],
        weights=[1.0],
    ),
    "constant_strategy": Failure(
        "countdown with two numbers, LoRA at 4e-4, no warmup: nearly every completion is 'a + b' from step 11 on, "
        "and with the format that earns more than 0.6 of the reward",
        {"entropy collapse": 14},
        steps=16,
        prompts=4,
        tuning="lora",
        changes={"learning_rate": 4e-4},
        task=lambda: tasks.countdown(numbers=(2, 2)),
    ),
    "cut_off": Failure(
        "4 tokens where an answer takes 6",
        {"cut off": 3},
        steps=6,
        changes={"max_completion_tokens": 4},
    ),
}


class InOrder:
    """A sample that takes the rows as they stand in the task, in place of those that were drawn."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(
        self, model: Any, tokenizer: Any, task: Task, rows: Sequence, config: Any, numbers: Any
    ) -> Any:
        """As the inner one, with the rows of this step."""
        begin = numbers.step * len(rows)
        return self._inner(
            model, tokenizer, task, task.train[begin : begin + len(rows)], config, numbers
        )


def run(name: str, folder: Path) -> None:
    """Train one failure, with what it leaves open as in the cpu profile."""
    failure = FAILURES[name]
    cfg = preset("cpu", prompts_per_step=failure.prompts, steps=failure.steps, seed=0)
    torch.manual_seed(0)
    model, tokenizer = load_policy(
        cfg.model, tuning=failure.tuning, dtype="float32", quiet=True
    )
    task, changes = failure.task(), dict(failure.changes)
    rewards = failure.rewards() if failure.rewards else task.rewards
    weights = failure.weights or task.reward_weights
    longest = changes.pop("max_completion_tokens", task.max_completion_tokens)
    task = replace(
        task, rewards=rewards, reward_weights=list(weights), max_completion_tokens=longest
    )
    config = preset(cfg, tuning=failure.tuning, warmup=0, **changes)
    held_out = HeldOut(task, rows=16, every=3) if failure.evaluated else None
    sample = InOrder(fast(model, config).sample) if failure.in_order else None
    GRPOTrainer(
        model,
        task,
        config,
        tokenizer=tokenizer,
        folder=folder,
        held_out=held_out,
        sample=sample,
    ).train()
    about = {
        "name": name,
        "what": failure.what,
        "flags": failure.flags,
        "changes": failure.changes,
    }
    (folder / "induced.json").write_text(json.dumps(about, indent=2) + "\n")


def main() -> None:
    """Run those named, or all; a run that is there is left alone."""
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="*", help="which; none means all")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "induced")
    options = parser.parse_args()
    for name in options.names or FAILURES:
        if not (options.folder / name / "induced.json").exists():
            print(f"== {name}: {FAILURES[name].what}", flush=True)
            run(name, options.folder / name)


if __name__ == "__main__":
    main()
