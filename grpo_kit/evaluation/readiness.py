"""Is a model ready for GRPO on a task? Counted before training, from samples at the training temperature.

Longer than 300 lines because the counts, their shares and the words for them are read together.

GRPO learns from groups whose completions differ in reward, and mostly makes rare right answers likelier.
So readiness counts: how often the model is right in 1 to 64 tries, how many groups have a signal, what prevents it.
"""

from __future__ import annotations

import html
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any

from grpo_kit._support.argument_checks import (
    check_above_zero,
    check_job,
    check_temperature,
    check_whole,
    is_whole,
)
from grpo_kit._support.display import progress_line
from grpo_kit.evaluation._as_trained import say_difference
from grpo_kit.evaluation._constant import Constant, constant_reward, in_words
from grpo_kit.evaluation._shown import ShownTable, estimates_table, with_page
from grpo_kit.evaluation._verdict import EVER, SIGNAL, earns_more, verdict_of
from grpo_kit.evaluation.generate_and_score import (
    Answers,
    Decoding,
    answer,
    check_before,
    check_rows,
)
from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean, mean_reward, pass_at_k
from grpo_kit.evaluation.lengths import Lengths, count_words
from grpo_kit.record._lines import read_json, reading
from grpo_kit.record.files import write_where_asked
from grpo_kit.rewards._parts import Reward, range_of
from grpo_kit.rewards.auditing import audit
from grpo_kit.rewards.scoring import Scores
from grpo_kit.tasks._measure import Measure, labels_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_kit.tasks import Task

