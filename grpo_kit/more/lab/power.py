"""Before the hours are spent: how many seeds show a difference between two settings, and the least that hours show.

Two settings are compared by the laboratory's own test (statistics.difference_over_seeds), seed by seed on the same
held-out rows. What seeds do to a result is taken from the kit's own runs (`python -m benchmarks.power`): experiments of
SmolLM2-135M, most of them on the task "largest". `spread` says it of your own task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.special import nctdtr, ndtri, stdtrit

from grpo_kit._support.argument_checks import check_above_zero, check_task
from grpo_kit.evaluation._shown import ShownTable, shown
from grpo_kit.evaluation.accuracy import evaluate
from grpo_kit.evaluation.readiness import Readiness, readiness
from grpo_kit.loop.config import Config
from grpo_kit.loop.run_checks import mark_trained, trained_in
from grpo_kit.record.files import read_metrics
from grpo_kit.trainer.grpo_trainer import GRPOTrainer
from grpo_kit.trainer.presets import preset

if TYPE_CHECKING:
    from grpo_kit.tasks import Task

# By kind of task, of the difference between two settings: standard deviations over seeds, each of a fifth of the
# experiments; the variance of one seed on one row; that of a row over all seeds (benchmarks/results/power.json).
SPREADS = {
    "answer": (0.052, 0.085, 0.095, 0.106, 0.138),
    "code": (0.0, 0.0, 0.031, 0.031, 0.054),
}
NOISE = {"answer": 0.131, "code": 0.052}
ROWS = {"answer": 0.0035, "code": 0.0044}
OFTEN, MOST = 0.8, 100  # "shows": finds it 4 times of 5, with no more than so many seeds
# steps: half of the experiments have 80 % of their rise in reward by then; quarters, by 14 and 17
RISE = 15
_SEEDS, _QUESTIONS = (2, 3, 4, 5, 8, 12, 20, 30), (32, 64, 128, 256, 512, 1024)
_TIMED_ROWS = 32


def chance(
    difference: float,
    seeds: int,
    questions: int,
    *,
    spreads: Sequence[float] = SPREADS["answer"],
    noise: float = NOISE["answer"],
    rows: float = ROWS["answer"],
) -> float:
    """How often so many seeds find a difference of accuracy, in [0, 1]: its 95 % interval lies above 0.

    seeds: 2 or more, of both settings; questions: held-out rows. spreads: standard deviations over seeds that are
    equally likely, each without the noise of rows. noise: variance of one seed on one row; rows: of a row over all
    seeds. By the noncentral t distribution; the mean over spreads.

    >>> chance(0.1, 8, 256, spreads=[0.08]) > chance(0.1, 4, 256, spreads=[0.08])
    True
    """
    error = np.sqrt((np.square(spreads) + noise / questions) / seeds)
    row_error = math.sqrt(rows / questions) / error
    half_width = np.hypot(stdtrit(seeds - 1, 0.975), ndtri(0.975) * row_error)
    missed = nctdtr(seeds - 1, difference / error, half_width)
    # scipy gives NaN where it is 0 to all digits
    return float(np.mean(1 - np.nan_to_num(missed)))


def least(seeds: int, questions: int, **spread: Any) -> float:
    """The smallest difference that so many seeds find 4 times of 5; 1 where there is none below."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if chance(middle, seeds, questions, **spread) >= OFTEN:
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, repr=False)
class Power:
    """A comparison of two settings before its runs. Made by power().

    seeds: of each setting, to find `difference` 4 times of 5; None: more than 100. between: the same if the settings
    are as quiet, or as noisy, as a tenth of the kit's experiments. questions: held-out rows that there are; enough:
    with as many, further ones would save hardly a seed. steps, prompts: of one run. signal: groups with a
    signal in a step, at the start; None where no model was asked. run_seconds: of one run with its evaluation; None
    where nothing was timed. hours: those that you have. spread: arguments of chance().
    """

    task: str
    difference: float
    hours: float
    seeds: int | None
    between: tuple[int | None, int | None]
    questions: int
    enough: int
    steps: int
    prompts: int
    signal: float | None
    run_seconds: float | None
    spread: dict[str, Any]
    warnings: list[str]

    def hours_of(self, seeds: int) -> float:
        """Of both settings with so many seeds, one run after the other; NaN where nothing was timed."""
        if self.run_seconds is None:
            return math.nan
        return 2 * seeds * self.run_seconds / 3600

    @property
    def shown_in(self) -> tuple[int, float] | None:
        """(seeds, difference): the seeds that the hours hold, at most 100, and the smallest difference they show.

        None where nothing was timed, and where the hours hold fewer than two seeds.
        """
        if self.run_seconds is None:
            return None
        seeds = min(int(self.hours * 1800 / self.run_seconds), MOST)
        if seeds < 2:
            return None
        return seeds, least(seeds, self.questions, **self.spread)

    @property
    def sentence(self) -> str:
        """What the difference takes, and what the hours can show."""
        sentences = [f"A difference of {100 * self.difference:g} points needs {self._runs()}."]
        if self.shown_in is not None:
            seeds, difference = self.shown_in
            sentences.append(
                f"In {_duration(self.hours)}, {seeds} seeds show a difference of {100 * difference:.0f} points."
            )
        elif self.run_seconds is not None:
            sentences.append(
                f"In {_duration(self.hours)} there is no time for two seeds of each setting."
            )
        return " ".join([*sentences, *self.warnings])

    def _runs(self) -> str:
        """The runs that find the difference, in words."""
        if self.seeds is None:
            return f"more than {MOST} seeds of each setting"
        low, high = self.between
        text = f"{self.seeds} seeds of each setting"
        if low != high:
            text += f" ({low} if they are quiet, {high or f'over {MOST}'} if noisy)"
        text += f": runs of {self.steps} steps on {self.prompts} prompts, {self.questions} held-out questions"
        if self.enough < self.questions:
            text += f" ({self.enough} nearly do)"
        if self.run_seconds is not None:
            text += f", {_duration(self.hours_of(self.seeds))} in all"
        return text

    def table(self) -> ShownTable:
        """One row a number of seeds: `least` difference found 4 times of 5, `chance` to find yours, hours."""
        rows, cells = {}, {}
        for seeds in sorted({*_SEEDS, self.seeds or 2}):
            smallest = least(seeds, self.questions, **self.spread)
            probability = chance(self.difference, seeds, self.questions, **self.spread)
            hours = self.hours_of(seeds)
            rows[seeds] = {"least": smallest, "chance": probability, "hours": hours}
            cells[f"{seeds} seeds"] = {
                "shows": f"{100 * smallest:.0f} points" if smallest < 1 else "none",
                f"finds {100 * self.difference:g} points": f"{probability:.0%}",
                "hours": "not timed" if self.run_seconds is None else f"{hours:.2g}",
            }
        table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("seeds")
        return shown(table, self.sentence, cells)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def power(
    task: Task,
    model: Any = None,
    tokenizer: Any = None,
    config: Config | str = "auto",
    *,
    difference: float = 0.1,
    hours: float = 8,
    ready: Readiness | None = None,
    step_seconds: float | None = None,
    spread: float | None = None,
) -> Power:
    """How many seeds, steps, prompts and held-out questions show a difference of two settings, and what they cost.

    model, tokenizer: asked for a minute (kit.readiness) and trained for three steps, to time one; the weights are
    restored. Without them nothing is timed, unless step_seconds says it. difference: of held-out accuracy, in (0, 1).
    hours: those that you have. ready: a Readiness that is there. spread: the standard deviation, over seeds, of the
    difference of two settings, where you know it; None: those of the kit's own experiments.
    These are of one small model, mostly on one task: elsewhere they are a first guess. Three seeds of your own say
    more.
    Raises ValueError naming the argument, and the errors of readiness and GRPOTrainer.

    >>> kit.power(task, model, tokenizer, difference=0.05, hours=2)  # doctest: +SKIP
    """
    check_task(task)
    check_above_zero("hours", hours)
    check_above_zero("difference", difference)
    if difference >= 1:
        raise ValueError(
            f"difference={difference!r} must lie below 1: 10 points of accuracy are 0.1"
        )
    if (model is None) != (tokenizer is None):
        raise ValueError("model and tokenizer go together: give both, or neither")
    for name, value in (("step_seconds", step_seconds), ("spread", spread)):
        if value is not None:
            check_above_zero(name, value, hint="; leave it out where it is not known")
    config = preset(config)
    kind = "code" if task.answers_are == "programs" else "answer"
    spreads = (spread,) if spread else SPREADS[kind]
    used_spread = {"spreads": spreads, "noise": NOISE[kind], "rows": ROWS[kind]}
    questions = min(len(task.held_out), config.held_out)
    run_seconds = None
    if step_seconds is not None:
        run_seconds = step_seconds * _steps_worth(config, questions)
    elif model is not None:
        run_seconds = _timed(task, model, tokenizer, config, questions)
    if ready is None and model is not None:
        size = config.group_size
        ready = readiness(
            model, tokenizer, task, samples=2 * size, group_size=size, seconds=60, quiet=True
        )
    signal = None
    if ready is not None:
        signal = ready.signal_reward().value * config.prompts_per_step
    seeds_for = partial(_seeds_for, difference, **used_spread)
    enough = _enough(seeds_for)
    between = tuple(seeds_for(questions, spreads=(one,)) for one in (spreads[0], spreads[-1]))
    return Power(
        task=task.name,
        difference=difference,
        hours=hours,
        seeds=seeds_for(questions),
        between=between,
        questions=questions,
        enough=enough,
        steps=config.steps,
        prompts=min(config.steps * config.prompts_per_step, len(task.train)),
        signal=signal,
        run_seconds=run_seconds,
        spread=used_spread,
        warnings=_warnings(ready, signal, questions, enough, config),
    )


