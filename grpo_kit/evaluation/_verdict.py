"""The verdicts of readiness: their thresholds, and the rule."""

from __future__ import annotations

from collections.abc import Mapping

# The verdicts' thresholds: choices, stated in each verdict and not tuned to any result.
FORMATTED = 0.5  # lowest share of samples with a readable answer
EVER = 0.1  # lowest share of prompts that are right at least once in all their samples
ALWAYS = 0.9  # highest share of right samples
SIGNAL = 0.2  # lowest share of groups with right and wrong, or with unequal rewards if those are the measure

VERDICTS = {
    "format first": "most samples give no readable answer: show a worked example or prefill the tag",
    "never succeeds": "there is nothing to make likelier: do SFT first, or take easier rows or a stronger model",
    "too easy": "little is left to learn: take harder rows",
    "shortcut pays": "training may find that one answer before it finds the task: take rows on which it does not pay, "
    "or a prompt with which the model is right more often; a model trained all the same has to beat that number",
    "rarely succeeds": "few groups carry a signal: larger groups, a soft reward, or easier rows",
    "ready": "train",
}


def verdict_of(value: Mapping[str, float], top: float, never_paid: bool) -> str:
    """One of VERDICTS, by the task's measure.

    Unequal rewards inside groups give something to learn: a text reward, partial credit for answers.
    value: shares in [0, 1] by name. unequal: groups with unequal rewards; formatted: samples with a readable
    answer, if a form is required. If the reward is the measure, mean: the mean reward, and top: the highest possible
    reward. Else once: right samples; ever: prompts right in any sample; mixed: groups with right and wrong;
    credit: groups with unequal credit for answers. constant: what the best constant answer has in place of once or
    mean, if it is known and the task has answers.
    never_paid: no sample's answer has earned anything.

    >>> verdict_of({"unequal": 0.1, "mean": 0.95}, 1.0, False)
    'too easy'
    """
    unread = value.get("formatted", 1.0) < FORMATTED
    differ = value["unequal"] >= SIGNAL
    if "mean" in value:
        if never_paid:
            return "format first" if unread else "never succeeds"
        if value.get("constant", value["mean"]) > value["mean"]:
            return "shortcut pays"
        if differ:
            return "ready"
        if unread:
            return "format first"
        return "too easy" if value["mean"] > ALWAYS * top else "rarely succeeds"
    partly = value["credit"] >= SIGNAL
    if unread:
        return "format first"
    if never_paid or (value["ever"] < EVER and not partly):
        return "never succeeds"
    if value["once"] > ALWAYS:
        return "too easy"
    if value.get("constant", value["once"]) > value["once"]:
        return "shortcut pays"
    return "ready" if differ and (partly or value["mixed"] >= SIGNAL) else "rarely succeeds"
