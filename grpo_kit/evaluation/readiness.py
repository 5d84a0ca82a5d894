"""Is a model ready for GRPO on a task? Counted before any training, from samples at the training temperature.

GRPO learns from groups whose completions differ in reward, and mostly makes likelier what the model already says now
and then. So: how often it is right in 1 to 64 tries, how many groups would carry a signal, and what stands in the way.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_kit.evaluation.aha import count_words, word_table
from grpo_kit.evaluation.answers import answer
from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean, pass_at_k
from grpo_kit.evaluation.lengths import Lengths
from grpo_kit.rewards.auditing import audit

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_kit.tasks import Task

# The verdicts' thresholds: choices, stated in each verdict and not tuned to any result.
FORMATTED = 0.5  # at least so many samples give an answer that can be read
EVER = 0.1  # at least so many prompts are right once in all their samples
ALWAYS = 0.9  # at most so many samples are right
SIGNAL = 0.2  # at least so many groups hold right and wrong
SHORTCUT = 0.5  # an answer given without reading the question may be right for at most so many prompts,
LEAD = 2  # unless the model is right more than 1 / LEAD as often as that

VERDICTS = {
    "format first": "most samples give no readable answer: show a worked example, prefill the tag, or warm up with SFT",
    "never succeeds": "there is nothing to make likelier: do SFT first, or take easier rows or a stronger model",
    "shortcut pays": "training finds that one answer before it finds the task: take rows on which none pays, or a "
    "prompt with which the model is right more often",
    "too easy": "little is left to learn: take harder rows",
    "rarely succeeds": "few groups carry a signal: larger groups, a soft reward, easier rows, or SFT first",
    "ready": "train",
}


def signal_share(counts: Sequence[int], group_size: int, *, unjudged: int = 0) -> float:
    """The chance that a group drawn from one prompt's samples, without replacement, has a signal.

    counts: how many samples had each value (right and wrong, or each reward). unjudged: samples without a reward, which
    take no part in a group's signal. Unbiased for 1 - sum of p ** group_size
    over the values, as pass_at_k is for its own.
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
    """What a model does on a task before training. Made by readiness().

    right, lenient, formatted: of `samples`, by prompt: right, right as evaluate's lenient reading has it,
    with a readable answer. Of episodes: how many succeed; None; the sum of their shares of valid actions.
    rewards: by prompt, reward (the total) -> samples that earned it; those without one are left out.
    lengths: of all samples. words: counts of aha.count_words. constant: the best constant strategy, name and accuracy.
    audit: how often the reward is wrong about texts made from the first 8 golds (kit.rewards.audit), in a sentence;
    None where that cannot be asked: code, episodes, rows without an answer.
    """

    task: str
    samples: int
    group_size: int
    questions: list[str]
    right: list[int]
    lenient: list[int] | None
    formatted: list[float]
    rewards: list[dict[float, int]]
    lengths: Lengths
    words: dict[str, int]
    constant: tuple[str, float] | None
    settings: dict[str, Any]
    audit: str | None = None

    @property
    def n(self) -> int:
        """Number of prompts."""
        return len(self.right)

    @property
    def pass_at(self) -> dict[int, Estimate]:
        """k -> pass@k, for 1, 2, 4, ... and all samples."""
        return self._pass_at(self.right)

    @property
    def lenient_pass_at(self) -> dict[int, Estimate]:
        """The same with the lenient reading: what the model may know but does not put into the tags; {} of episodes."""
        return {} if self.lenient is None else self._pass_at(self.lenient)

    def _pass_at(self, right: Sequence[int]) -> dict[int, Estimate]:
        ks = sorted({*(1 << i for i in range(self.samples.bit_length())), self.samples})
        return {k: bootstrap_mean([pass_at_k(self.samples, c, k) for c in right]) for k in ks}

    @property
    def format_rate(self) -> Estimate:
        """Share of samples with a readable answer; of episodes, of their actions that are valid."""
        return bootstrap_mean([count / self.samples for count in self.formatted])

    def signal_right(self, group_size: int | None = None) -> Estimate:
        """Expected share of groups that hold right and wrong completions. group_size: None means the one asked for."""
        size = self.group_size if group_size is None else group_size
        return bootstrap_mean([signal_share([c, self.samples - c], size) for c in self.right])

    def signal_reward(self, group_size: int | None = None) -> Estimate:
        """Expected share of groups whose rewards are not all equal: format and soft parts carry a signal too."""
        size = self.group_size if group_size is None else group_size
        return bootstrap_mean(
            [
                signal_share(list(held.values()), size, unjudged=self.samples - sum(held.values()))
                for held in self.rewards
            ]
        )

    @property
    def verdict(self) -> str:
        """One of VERDICTS; the first that holds, in their order."""
        passes = self.pass_at
        if self.format_rate.value < FORMATTED:
            return "format first"
        if passes[self.samples].value < EVER:
            return "never succeeds"
        if self._shortcut is not None:
            return "shortcut pays"
        if passes[1].value > ALWAYS:
            return "too easy"
        return "ready" if self.signal_right().value >= SIGNAL else "rarely succeeds"

    @property
    def _shortcut(self) -> tuple[str, float] | None:
        """The best constant strategy where it is far ahead of the model."""
        best = self.constant
        return best if best and best[1] >= SHORTCUT and LEAD * self.pass_at[1].value < best[1] else None

    @property
    def reason(self) -> str:
        """The numbers behind the verdict and what to do, in a sentence each."""
        once, ever = self.pass_at[1].value, self.pass_at[self.samples].value
        shown, guessed = _share(self.format_rate.value, FORMATTED), self.lenient_pass_at.get(1)
        mixed, unequal = self.signal_right().value, self.signal_reward().value
        in_any = f"{_share(ever, EVER)} of prompts are right in any of {self.samples} samples"
        groups = f"{_share(mixed, SIGNAL)} of groups of {self.group_size} would hold right and wrong"
        name, share = self.constant or ("", 0.0)
        guess = f"{name!r} is right for {share:.0%} of these prompts without reading the question"
        why = {
            "format first": f"{shown} of an episode's actions are valid, below {FORMATTED:.0%}"
            if guessed is None
            else f"{shown} of samples have a readable answer, below {FORMATTED:.0%} "
            f"(read leniently, {guessed.value:.0%} are right)",
            "never succeeds": f"{in_any}, below {EVER:.0%}",
            "shortcut pays": f"pass@1 is {once:.0%}, and {guess}, so not ready",
            "too easy": f"{_share(once, ALWAYS)} of samples are right, above {ALWAYS:.0%}",
            "rarely succeeds": f"{groups}, below {SIGNAL:.0%}",
            "ready": f"{once:.0%} of samples are right, {in_any}, and {groups}",
        }[self.verdict]
        told = f"{self.verdict}: {why}. So: {VERDICTS[self.verdict]}."
        if share > once and self.verdict in ("ready", "rarely succeeds"):
            told += f" ({guess}: compare with that, and not with {once:.0%}.)"
        if self.verdict != "ready" and unequal >= SIGNAL:
            told += (
                f" (In {unequal:.0%} of groups rewards would differ all the same, by format or soft parts.)"
            )
        return told if self.audit is None else f"{told} Audit of the reward: {self.audit}"

    def __repr__(self) -> str:
        return f"Readiness({self.task!r}, {self.n} prompts x {self.samples} samples: {self.verdict})\n{self.reason}"

    def table(self) -> pd.DataFrame:
        """One row a measure: value, low, high (95 %), n; the best constant strategy last."""
        size = self.group_size
        named = {"valid actions" if self.lenient is None else "readable answer": self.format_rate}
        named |= {f"pass@{k}": estimate for k, estimate in self.pass_at.items()}
        if self.lenient is not None:
            named["right, read leniently"] = self.lenient_pass_at[1]
        named[f"groups of {size} with right and wrong"] = self.signal_right()
        named[f"groups of {size} with unequal rewards"] = self.signal_reward()
        rows = {name: asdict(estimate) for name, estimate in named.items()}
        if self.constant is not None:
            rows[self.constant[0]] = {"value": self.constant[1], "low": None, "high": None, "n": self.n}
        table = pd.DataFrame.from_dict(rows, orient="index").rename_axis(self.task)
        return table.astype({"value": float, "low": float, "high": float, "n": int})

    def aha(self) -> pd.DataFrame:
        """Words of self-reflection in the samples; see grpo_kit.evaluation.aha."""
        return word_table(self.words, self.n * self.samples)

    def _repr_html_(self) -> str:
        table = self.table().to_html(float_format="{:.3f}".format, na_rep="")
        return f"<p><b>{html.escape(self.reason)}</b></p>{table}"

    def save(self, path: str | os.PathLike) -> None:
        """Write everything to one JSON file; Readiness.load reads it."""
        Path(path).write_text(json.dumps(asdict(self), ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Readiness:
        """What save() wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Readiness:
        """Of asdict(), also after a trip through JSON, whose keys are texts."""
        lengths = data["lengths"]
        ended = {int(tokens): count for tokens, count in lengths["ended"].items()}
        rewards = [{float(r): count for r, count in one.items()} for one in data["rewards"]]
        constant = tuple(data["constant"]) if data["constant"] else None
        changed = {"lengths": Lengths(ended, lengths["cut_off"], lengths["limit"]), "rewards": rewards}
        return cls(**{**data, **changed, "constant": constant})


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
) -> Readiness:
    """Sample each of the rows (default: the task's held-out rows) and count; nothing is trained.

    samples: completions a prompt. group_size, temperature: those of the training to come.
    max_completion_tokens: None means the task's. batch_size: sequences sampled at once; None: by free memory. The model
    is left as it was.
    Raises ValueError naming the argument for empty rows, a group_size outside 2..samples, and what complete refuses.

    >>> print(readiness(model, tokenizer, largest()).reason)  # doctest: +SKIP
    """
    if not 2 <= group_size <= samples:
        raise ValueError(f"group_size={group_size!r} must lie in 2..samples={samples!r}")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} must be above 0; at 0 all samples are alike")
    how = {"max_completion_tokens": max_completion_tokens, "samples": samples, "temperature": temperature}
    made = answer(model, tokenizer, task, rows, batch_size=batch_size, seed=seed, **how)
    judged = [[reward for reward in part if reward is not None] for part in made.by_row(made.rewards)]
    return Readiness(
        task=task.name,
        samples=samples,
        group_size=group_size,
        questions=[row["question"] for row in made.rows],
        right=[sum(part) for part in made.by_row(made.right)],
        lenient=[sum(part) for part in made.by_row(made.lenient)] if "lenient" in made.readings else None,
        formatted=[sum(part) for part in made.by_row(made.read)],
        rewards=[dict(sorted(Counter(part).items())) for part in judged],
        lengths=Lengths.of(made.completions, made.settings["max_completion_tokens"]),
        words=count_words(made.texts),
        constant=task.best_constant(made.rows) if task.strategies else None,
        settings=made.settings,
        audit=_audited(task, made.rows),
    )


def _audited(task: Task, rows: Sequence[dict]) -> str | None:
    if not hasattr(task, "cases_for") or task.read_answer is not None:  # episodes, code
        return None
    try:
        return audit(task, rows[:8], n=8).summary
    except ValueError:  # no answers in the rows, or a reward that asks for more than them
        return None


def _share(value: float, threshold: float) -> str:
    """In per cent; with a digit more where it would read as the threshold that it is not."""
    short = f"{value:.0%}"
    return f"{value:.1%}" if short == f"{threshold:.0%}" and value != threshold else short
