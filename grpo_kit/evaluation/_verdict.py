"""The verdict on a Readiness, and the numbers behind it. readiness.VERDICTS says what to do about each."""

from __future__ import annotations

from typing import Any

from grpo_kit.evaluation._constant import Constant, in_words

Readiness = Any  # readiness.Readiness, whose file imports this one

# The verdicts' thresholds: choices, stated in each verdict and not tuned to any result.
FORMATTED = 0.5  # lowest share of samples with a readable answer
EVER = 0.1  # lowest share of prompts that are right at least once in all their samples
ALWAYS = 0.9  # highest share of right samples
# lowest share of groups with right and wrong, or with unequal rewards if those are the measure
SIGNAL = 0.2


def verdict_of(ready: Readiness) -> tuple[str, str]:
    """The verdict, and the numbers behind it. Unequal rewards inside groups give something to learn."""
    return _by_reward(ready) if ready.measure == "reward" else _by_accuracy(ready)


def _by_reward(ready: Readiness) -> tuple[str, str]:
    mean, unequal = ready.mean_reward.value, ready.signal_reward().value
    earned = f"the mean reward is {mean:.2f}"
    differ = (
        f"in {_percent(unequal, SIGNAL)} of groups of {ready.group_size} rewards would differ"
    )
    too_few = ""
    if unequal < SIGNAL:
        too_few = f", below {SIGNAL:.0%}"
    unreadable = _unreadable(ready)
    if _never_paid(ready):
        if unreadable:
            return "format first", f"{unreadable}, and {differ}"
        pay = "anything for its answer" if ready.credit else "anything"
        return "never succeeds", f"no sample earns {pay}, and {differ}{too_few}"
    if ready.credit is not None and earns_more(ready.constant_reward, mean):
        constant = f"{in_words(ready.constant_reward)} earns {ready.constant_reward[1]:.2f}"
        return "shortcut pays", f"{earned}, and {constant}, so not ready"
    if unequal >= SIGNAL:
        if ready.pass_at:
            earned += f", {ready.pass_at[1].value:.0%} of samples earn it in full"
        return "ready", f"{earned}, and {differ}"
    if unreadable:
        return "format first", f"{unreadable}, and {differ}"
    if mean > ALWAYS * ready.top:
        return "too easy", f"{earned} of at most {ready.top:g}, and {differ}"
    return "rarely succeeds", f"{earned}, and {differ}{too_few}"


def _by_accuracy(ready: Readiness) -> tuple[str, str]:
    once, ever = ready.pass_at[1].value, ready.pass_at[ready.samples].value
    mixed, unequal = ready.signal_right().value, ready.signal_reward().value
    credit = ready.signal_credit().value
    in_any = f"{_percent(ever, EVER)} of prompts are right in any of {ready.samples} samples"
    groups = (
        f"{_percent(mixed, SIGNAL)} of groups of {ready.group_size} would hold right and wrong"
    )
    unreadable, never_paid = _unreadable(ready), _never_paid(ready)
    if unreadable:
        return "format first", unreadable
    if ever >= EVER and never_paid:
        return "never succeeds", f"{in_any}, and no reward for the answer pays any of them"
    if never_paid or (ever < EVER and credit < SIGNAL):
        reason = f"{in_any}, below {EVER:.0%}"
        if unequal >= SIGNAL:
            reason += f", and only by format or other parts do rewards differ, in {unequal:.0%} of groups"
        return "never succeeds", reason
    if once > ALWAYS:
        return "too easy", f"{_percent(once, ALWAYS)} of samples are right, above {ALWAYS:.0%}"
    if earns_more(ready.constant, once):
        name, share = ready.constant
        guess = (
            f"{name!r} is right for {share:.0%} of these prompts without reading the question"
        )
        return "shortcut pays", f"pass@1 is {once:.0%}, and {guess}, so not ready"
    if unequal < SIGNAL <= mixed:
        groups = f"in {_percent(unequal, SIGNAL)} of groups rewards would differ"
    if unequal < SIGNAL or max(mixed, credit) < SIGNAL:
        return "rarely succeeds", f"{groups}, below {SIGNAL:.0%}"
    if mixed < SIGNAL:
        groups += f", and in {_percent(credit, SIGNAL)} answers earn unequal partial credit"
    return "ready", f"{once:.0%} of samples are right, {in_any}, and {groups}"


def _unreadable(ready: Readiness) -> str | None:
    """The share of readable answers, or of an episode's valid actions, if it is below FORMATTED."""
    rate = ready.format_rate
    if rate is None or rate.value >= FORMATTED:
        return None
    share = _percent(rate.value, FORMATTED)
    if ready.of_episodes:
        return f"{share} of an episode's actions are valid, below {FORMATTED:.0%}"
    text = f"{share} of samples have a readable answer, below {FORMATTED:.0%}"
    if ready.measure == "reward":
        return text
    return f"{text} (read leniently, {ready.lenient_rate.value:.0%} are right)"


def _never_paid(ready: Readiness) -> bool:
    """Has no sample's answer earned anything? Where no reward judges answers: has no sample?"""
    if ready.credit is not None:
        return all(score <= ready.floor for counts in ready.credit for score in counts)
    if ready.signal_reward().value >= SIGNAL:
        return False
    return all(reward <= 0 for counts in ready.rewards for reward in counts)


def earns_more(constant: Constant | None, value: float) -> bool:
    """Does the constant strategy earn more than this?"""
    return constant is not None and constant[1] > value


def _percent(value: float, threshold: float) -> str:
    """In per cent, with one more digit if rounding would show the threshold although the value differs."""
    text = f"{value:.0%}"
    if text == f"{threshold:.0%}" and value != threshold:
        return f"{value:.1%}"
    return text
