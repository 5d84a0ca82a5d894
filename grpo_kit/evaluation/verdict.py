"""The verdicts of readiness: their thresholds, the rule, and the verdicts that the intervals leave possible."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from grpo_kit.evaluation.intervals import Estimate

# The verdicts' thresholds: choices, stated in each verdict and not tuned to any result.
FORMATTED = 0.5  # lowest share of samples with a readable answer
EVER = 0.1  # lowest share of prompts that are right at least once in all their samples
ALWAYS = 0.9  # highest share of right samples
SIGNAL = 0.2  # lowest share of groups with right and wrong, or with unequal rewards if those are the measure
SHORTCUT = 0.5  # highest share of prompts on which a constant strategy may be right,
LEAD = 2  # unless the model is right more than 1 / LEAD as often
FEWEST = 16  # rows below which no verdict counts as sure: a bootstrap over fewer is too narrow

VERDICTS = {
    "format first": "most samples give no readable answer: show a worked example or prefill the tag",
    "never succeeds": "there is nothing to make likelier: do SFT first, or take easier rows or a stronger model",
    "shortcut pays": "training finds that one answer before it finds the task: take rows on which none pays, or a "
    "prompt with which the model is right more often",
    "too easy": "little is left to learn: take harder rows",
    "rarely succeeds": "few groups carry a signal: larger groups, a soft reward, or easier rows",
    "ready": "train",
}

# Names of the deciding measures, in words.
MEASURES = {
    "formatted": "readable answers",
    "ever": "prompts with any right sample",
    "constant": "the best constant answer's accuracy",
    "once": "pass@1",
    "mean": "mean reward",
    "mixed": "groups with right and wrong",
    "unequal": "groups with unequal rewards",
    "credit": "groups with unequal credit",
}


def verdict_of(value: Mapping[str, float], top: float, nothing_paid: bool) -> str:
    """The first of VERDICTS that holds, in their order, for the task's measure.

    Unequal rewards inside groups give something to learn: a text reward, partial credit for answers.
    value: shares in [0, 1] by name. unequal: groups with unequal rewards; formatted: samples with a readable
    answer, if a form is required. If the reward is the measure, mean: the mean reward, and top: the highest possible
    reward. Else once: right samples; ever: prompts right in any sample; mixed: groups with right and wrong;
    credit: groups with unequal credit for answers; constant: accuracy of the best constant strategy, if there is one.
    nothing_paid: no sample has earned anything.

    >>> verdict_of({"unequal": 0.1, "mean": 0.95}, 1.0, False)
    'too easy'
    """
    unread = value.get("formatted", 1.0) < FORMATTED
    if "mean" in value:
        if value["unequal"] >= SIGNAL:
            return "ready"
        if unread:
            return "format first"
        if nothing_paid:
            return "never succeeds"
        return "too easy" if value["mean"] > ALWAYS * top else "rarely succeeds"
    partly, guess = value["credit"] >= SIGNAL, value.get("constant", 0.0)
    if unread:
        return "format first"
    if value["ever"] < EVER and not partly:
        return "never succeeds"
    if guess >= SHORTCUT and LEAD * value["once"] < guess:
        return "shortcut pays"
    if value["once"] > ALWAYS:
        return "too easy"
    return "ready" if value["mixed"] >= SIGNAL or partly else "rarely succeeds"


def possible_verdicts(measured: Mapping[str, Estimate], top: float, nothing_paid: bool) -> list[str]:
    """The verdicts for which every measure has a value inside its 95 % interval, in the order of VERDICTS.

    Each condition of the rule is a threshold, so the ends of the intervals and the values are enough. Where nothing was
    paid so far, something may still be.
    """
    corners = list(itertools.product(*({one.low, one.value, one.high} for one in measured.values())))
    found = {
        verdict_of(dict(zip(measured, corner, strict=True)), top, nothing)
        for corner in corners
        for nothing in {nothing_paid, False}
    }
    return [verdict for verdict in VERDICTS if verdict in found]


def doubtful(measured: Mapping[str, Estimate], top: float, nothing_paid: bool) -> list[str]:
    """The measures that would change the verdict alone, at some value inside their 95 % interval."""
    values = {name: one.value for name, one in measured.items()}
    verdict = verdict_of(values, top, nothing_paid)
    ends = {name: (one.low, one.high) for name, one in measured.items()}
    return [
        name
        for name in measured
        if any(verdict_of(values | {name: end}, top, nothing_paid) != verdict for end in ends[name])
    ]