VERDICTS = {
    "format first": "most samples give no readable answer: show a worked example or prefill the tag",
    "never succeeds": "there is nothing to make likelier: do SFT first, or take easier rows or a stronger model",
    "too easy": "little is left to learn: take harder rows",
    "shortcut pays": "training may find that one answer before it finds the task: take rows on which it does not pay, "
    "or a prompt with which the model is right more often; a model trained all the same has to beat that number",
    "rarely succeeds": "few groups carry a signal: larger groups, a soft reward, or easier rows",
    "ready": "train",
}
_FORMAT_ALONE = "training would learn the format and not the task: take easier rows, partial credit or a stronger model"
_NOT_BY_REWARDS = (
    "GRPO cannot learn a label from rewards alone that is never written: show it in an example of the prompt, or train "
    "on a few supervised examples first (notebook 07)."
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
        raise ValueError(
            f"group_size={group_size!r} must lie in 2..{n}, the samples of a prompt"
        )
    none_judged = math.comb(unjudged, group_size)
    alike = none_judged + sum(
        math.comb(count + unjudged, group_size) - none_judged for count in counts
    )
    return 1 - alike / math.comb(n, group_size)


@dataclass(frozen=True, repr=False)
class Readiness:
    """Counts of a model's samples on a task before training. Made by readiness().

    right, lenient, formatted: of `samples`, by prompt: right; right by evaluate's lenient reading;
    with a readable answer. For episodes: how many succeed; None; the sum of their shares of valid actions.
    rewards: by prompt, {reward (the total): samples that earned it}; samples without a reward are left out.
    right and lenient are None if nothing is right or wrong, formatted if no form is required (tasks._measure).
    measure: basis of the verdict, "accuracy" or "reward". credit: by prompt, {score by the rewards that judge answers:
    samples}; None: no reward judges answers, or it is not known. floor: the highest credit that pays nothing.
    top: the highest possible, or observed, reward. constant_reward: name and mean reward of the best completion given
    to every row, if the reward is the measure. asked_for: the rows that were asked for, if the time was over before.
    lengths: of all samples. words: of reflection_words.count_words. constant: name and accuracy of the best constant
    strategy.
    never_written: label -> rows asked that have it, of the labels that no sample has; {} where answers are no labels.
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
    floor: float = 0.0
    never_written: dict[str, int] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Number of prompts."""
        return len(self.questions)

    @property
    def pass_at(self) -> dict[int, Estimate]:
        """k -> pass@k, for 1, 2, 4, ... and all samples; {} if nothing is right or wrong."""
        if self.right is None:
            return {}
        powers = {1 << i for i in range(self.samples.bit_length())}
        return {k: self._pass_at(self.right, k) for k in sorted(powers | {self.samples})}

    def _pass_at(self, right: Sequence[int], k: int) -> Estimate:
        return bootstrap_mean([pass_at_k(self.samples, count, k) for count in right])

    @property
    def of_episodes(self) -> bool:
        """Are these episodes? Their environment decides what succeeds, and nothing is read leniently."""
        return self.right is not None and self.lenient is None

    @property
    def lenient_rate(self) -> Estimate | None:
        """Share of samples that are right if read leniently; None if nothing is read so."""
        if self.lenient is None:
            return None
        return self._pass_at(self.lenient, 1)

    @property
    def mean_reward(self) -> Estimate:
        """Mean over the prompts with a reward, each the mean of its samples."""
        means = [
            sum(reward * n for reward, n in counts.items()) / sum(counts.values())
            for counts in self.rewards
            if counts
        ]
        return mean_reward(means or [0.0])

    @property
    def format_rate(self) -> Estimate | None:
        """Share of samples with a readable answer; for episodes, of valid actions. None if no form is required."""
        if self.formatted is None:
            return None
        return bootstrap_mean([count / self.samples for count in self.formatted])

    def signal_right(self, group_size: int | None = None) -> Estimate:
        """Expected share of groups with both right and wrong completions. group_size: None means self.group_size."""
        by_prompt = [
            {1.0: count, 0.0: self.samples - count} for count in self.right or [0] * self.n
        ]
        return self._signal_of(by_prompt, group_size)

    def signal_reward(self, group_size: int | None = None) -> Estimate:
        """Expected share of groups with unequal rewards: format and soft parts carry a signal too."""
        return self._signal_of(self.rewards, group_size)

    def signal_credit(self, group_size: int | None = None) -> Estimate:
        """The same for the scores of rewards that judge the answer, without format and other parts."""
        return self._signal_of(self.credit or [{}] * self.n, group_size)

    def _signal_of(
        self, counts_of: Sequence[dict[float, int]], group_size: int | None
    ) -> Estimate:
        if group_size is None:
            group_size = self.group_size
        shares = []
        for counts in counts_of:
            unjudged = self.samples - sum(counts.values())
            shares.append(signal_share(list(counts.values()), group_size, unjudged=unjudged))
        return bootstrap_mean(shares)

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        return verdict_of(self)[0]

    @property
    def reason(self) -> str:
        """The numbers behind the verdict and what to do, in a sentence each."""
        verdict, numbers = verdict_of(self)
        sentences = [f"{verdict}: {numbers}. So: {self._advice(verdict)}."]
        if self.never_written and verdict != "format first":
            labels = [
                f"{label!r} ({rows} of {self.n} rows have it)"
                for label, rows in self.never_written.items()
            ]
            labels[5:] = [f"{len(labels) - 5} more"] * (len(labels) > 5)
            sentences.append(
                f"Never written in {self.n * self.samples:,} samples: {', '.join(labels)}. {_NOT_BY_REWARDS}"
            )
        unequal = self.signal_reward().value
        if self.measure == "accuracy":
            if verdict not in ("ready", "never succeeds") and unequal >= SIGNAL:
                sentences.append(
                    f"(In {unequal:.0%} of groups rewards would differ all the same: that is learnt meanwhile.)"
                )
        elif self.credit is None and earns_more(self.constant_reward, self.mean_reward.value):
            strategy, earned = in_words(self.constant_reward), self.constant_reward[1]
            sentences.append(
                f"({strategy[0].upper()}{strategy[1:]} earns {earned:.2f}: compare with that.)"
            )
        sentences.append(f"({self._intervals()}.)")
        if self.audit is not None:
            sentences.append(f"Audit of the reward: {self.audit}")
        return " ".join(sentences)

    @property
    def sentence(self) -> str:
        """GO or CHANGE SOMETHING FIRST, and the reason."""
        if self.verdict == "ready":
            return f"GO  {self.reason}"
        return f"CHANGE SOMETHING FIRST  {self.reason}"

    def _intervals(self) -> str:
        """The numbers that decide most verdicts with their intervals, and over how many rows."""
        if self.measure == "reward":
            rate = f"mean reward {self.mean_reward.words(rate=False)}"
            groups = f"groups with unequal rewards {self.signal_reward().words()}"
        else:
            rate = f"pass@1 {self.pass_at[1].words()}"
            groups = f"groups with right and wrong {self.signal_right().words()}"
        intervals = f"95 % intervals: {rate}, {groups}"
        if self.asked_for is None:
            return intervals
        return f"Only {self.n} of {self.asked_for} rows were asked; seconds=None asks all. {intervals}"

    def _advice(self, verdict: str) -> str:
        if (
            verdict == "never succeeds"
            and self.pass_at
            and self.pass_at[self.samples].value >= EVER
        ):
            return "score a right answer, task.score(row, [completion]): no reward pays what counts as right"
        if verdict == "never succeeds" and self.signal_reward().value >= SIGNAL:
            return _FORMAT_ALONE
        if (
            self.measure == "accuracy"
            and verdict == "ready"
            and self.signal_right().value < SIGNAL
        ):
            return "train, and see whether accuracy follows the reward"
        return VERDICTS[verdict]

    def __repr__(self) -> str:
        return f"Readiness({self.task!r}, {self.n} prompts x {self.samples} samples: {self.verdict})\n{self.reason}"

    def table(self) -> ShownTable:
        """One row a measure: value, low, high (95 %), n; the best constant strategy, which has no interval, last."""
        measures = {}
        constant = self.constant
        if self.measure == "reward":
            measures["mean reward"] = self.mean_reward
            constant = self.constant_reward
        if self.formatted is not None:
            readable = "valid actions" if self.of_episodes else "readable answer"
            measures[readable] = self.format_rate
        measures |= {f"pass@{k}": estimate for k, estimate in self.pass_at.items()}
        if self.lenient is not None:
            measures["right, read leniently"] = self.lenient_rate
        groups = f"groups of {self.group_size} with"
        if self.right is not None:
            measures[f"{groups} right and wrong"] = self.signal_right()
        measures[f"{groups} unequal rewards"] = self.signal_reward()
        table = estimates_table(self.task, measures, [constant], self.n)
        look = {"float_format": "{:.3f}".format, "na_rep": ""}
        return with_page(table, table.to_html(**look), table.to_string(**look))

    def _repr_html_(self) -> str:
        return f"<p><b>{html.escape(self.reason)}</b></p>{self.table()._repr_html_()}"

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
        values = data | {"lengths": Lengths(ended, lengths["cut_off"], lengths["limit"])}
        for name in ("rewards", "credit"):
            if values.get(name):
                values[name] = [
                    {float(score): count for score, count in counts.items()}
                    for counts in values[name]
                ]
        for name in ("constant", "constant_reward"):
            if values.get(name):
                values[name] = tuple(values[name])
        return cls(**values)


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
    seconds: approximate limit, above 0. Two rows show how long one takes, then as many of the others are asked, in
    their order, as the time allows; the first two may exceed it. None: all rows. The counts of the first n rows are the
    same with any limit, except for rounding; of a model that the rollout engine does not support, samples are drawn
    batch by batch.
    quiet: do not print the verdict and the advice. If interrupted, the call prints the findings so far. Where a model's
    run is known, a line says which settings differ from it.
    Raises ValueError naming the argument for empty rows, a group_size outside 2..samples, seconds that are no number
    above 0, and the errors of complete.

    >>> ready = readiness(model, tokenizer, largest(), seconds=60)  # doctest: +SKIP
    Readiness('largest', 32 prompts x 64 samples: ready)
    """
    check_whole("samples", samples)
    if not is_whole(group_size, 2) or group_size > samples:
        raise ValueError(f"group_size={group_size!r} must lie in 2..samples={samples!r}")
    check_temperature(temperature)
    if seconds is not None and seconds != math.inf:
        check_above_zero("seconds", seconds, hint=", such as 300; None asks all rows")
    check_job(model, tokenizer, task)
    rows = check_rows(task.held_out if rows is None else rows)
    if max_completion_tokens is None:
        max_completion_tokens = task.max_completion_tokens
    say_difference(
        model, task, caller="readiness", temperature=temperature, tokens=max_completion_tokens
    )
    check_before(model, tokenizer, task, rows, max_completion_tokens)
    decoding = Decoding(samples, temperature, max_completion_tokens, batch_size, seed)
    parts = []

    def ask(first: int, last: int) -> Answers:
        def report(completions: int, _: int) -> None:
            line(first + completions // samples, len(rows))

        return answer(
            model, tokenizer, task, rows[first:last], decoding, first=first, progress=report
        )

    with progress_line(f"{task.name}, readiness, questions") as line:
        try:
            _ask_in_time(ask, len(rows), seconds, parts)
        except KeyboardInterrupt:
            if parts and not quiet:
                line.print(f"Stopped. {_counted(_joined(parts), group_size, len(rows))!r}")
            raise
    ready = _counted(_joined(parts), group_size, len(rows))
    if not quiet:
        print(repr(ready), flush=True)
    return ready


def _ask_in_time(
    ask: Callable[[int, int], Answers], n: int, seconds: float | None, parts: list[Answers]
) -> None:
    """Appends ask(first, last) to parts: of all n rows, or of two rows and then of as many as the time allows."""
    start, first = time.monotonic(), 0
    count = n if seconds is None else 2
    while count >= 1 and first < n:
        parts.append(ask(first, min(n, first + count)))
        first += len(parts[-1].rows)
        _ = parts[-1].rewards  # judging takes its time too
        elapsed = max(time.monotonic() - start, 1e-9)
        if first < n:
            count = int(min(n, (seconds - elapsed) * first / elapsed))


def _joined(parts: Sequence[Answers]) -> Answers:
    lists = {
        name: list(chain.from_iterable(getattr(part, name) for part in parts))
        for name in parts[0].by_place
    }
    return replace(parts[0], **lists)


def _counted(answers: Answers, group_size: int, asked_for: int) -> Readiness:
    task, readings = answers.task, answers.readings
    right = lenient = formatted = constant = None
    if "strict" in readings:
        right = _sums(answers, answers.right)
        if task.strategies:
            constant = task.best_constant(answers.rows)
    if "lenient" in readings:
        lenient = _sums(answers, answers.lenient)
    if "formatted" in readings:
        formatted = _sums(answers, answers.read)
    judges = getattr(task.is_correct, "judges", None)
    optional = {}
    if judges != []:
        optional["credit"] = _counts(answers, answers.credit)
    if answers.measure == "reward":
        optional["constant_reward"] = constant_reward(answers)
    else:
        optional["audit"] = _audited(task, answers.rows)
    if right is not None and task.answers_are == "text":
        optional["never_written"] = _never_written(answers, right)
    if asked_for != len(answers.rows):
        optional["asked_for"] = asked_for
    # A weight without a reward is of what an environment pays.
    weighted = zip_longest(task.rewards, task.reward_weights)
    top = sum(weight * _range(reward)[1] for reward, weight in weighted)
    return Readiness(
        task=task.name,
        samples=answers.samples,
        group_size=group_size,
        questions=[row["question"] for row in answers.rows],
        right=right,
        lenient=lenient,
        formatted=formatted,
        rewards=_counts(answers, answers.rewards),
        lengths=Lengths.of(answers.completions, answers.settings["max_completion_tokens"]),
        words=count_words(answers.texts),
        constant=constant,
        settings=answers.settings,
        measure=answers.measure,
        top=max([top, *(reward for reward in answers.rewards if reward is not None)]),
        floor=_floor(answers, judges),
        **optional,
    )


def _range(reward: Reward | None) -> tuple[float, float]:
    return range_of(reward) or (0.0, 1.0)


def _floor(answers: Answers, judges: Sequence[Reward] | None) -> float:
    """The highest credit that pays nothing: 0, but of a range above or below it its low end.

    judges: the rewards whose full pay makes an answer right; None: a rule of the task's own, or an environment. No
    scale is known there, and the lowest credit pays nothing if it is below 0.
    """
    if judges is None:
        return min([0.0, *(credit for credit in answers.credit if credit is not None)])
    floors = []
    for low, high in map(_range, judges):
        floors.append(max(low, 0.0) if high > 0 else low)
    return fmean(floors or [0.0])


def _sums(answers: Answers, values: Sequence[float]) -> list[float]:
    """By prompt, the sum over its samples."""
    return [sum(part) for part in answers.by_row(values)]


def _counts(answers: Answers, scores: Scores) -> list[dict[float, int]]:
    """By prompt, {score: samples}."""
    counts = [Counter(part) for part in answers.by_row(scores)]
    for count in counts:
        count.pop(None, None)
    return [dict(sorted(count.items())) for count in counts]


def _never_written(answers: Answers, right: Sequence[int]) -> dict[str, int]:
    """The labels of the asked rows, most frequent first, that are in no sample's answer and that no row has right."""
    task = answers.task
    golds = [str(row.get("answer", "")).strip() for row in answers.rows]
    labels = labels_of([*task.train, *task.held_out])
    written = {task.answer_of(text) for text in answers.texts}
    written |= {gold for gold, count in zip(golds, right, strict=True) if count}
    counts = Counter(gold for gold in golds if gold in labels and gold not in written)
    return dict(counts.most_common())


def _audited(task: Task, rows: Sequence[dict]) -> str | None:
    if task.answers_are != "text":
        return None
    try:
        return audit(task, rows[:8], n=8).summary
    except ValueError:  # no answers in the rows, or a reward that needs more columns
        return None