def _seeds_for(difference: float, questions: int, **spread: Any) -> int | None:
    """The fewest seeds that find the difference 4 times of 5; None: more than 100."""
    enough = (
        n for n in range(2, MOST + 1) if chance(difference, n, questions, **spread) >= OFTEN
    )
    return next(enough, None)


def _enough(seeds_for: Callable[[int], int | None]) -> int:
    """The fewest questions with which further ones would save hardly a seed."""
    fewest_seeds = seeds_for(_QUESTIONS[-1]) or MOST
    most_seeds = fewest_seeds + fewest_seeds // 8
    return next(
        (n for n in _QUESTIONS if (seeds_for(n) or math.inf) <= most_seeds), _QUESTIONS[-1]
    )


def _warnings(
    ready: Readiness | None, signal: float | None, questions: int, enough: int, config: Config
) -> list[str]:
    warnings = []
    if ready is not None and ready.verdict != "ready":
        warnings.append(
            f"First: the model is not ready ({ready.verdict}), and seeds do not mend that."
        )
    if signal is not None and signal < 1:
        remedy = "easier rows"
        if signal:
            remedy = f"prompts_per_step={math.ceil(config.prompts_per_step / signal)}"
        warnings.append(
            f"A step begins with {signal:.1f} groups that have a signal: take {remedy}."
        )
    if config.steps < RISE:
        warnings.append(
            f"{config.steps} steps are few: in the kit's runs most of the rise took {RISE}."
        )
    if questions < enough:
        warnings.append(
            f"Of held-out questions only {questions} are there: with {enough} fewer seeds do."
        )
    return warnings


