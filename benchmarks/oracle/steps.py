"""The first two steps of the tiny runs: what is on record of the former trainer, and the comparison of another.

A step is a dictionary. Of each row, a completion or a turn: `rows`, the place of its question in task.train;
`episodes`, a number shared by the turns of an episode; `prompt_ids`, `completion_ids` (the end token included),
`sampler_logprobs` (at `temperature`, by the weights before the step), `rewards`, `advantages`; `parts`: the scores of
each reward. None stands where a reward, or the total, cannot judge. A group's rows are adjacent.
`updates`: for each update its `loss`, `grad_norm` (before clipping), `learning_rate` and `weights`, a summary of the
trained weights less those that the run began with.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from benchmarks.oracle.cases import FOLDER
from benchmarks.oracle.compare import Difference, number_error, summary, tensor_errors
from benchmarks.oracle.step_runs import RUNS, Run

PATH = FOLDER / "steps.json"
Step = dict[str, Any]
Train = Callable[[Run, list[Step]], list[Step]]
"""(run, forced) -> its steps. forced: the recorded steps, whose rows, episodes and completion_ids take the place of
sampling. A step that is returned may leave sampler_logprobs out."""
# The largest errors that pass. rewards, advantages and log-probabilities: absolute; the others: relative. An update by
# Adam has the size of the learning rate however small a gradient is, so a gradient's rounding shows in the weights: the
# record is of a machine with AVX-512, and one with AVX2 is up to 0.026 away in one tensor, and then 0.002 in a token.
# A wrong step is of the order of 1 away.
LIMITS = {"rewards": 1e-6, "advantages": 1e-4, "sampler_logprobs": 5e-3}
UPDATE_LIMITS = {"loss": 3e-5, "grad_norm": 1e-4, "learning_rate": 1e-6}
WEIGHTS_LIMIT = 1e-3
ROUNDED_LIMIT = 0.1  # of a tensor, where the middle one of all keeps WEIGHTS_LIMIT
EXACT = ("rows", "episodes", "prompt_ids", "completion_ids")


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the trained weights by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def change(model: torch.nn.Module, start: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """The summary of the trained weights less those of `start`."""
    return summary({name: tensor - start[name] for name, tensor in weights(model).items()})


@functools.cache
def recorded_steps() -> dict[str, list[Step]]:
    """The record: the steps of each run by its name."""
    runs = json.loads(PATH.read_text())["runs"]
    for step in (step for steps in runs.values() for step in steps):
        step["prompt_ids"] = [step["prompt_ids"][place] for place in step.pop("prompt_of")]
    return runs


def compare_steps(train: Train, *, runs: Iterable[Run] | None = None) -> list[Difference]:
    """How far the steps of `train`, on the recorded completions, are from the record. runs: all of RUNS unless given.

    >>> all(d.passes for d in compare_steps(loop_steps))  # doctest: +SKIP
    True
    """
    made = []
    for run in RUNS.values() if runs is None else runs:
        wanted = recorded_steps()[run.name]
        got = train(run, wanted)
        made.append(
            Difference(run.name, "number of steps", float(len(got) != len(wanted)), 0.0)
        )
        for number, (one, other) in enumerate(zip(got, wanted, strict=False), start=1):
            made += step_differences(f"{run.name}, step {number}", one, other)
    return made


def step_differences(name: str, got: Step, wanted: Step) -> list[Difference]:
    """The differences of one step. A number that stands for None, or a list of another length, differs by infinity."""
    made = [Difference(name, what, float(got[what] != wanted[what]), 0.0) for what in EXACT]
    made.append(
        Difference(name, "temperature", abs(got["temperature"] - wanted["temperature"]), 1e-9)
    )
    for what, limit in LIMITS.items():
        if what in got or what != "sampler_logprobs":
            made.append(Difference(name, what, _furthest(got[what], wanted[what]), limit))
    for part in got["parts"].keys() | wanted["parts"].keys():
        error = _furthest(got["parts"].get(part), wanted["parts"].get(part))
        made.append(Difference(name, f"part of reward {part}", error, LIMITS["rewards"]))
    count = len(got["updates"]) != len(wanted["updates"])
    made.append(Difference(name, "number of updates", float(count), 0.0))
    for one, other in zip(got["updates"], wanted["updates"], strict=False):
        for what, limit in UPDATE_LIMITS.items():
            # terms of a loss cancel; each is of the order of 0.1
            least = 0.1 if what == "loss" else 0.0
            made.append(
                Difference(name, what, number_error(one[what], other[what], least), limit)
            )
        errors = tensor_errors(one["weights"], other["weights"])
        most = (
            ROUNDED_LIMIT
            if statistics.median(errors.values()) <= WEIGHTS_LIMIT
            else WEIGHTS_LIMIT
        )
        made += [
            Difference(name, f"weights of {tensor}", e, most) for tensor, e in errors.items()
        ]
    return made


def _furthest(got: Any, wanted: Any) -> float:
    """The largest absolute error of two nested lists of numbers and None."""
    if isinstance(got, Sequence) and isinstance(wanted, Sequence) and len(got) == len(wanted):
        return max(map(_furthest, got, wanted), default=0.0)
    if isinstance(got, int | float) and isinstance(wanted, int | float):
        return abs(got - wanted) if math.isfinite(got) else math.inf
    return 0.0 if got is None and wanted is None else math.inf
