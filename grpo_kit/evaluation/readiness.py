"""Is a model ready for GRPO on a task? Counted before training, from samples at the training temperature.

Longer than 300 lines because the numbers, the verdict and its words are read together.

GRPO learns from groups whose completions differ in reward, and mostly makes rare right answers likelier.
So readiness counts: how often the model is right in 1 to 64 tries, how many groups have a signal, what prevents it.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_kit.argument_checks import (
    check_model,
    check_task,
    check_temperature,
    check_tokenizer,
    check_whole,
    is_whole,
)
from grpo_kit.evaluation.constant import Constant, constant_reward, doing
from grpo_kit.evaluation.generate_and_score import Answers, check_rows
from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean, mean_reward, pass_at_k, wilson_interval
from grpo_kit.evaluation.lengths import Lengths
from grpo_kit.evaluation.portions import answer_in_portions, check_seconds
from grpo_kit.evaluation.reflection_words import count_words, word_table
from grpo_kit.evaluation.verdict import (
    ALWAYS,
    EVER,
    FEWEST,
    FORMATTED,
    MEASURES,
    SIGNAL,
    VERDICTS,
    doubtful,
    possible_verdicts,
    verdict_of,
)
from grpo_kit.record.kept_results import write_where_asked
from grpo_kit.record.lines import read_json, reading
from grpo_kit.rewards.auditing import audit
from grpo_kit.rewards.parts import range_of
from grpo_kit.rewards.scoring import Scores
from grpo_kit.tasks.measure import Measure

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_kit.tasks import Task

_FORMAT_ALONE = (
    "training would learn the format and not the task: take easier rows, partial credit or a stronger model"
)


def signal_share(counts: Sequence[int], group_size: int, *, unjudged: int = 0) -> float:
    """The probability that a group drawn from one prompt's samples, without replacement, has a signal.

    counts: how many samples had each value (right and wrong, or each reward). unjudged: samples without a reward, which
    do not count for a group's signal. Unbiased for 1 - sum of p ** group_size
    over the values, like pass_at_k for its own quantity.
    Raises ValueError unless 2 <= group_size <= the number of samples.

    >>> round(signal_share([1, 3], 2), 3)
    0.5
    """
    n = sum(counts) + unjudged
    if min(counts, default=0) < 0 or not 2 <= group_size <= n:
        raise ValueError(f"group_size={group_size!r} must lie in 2..{n}, the samples of a prompt")
    nobody = math.comb(unjudged, group_size)
    alike = nobody + sum(math.comb(count + unjudged, group_size) - nobody for count in counts)
    return 1 - alike / math.comb(n, group_size)


@dataclass(frozen=True, repr=False)
class Readiness:
    """Counts of a model's samples on a task before training. Made by readiness().

    right, lenient, formatted: of `samples`, by prompt: right; right by evaluate's lenient reading;
    with a readable answer. For episodes: how many succeed; None; the sum of their shares of valid actions.
    rewards: by prompt, {reward (the total): samples that earned it}; samples without a reward are left out.
    right and lenient are None if nothing is right or wrong, formatted if no form is required (tasks.measure).
    measure: basis of the verdict, "accuracy" or "reward". credit: by prompt, {score by the rewards that judge answers:
    samples}; None: not known. top: the highest possible, or observed, reward. constant_reward: name and
    mean reward of the best completion given to every row, if the reward is the measure.
    lengths: of all samples. words: counts of aha.count_words. constant: the best constant strategy, name and accuracy.
    audit: one sentence on how often the reward is wrong about texts made from the first 8 golds (kit.rewards.audit);
    None for code, episodes, rows without an answer, and if the reward is the measure.
    """

    task: str
    samples: int
    group_size: int
    questions: list[str]
    right: list[int] | None
    lenient: list[int] | None
    formatted: list[float] | None
    rewards: list[dict[float, int]]
    lengths: Lengths
    words: dict[str, int]
    constant: Constant | None
    settings: dict[str, Any]
    audit: str | None = None
    measure: Measure = "accuracy"
    credit: list[dict[float, int]] | None = None
    top: float = 1.0
    constant_reward: Constant | None = None
    asked_for: int | None = None
    needs: float | None = None

    @property
    def n(self) -> int:
        """Number of prompts."""
        return len(self.questions)

    @property
    def pass_at(self) -> dict[int, Estimate]:
        """k -> pass@k, for 1, 2, 4, ... and all samples; {} if nothing is right or wrong."""
        return {} if self.right is None else self._pass_at(self.right)

    @property
    def lenient_pass_at(self) -> dict[int, Estimate]:
        """The same by the lenient reading: answers that the model may know but does not tag; {} for episodes."""
        return {} if self.lenient is None else self._pass_at(self.lenient)

    def _pass_at(self, right: Sequence[int], ks: Sequence[int] | None = None) -> dict[int, Estimate]:
        ks = ks or sorted({*(1 << i for i in range(self.samples.bit_length())), self.samples})
        return {k: bootstrap_mean([pass_at_k(self.samples, c, k) for c in right]) for k in ks}

    @property
    def mean_reward(self) -> Estimate:
        """Mean over the prompts with a reward, each the mean of its samples."""
        held = [counts for counts in self.rewards if counts]
        means = [sum(r * n for r, n in counts.items()) / sum(counts.values()) for counts in held]
        return mean_reward(means or [0.0])

    @property
    def format_rate(self) -> Estimate | None:
        """Share of samples with a readable answer; for episodes, of valid actions. None if no form is required."""
        if self.formatted is None:
            return None
        return bootstrap_mean([count / self.samples for count in self.formatted])

    def signal_right(self, group_size: int | None = None) -> Estimate:
        """Expected share of groups with both right and wrong completions. group_size: None means self.group_size."""
        size = self.group_size if group_size is None else group_size
        return bootstrap_mean([signal_share([c, self.samples - c], size) for c in self.right or [0] * self.n])

    def signal_reward(self, group_size: int | None = None) -> Estimate:
        """Expected share of groups with unequal rewards: format and soft parts carry a signal too."""
        return self._signal_of(self.rewards, group_size)

    def signal_credit(self, group_size: int | None = None) -> Estimate:
        """The same for the scores of rewards that judge the answer, without format and other parts."""
        return self._signal_of([{}] * self.n if self.credit is None else self.credit, group_size)

    def _signal_of(self, held_by: Sequence[dict[float, int]], group_size: int | None) -> Estimate:
        size = self.group_size if group_size is None else group_size
        return bootstrap_mean(
            [
                signal_share(list(held.values()), size, unjudged=self.samples - sum(held.values()))
                for held in held_by
            ]
        )

    @property
    def verdict(self) -> str:
        """One of VERDICTS; see evaluation.verdict."""
        values = {name: estimate.value for name, estimate in self._deciding.items()}
        return verdict_of(values, self.top, self._nothing_paid)

    @property
    def possible(self) -> list[str]:
        """The verdicts for which every measure has a value inside its 95 % interval, in the order of VERDICTS."""
        return possible_verdicts(self._deciding, self.top, self._nothing_paid)

    @property
    def sure(self) -> bool:
        """Is no other verdict possible, after at least 16 rows?"""
        return self.n >= FEWEST and len(self.possible) == 1

    @property
    def _deciding(self) -> dict[str, Estimate]:
        """The measures of the verdict, by the names of verdict_of."""
        found = {"unequal": self.signal_reward()}
        if self.formatted is not None:
            found["formatted"] = self.format_rate
        if self.measure == "reward":
            return found | {"mean": self.mean_reward}
        found |= {"once": self._pass_at(self.right, [1])[1], "mixed": self.signal_right()}
        found |= {
            "ever": self._pass_at(self.right, [self.samples])[self.samples],
            "credit": self.signal_credit(),
        }
        if self.constant is not None:
            share = self.constant[1]
            found["constant"] = Estimate(share, *wilson_interval(share * self.n, self.n), self.n)
        return found

    @property
    def _nothing_paid(self) -> bool:
        return all(paid <= 0 for counts in self.credit or self.rewards for paid in counts)

    @property
    def reason(self) -> str:
        """The numbers behind the verdict and what to do, in a sentence each."""
        verdict, unequal = self.verdict, self.signal_reward().value
        told = f"{verdict}: {self._why[verdict]}. So: {self._advice(verdict)}."
        if self.measure == "accuracy":
            told += self._guess_beside(verdict)
            if verdict not in ("ready", "never succeeds") and unequal >= SIGNAL:
                told += f" (In {unequal:.0%} of groups rewards would differ all the same: that is learnt meanwhile.)"
        elif self.constant_reward and self.constant_reward[1] > self.mean_reward.value:
            what = doing(self.constant_reward)
            told += f" ({what[0].upper()}{what[1:]} earns {self.constant_reward[1]:.2f}: compare with that.)"
        told += self._how_sure(verdict)
        return told if self.audit is None else f"{told} Audit of the reward: {self.audit}"

    @property
    def sentence(self) -> str:
        """GO or CHANGE SOMETHING FIRST, and the reason."""
        return f"{'GO' if self.verdict == 'ready' else 'CHANGE SOMETHING FIRST'}  {self.reason}"

    def _how_sure(self, verdict: str) -> str:
        """For a run that ended before its last row: why it ended, and what would make the verdict surer."""
        of, others = self.asked_for or self.n, [one for one in self.possible if one != verdict]
        if self.n >= of:
            return ""
        if self.sure:
            return f" (Sure after {self.n} of {of} rows: no other verdict holds within the 95 % intervals.)"
        last = "mean" if self.measure == "reward" else "once"
        decides = [*doubtful(self._deciding, self.top, self._nothing_paid), last][0]
        one = self._deciding[decides]
        measured = f"{MEASURES[decides]} {one.value:.2f}, 95 % interval {one.low:.2f} to {one.high:.2f}"
        too_few = f"and fewer than {FEWEST} rows are too few to be sure"
        doubt = f"so it may be {' or '.join(map(repr, others))} too" if others else too_few
        ask = "" if self.needs is None else f"; seconds={math.ceil(self.needs)} would look at about all"
        return f" (Not sure after {self.n} of {of} rows: {measured}, {doubt}{ask}.)"

    def _advice(self, verdict: str) -> str:
        if (
            self.measure == "accuracy"
            and verdict == "never succeeds"
            and self.signal_reward().value >= SIGNAL
        ):
            return _FORMAT_ALONE
        if self.measure == "accuracy" and verdict == "ready" and self.signal_right().value < SIGNAL:
            return "train, and see whether accuracy follows the reward"
        return VERDICTS[verdict]

    def _guess_beside(self, verdict: str) -> str:
        """The score of a constant strategy, if it beats the model."""
        (name, share), once = self.constant or ("", 0.0), self.pass_at[1].value
        if share <= once or verdict not in ("ready", "rarely succeeds"):
            return ""
        return (
            f" ({name!r} is right for {share:.0%} of these prompts without reading the question: compare with that, "
            f"and not with {once:.0%}.)"
        )

    @property
    def _why(self) -> dict[str, str]:
        """The numbers behind each verdict."""
        unequal, size = self.signal_reward().value, self.group_size
        shown = "" if self.formatted is None else _share(self.format_rate.value, FORMATTED)
        unread = f"{shown} of samples have a readable answer, below {FORMATTED:.0%}"
        if self.measure == "reward":
            mean = f"the mean reward is {self.mean_reward.value:.2f}"
            differ = f"in {_share(unequal, SIGNAL)} of groups of {size} rewards would differ"
            in_full = f", {self.pass_at[1].value:.0%} of samples earn it in full" if self.pass_at else ""
            return {
                "format first": f"{unread}, and {differ}",
                "never succeeds": f"no sample earns anything, and {differ}, below {SIGNAL:.0%}",
                "too easy": f"{mean} of at most {self.top:g}, and {differ}",
                "rarely succeeds": f"{mean}, and {differ}, below {SIGNAL:.0%}",
                "ready": f"{mean}{in_full}, and {differ}",
            }
        once, ever = self.pass_at[1].value, self.pass_at[self.samples].value
        guessed, mixed = self.lenient_pass_at.get(1), self.signal_right().value
        in_any = f"{_share(ever, EVER)} of prompts are right in any of {self.samples} samples"
        groups = f"{_share(mixed, SIGNAL)} of groups of {size} would hold right and wrong"
        partly = f", and in {_share(self.signal_credit().value, SIGNAL)} answers earn unequal partial credit"
        by_format = f", and only by format or other parts do rewards differ, in {unequal:.0%} of groups"
        name, share = self.constant or ("", 0.0)
        guess = f"{name!r} is right for {share:.0%} of these prompts without reading the question"
        return {
            "format first": f"{shown} of an episode's actions are valid, below {FORMATTED:.0%}"
            if guessed is None
            else f"{unread} (read leniently, {guessed.value:.0%} are right)",
            "never succeeds": f"{in_any}, below {EVER:.0%}{by_format * (unequal >= SIGNAL)}",
            "shortcut pays": f"pass@1 is {once:.0%}, and {guess}, so not ready",
            "too easy": f"{_share(once, ALWAYS)} of samples are right, above {ALWAYS:.0%}",
            "rarely succeeds": f"{groups}, below {SIGNAL:.0%}",
            "ready": f"{once:.0%} of samples are right, {in_any}, and {groups}{partly * (mixed < SIGNAL)}",
        }

    def __repr__(self) -> str:
        return f"Readiness({self.task!r}, {self.n} prompts x {self.samples} samples: {self.verdict})\n{self.reason}"

    def table(self) -> pd.DataFrame:
        """One row a measure: value, low, high (95 %), n; the best constant strategy last."""
        size = self.group_size
        named = {"mean reward": self.mean_reward} if self.measure == "reward" else {}
        if self.formatted is not None:
            episodes = self.right is not None and self.lenient is None
            named["valid actions" if episodes else "readable answer"] = self.format_rate
        named |= {f"pass@{k}": estimate for k, estimate in self.pass_at.items()}
        if self.lenient is not None:
            named["right, read leniently"] = self.lenient_pass_at[1]
        if self.right is not None:
            named[f"groups of {size} with right and wrong"] = self.signal_right()
        named[f"groups of {size} with unequal rewards"] = self.signal_reward()
        rows = {name: asdict(estimate) for name, estimate in named.items()}
        best = self.constant_reward if self.measure == "reward" else self.constant
        if best is not None:
            rows[best[0]] = {"value": best[1], "low": None, "high": None, "n": self.n}
        table = pd.DataFrame.from_dict(rows, orient="index").rename_axis(self.task)
        return table.astype({"value": float, "low": float, "high": float, "n": int})

    def aha(self) -> pd.DataFrame:
        """Words of self-reflection in the samples; see grpo_kit.evaluation.reflection_words."""
        return word_table(self.words, self.n * self.samples)

    def _repr_html_(self) -> str:
        table = self.table().to_html(float_format="{:.3f}".format, na_rep="")
        return f"<p><b>{html.escape(self.reason)}</b></p>{table}"

    def save(self, path: str | os.PathLike) -> None:
        """Write everything to one JSON file; Readiness.load reads it."""
        write_where_asked(path, (json.dumps(asdict(self), ensure_ascii=False) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Readiness:
        """Read a file of save()."""
        with reading(path):
            return cls.from_dict(read_json(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Readiness:
        """Reads the dict of asdict(), also after a trip through JSON, whose keys are texts."""
        lengths = data["lengths"]
        ended = {int(tokens): count for tokens, count in lengths["ended"].items()}
        changed: dict[str, Any] = {"lengths": Lengths(ended, lengths["cut_off"], lengths["limit"])}
        for name in ("rewards", "credit"):
            counts = data.get(name)
            changed[name] = counts and [{float(r): count for r, count in one.items()} for one in counts]
        for name in ("constant", "constant_reward"):
            changed[name] = tuple(data[name]) if data.get(name) else None
        return cls(**{**data, **changed})


def readiness(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    rows: Sequence[dict] | None = None,
    samples: int = 64,
    group_size: int = 8,
    temperature: float = 1.0,
    max_completion_tokens: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    seconds: float | None = 300,
    quiet: bool = False,
) -> Readiness:
    """Sample each of the rows (default: the task's held-out rows) and count. Nothing is trained.

    samples: completions a prompt. group_size, temperature: the values of the training to come.
    max_completion_tokens: None means the task's. batch_size: sequences sampled at once; None: by free memory. The model
    is restored afterwards.
    seconds: approximate limit, above 0. The rows are answered in their order, in growing portions, until
    no other verdict is possible (Readiness.sure) or the time is over; the first two rows may exceed it. The
    counts of the first n rows are the same with any budget, except for rounding. math.inf: until it is sure. None: all
    rows, even if fewer would do, to compare two models row by row. The verdict is checked several times, so "sure"
    is a little less than 95 %.
    quiet: do not print the verdict and the advice. If interrupted, the call prints the findings so far.
    Raises ValueError naming the argument for empty rows, a group_size outside 2..samples, seconds that are no number
    above 0, and the errors of complete.

    >>> ready = readiness(model, tokenizer, largest(), seconds=60)  # doctest: +SKIP
    Readiness('largest', 32 prompts x 64 samples: ready)
    """
    check_whole("samples", samples)
    if not is_whole(group_size, 2) or group_size > samples:
        raise ValueError(f"group_size={group_size!r} must lie in 2..samples={samples!r}")
    check_temperature(temperature)
    check_seconds(seconds)
    check_model(model)
    check_tokenizer(tokenizer)
    check_task(task)
    rows = check_rows(task.held_out if rows is None else rows)
    how = {"max_completion_tokens": max_completion_tokens, "samples": samples, "temperature": temperature}
    looks: list[Readiness] = []

    def look(made: Answers) -> tuple[str, bool]:
        looks[:] = [_counted(made, group_size, len(rows))]
        return looks[0].verdict, seconds is not None and looks[0].sure

    try:
        made, needs = answer_in_portions(
            model, tokenizer, task, rows, look, seconds=seconds, batch_size=batch_size, seed=seed, **how
        )
    except KeyboardInterrupt:
        if looks and not quiet:
            print(f"Stopped. {looks[0]!r}", flush=True)
        raise
    found = replace(
        looks[0],
        audit=_audited(task, made.rows) if made.measure == "accuracy" else None,
        constant_reward=constant_reward(made) if made.measure == "reward" else None,
        needs=needs,
    )
    if not quiet:
        print(repr(found), flush=True)
    return found


def _counted(made: Answers, group_size: int, asked_for: int) -> Readiness:
    """All counts; the rewards are not called on other texts."""
    task, readings = made.task, made.readings
    accuracy = "strict" in readings
    highest = [one for one in made.rewards if one is not None]
    top = sum(w * (range_of(r) or (0.0, 1.0))[1] for r, w in _weighted(task))
    return Readiness(
        task=task.name,
        samples=made.samples,
        group_size=group_size,
        questions=[row["question"] for row in made.rows],
        right=[sum(part) for part in made.by_row(made.right)] if accuracy else None,
        lenient=[sum(part) for part in made.by_row(made.lenient)] if "lenient" in readings else None,
        formatted=[sum(part) for part in made.by_row(made.read)] if "formatted" in readings else None,
        rewards=_counts(made, made.rewards),
        lengths=Lengths.of(made.completions, made.settings["max_completion_tokens"]),
        words=count_words(made.texts),
        constant=task.best_constant(made.rows) if task.strategies and accuracy else None,
        settings=made.settings,
        measure=made.measure,
        credit=_counts(made, made.credit),
        top=max([top, *highest]),
        asked_for=None if asked_for == len(made.rows) else asked_for,
    )


def _counts(made: Answers, scores: Scores) -> list[dict[float, int]]:
    """By prompt, {score: samples}."""
    judged = [[one for one in part if one is not None] for part in made.by_row(scores)]
    return [dict(sorted(Counter(part).items())) for part in judged]


def _weighted(task: Task) -> list[tuple[Any, float]]:
    """The rewards and their weights; an episode's return has neither."""
    return list(zip(getattr(task, "rewards", [None]), getattr(task, "reward_weights", [1.0]), strict=True))


def _audited(task: Task, rows: Sequence[dict]) -> str | None:
    if not hasattr(task, "cases_for") or task.read_answer is not None:  # episodes, code
        return None
    try:
        return audit(task, rows[:8], n=8).summary
    except ValueError:  # no answers in the rows, or a reward that needs more columns
        return None


def _share(value: float, threshold: float) -> str:
    """In per cent, with one more digit if rounding would show the threshold although the value differs."""
    short = f"{value:.0%}"
    return f"{value:.1%}" if short == f"{threshold:.0%}" and value != threshold else short