def _steps_worth(config: Config, questions: int) -> float:
    """A run's steps and its evaluation, of which a question takes no longer than a completion of a step."""
    return config.steps + questions / (config.prompts_per_step * config.group_size)


def _timed(task: Any, model: Any, tokenizer: Any, config: Config, questions: int) -> float:
    """Seconds of a run: its steps, by the faster of two after a first one, and its evaluation. Weights are restored."""
    copies = [
        (p, p.detach().to("cpu", copy=True)) for p in model.parameters() if p.requires_grad
    ]
    mark = trained_in(model)
    try:
        with TemporaryDirectory() as folder:
            three_steps = replace(config, steps=3, save_steps=0, warmup=0)
            GRPOTrainer(
                model, task, three_steps, tokenizer=tokenizer, folder=folder, live=None
            ).train()
            step_seconds = min(read_metrics(folder)["step_seconds"].iloc[1:])
    finally:
        mark_trained(model, *mark)
        for parameter, copy in copies:
            parameter.data.copy_(copy)
    rows, start = task.held_out[:_TIMED_ROWS], perf_counter()
    evaluate(model, tokenizer, task, rows=rows, batch_size=config.eval_batch)
    row_seconds = (perf_counter() - start) / len(rows)
    return step_seconds * config.steps + row_seconds * questions


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1.5 else f"{60 * hours:.0f} minutes"
