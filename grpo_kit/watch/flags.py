"""What can go wrong in a run, and how it looks in the metrics: one function a red flag.

Each takes the table of the steps so far and the run's Setup and returns a Flag or None. A flag raised once stays: more
steps never take it back. The thresholds lie between induced failures and healthy runs (tests/fixtures/flags); where
both look alike, as entropy does, a flag also asks whether the task is solved, which is whether the reward is above
SOLVED. So a run that has collapsed onto a shortcut raises no flag if the shortcut pays more than that. The fixture
healthy/events is such a run: one answer on every day, and no flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

WINDOW = 5  # steps that a state must last; spikes are seen at once
SOLVED = 0.6  # of the highest reward: above it equal groups are taken to be right; they may be a shortcut that pays


@dataclass(frozen=True)
class Flag:
    """A red flag. name; step: since when; saw: what, with numbers; why it matters; first: what to try first."""

    name: str
    step: int
    saw: str
    why: str
    first: str

    def __str__(self) -> str:
        return f"{self.name} since step {self.step}: {self.saw}. {self.why} First try: {self.first}"


@dataclass(frozen=True)
class Setup:
    """What the flags need of a run's config.json; the defaults where there is none.

    weights: of the reward parts by name. best: the highest reward. max_tokens of a completion. age: the highest of a
    rollout, in optimizer steps.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    best: float = 1.0
    max_tokens: int | None = None
    age: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> Setup:
        """From a run's config (config.json, as the trainer writes it)."""
        config = config or {}
        args = config.get("args") or {}
        weights = [float(w) for w in config.get("reward_weights") or ()]
        parts = list(config.get("reward_parts") or ())[: len(weights)]
        passes = (args.get("steps_per_generation") or 1) * (args.get("num_iterations") or 1)
        return cls(
            weights=dict(zip(parts, weights, strict=False)),
            best=sum(w for w in weights if w > 0) or 1.0,
            max_tokens=args.get("max_completion_length"),
            age=max(0, passes // (args.get("gradient_accumulation_steps") or 1) - 1),
        )


def kl_spike(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """A step's KL above 0.5 nats a token and 5 times the usual, the median of up to 8 steps before it."""
    kl = _column(table, "kl")
    usual = _usual(kl)
    at = _first(kl > np.maximum(5 * usual, 0.5))
    if at is None:
        return None
    return Flag(
        "KL spike",
        _step(table, at),
        f"KL {kl[at]:.2g} where {usual[at]:.2g} was usual",
        "The policy left the reference in a few updates, and seldom comes back.",
        "a learning rate 3 to 10 times lower, with warmup; then a higher beta",
    )


def gradient_spike(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """A step's gradient norm, before clipping, 5 times the usual; steps without a gradient are not usual."""
    norm = _column(table, "grad_norm")
    usual = _usual(np.where(norm > 0, norm, np.nan))  # groups without a signal have none
    at = _first(norm > 5 * usual)
    if at is None:
        return None
    return Flag(
        "gradient spike",
        _step(table, at),
        f"gradient norm {norm[at]:.3g} where {usual[at]:.3g} was usual",
        "Clipping bounds the step but not its direction: one odd batch decides it.",
        "warmup and a lower learning rate; look at that step's completions and rewards",
    )


def mode_collapse(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """Over 5 steps: nearly equal completions (self-BLEU above 0.9), equal rewards, and the task not solved."""
    same, equal = _mean(table, "diversity/self_bleu"), _mean(table, "groups/equal_rewards")
    at = _first((same > 0.9) & (equal > 0.8) & _unsolved(table, setup))
    if at is None:
        return None
    unique, distinct = _mean(table, "diversity/unique"), _mean(table, "diversity/distinct_2")
    return Flag(
        "mode collapse",
        _step(table, at - WINDOW + 1),
        f"{equal[at]:.0%} of groups have equal rewards and their completions are the same (self-BLEU {same[at]:.2f}, "
        f"{unique[at]:.0%} unique, distinct-2 {distinct[at]:.2f}) at reward {_mean(table, 'reward')[at]:.2f}",
        "Without differences in a group there is no advantage: nothing more is learnt.",
        "an earlier checkpoint and a higher temperature; then more prompts a step, a lower learning rate or beta",
    )


def entropy_collapse(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """Over 5 steps: entropy below 0.05 nats a token, and the task not solved."""
    entropy = _mean(table, "entropy")
    at = _first((entropy < 0.05) & _unsolved(table, setup))
    if at is None:
        return None
    return Flag(
        "entropy collapse",
        _step(table, at - WINDOW + 1),
        f"entropy {entropy[at]:.3f} nats a token at reward {_mean(table, 'reward')[at]:.2f}",
        "The policy is sure of itself and wrong; it will hardly sample anything better.",
        "an earlier checkpoint and a lower learning rate; then a higher temperature or epsilon_high",
    )


def sparse_reward(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """Over 5 steps: equal rewards in 4 groups of 5 though completions differ, and the task not solved."""
    equal, same = _mean(table, "groups/equal_rewards"), _mean(table, "diversity/self_bleu")
    at = _first((equal > 0.8) & ~(same > 0.9) & _unsolved(table, setup))
    if at is None:
        return None
    return Flag(
        "sparse reward",
        _step(table, at - WINDOW + 1),
        f"{equal[at]:.0%} of groups have equal rewards (mean {_mean(table, 'reward')[at]:.2f}) though their "
        "completions differ",
        "These completions cost time and teach nothing.",
        "easier prompts or partial credit; more completions a prompt; a warm start if none is ever right",
    )


def cancelling_parts(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """Over 5 steps: in half of the groups parts of the reward differ and their sum does not."""
    share = _mean(table, "frac_cancelled_groups")
    at = _first(share > 0.5)
    if at is None:
        return None
    return Flag(
        "cancelling parts",
        _step(table, at - WINDOW + 1),
        f"in {share[at]:.0%} of groups the parts of the reward differ and their sum does not",
        "What one part rewards another takes back, so such groups teach nothing.",
        "grpo_kit.rewards.cancelled_groups shows an example; change the weights or drop a part",
    )


def hacking(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """Held-out measures first, then parts of weight 0, which training cannot see."""
    watched = [name for name, weight in setup.weights.items() if weight == 0]
    kinds = [
        [f"eval/reward/{name}" for name in watched],
        [f"reward/{name}" for name in watched],
        ["eval/reward"],
    ]
    for names in kinds:
        names = [name for name in names if name in table and table[name].notna().any()]
        found = [flag for name in names if (flag := _left_behind(table, setup, name))]
        if names:
            return min(found, key=lambda flag: flag.step, default=None)
    return None


def _left_behind(table: pd.DataFrame, setup: Setup, name: str) -> Flag | None:
    """The reward rose by a quarter of its range, and the measure by less than a quarter of that."""
    held_out = name.startswith("eval/")
    if "reward" not in table:  # evaluated before the first step
        return None
    table = table[table["reward"].notna() | table[name].notna()]
    reward, measure = (pd.Series(_column(table, column)).dropna() for column in ("reward", name))
    base, width = (measure.iloc[0], 2) if held_out else (measure.iloc[:3].mean(), 4)
    rose, follows = (
        change.reindex(range(len(table))).ffill().to_numpy()
        for change in (
            (reward.rolling(4).mean() - reward.iloc[:3].mean()) / setup.best,
            measure.rolling(width).mean() - base,
        )
    )
    behind = (rose > 0.25) & (follows < rose / 4) & (base < 0.9)
    at = _first(_lasting(behind, 3))
    if at is None:
        return None
    what = name.removeprefix("eval/").removeprefix("reward/")
    change = round(follows[at], 2) + 0.0  # no -0.00
    return Flag(
        "hacking",
        _step(table, at - 2),
        f"the reward rose by {rose[at]:.2f} of its range, {'held-out ' * held_out}{what} by {change:.2f}",
        "The policy found what earns the reward without doing the task.",
        "read the best-rewarded completions (browse), close the hole, and try it with check_rewards",
    )


def length_explosion(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """Over 3 steps: 4 times the tokens of the first steps, or twice with 30 points more cut off."""
    raw = _column(table, "completion_length")
    length, start = _trailing(raw, 3), _start(raw)
    cut = _trailing(_column(table, "completion_cut_off"), 3)
    grown = np.nan_to_num(cut) - np.nan_to_num(_start(_column(table, "completion_cut_off")))
    at = _first((length > 4 * start) | (length > 2 * start) & (grown > 0.3))
    if at is None:
        return None
    return Flag(
        "length explosion",
        _step(table, at - 2),
        f"completions of {length[at]:.0f} tokens where {start:.0f} were usual, {cut[at]:.0%} cut off; "
        f"{_that_would_do(table, setup, at)}",
        "Every token is paid for twice, in sampling and in the update, and what is cut off has no answer.",
        "see whether the reward pays for length; rewards.RightSize; loss_type='dr_grpo'; a maximum that fits",
    )


def cut_off(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """Over 3 steps: more than half of the completions cut off."""
    share = _trailing(_column(table, "completion_cut_off"), 3)
    at = _first(share > 0.5)
    if at is None:
        return None
    return Flag(
        "cut off",
        _step(table, at - 2),
        f"{share[at]:.0%} of completions were cut off at {setup.max_tokens or 'the most'} tokens; "
        f"{_that_would_do(table, setup, at)}",
        "A completion that is cut off is scored on half an answer, and stopping is not learnt.",
        "a larger max_completion_length, or a prompt and reward that ask for less",
    )


def _that_would_do(table: pd.DataFrame, setup: Setup, at: int) -> str:
    """The measured length that would do, where enough completions ended by themselves."""
    ended = 1 - _trailing(_column(table, "completion_cut_off"), 3)[at]
    longest = _column(table, "completions/max_terminated_length")[: at + 1]
    if not ended > 0.05 or not np.nansum(longest[-8:]):
        return "hardly one ended by itself, so the length that would do is not known"
    return f"the longest that ended by itself took {np.nanmax(longest[-8:]):.0f} tokens, so that many would do for it"


def language_switch(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """Over 3 steps: a fifth fewer letters in the script of the first rollout, where that had at least 60 %."""
    scripts = [str(name) for name in table if str(name).startswith("script/")]
    if not scripts:
        return None
    shares = table[scripts].astype(float)
    shares = shares.where(shares.notna() | shares.isna().all(axis=1).to_numpy()[:, None], 0.0)
    first = (
        shares.dropna(how="all").head(1).mean()
    )  # one rollout: a reward can turn the language within three
    if not first.max() >= 0.6:  # nothing to read, or no usual script
        return None
    usual = first.idxmax()
    share = _trailing(shares[usual].to_numpy(), 3)
    at = _first(share < 0.8 * first[usual])
    if at is None:
        return None
    now = shares.iloc[at].drop(usual)
    other = f", {now.idxmax().removeprefix('script/')} {now.max():.0%}" if len(now) and now.max() > 0 else ""
    return Flag(
        "language switch",
        _step(table, at - 2),
        f"letters in {usual.removeprefix('script/')} script fell from {first[usual]:.0%} to {share[at]:.0%}{other}",
        "A policy that leaves its language is often about to collapse, and a reader loses the thread.",
        "an earlier checkpoint, a lower learning rate; rewards.Language as a part of the reward",
    )


def sampler_gap(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """Over 3 steps: 0.05 nats a token between sampler and trainer on fresh rollouts; bfloat16 rounds by about 0.01."""
    fresh = ~(_column(table, "rollout/age") > 0)  # older weights give other probabilities without any error
    gap = _trailing(np.where(fresh, _column(table, "rollout/logprob_gap"), np.nan), 3)
    at = _first(gap > 0.05)
    if at is None:
        return None
    return Flag(
        "sampler gap",
        _step(table, at - 2),
        f"sampler and trainer differ by {gap[at]:.2g} nats a token",
        "The gradient is of another policy than the one that wrote the completions.",
        "rollout='kit'; else look at dtype, dropout, adapters and the sampler's temperature and top-k",
    )


def stale_rollouts(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """Over 3 steps: more than a fifth of the tokens of rollouts that are not fresh are clipped."""
    age = _column(table, "rollout/age")
    age = np.where(np.isnan(age), setup.age, age)
    clipped = _trailing(_column(table, "clip_ratio"), 3)
    at = _first((age > 0) & (clipped > 0.2))
    if at is None:
        return None
    return Flag(
        "stale rollouts",
        _step(table, at - 2),
        f"rollouts up to {age[at]:.0f} steps old, and {clipped[at]:.0%} of their tokens are clipped",
        "A clipped token has no gradient: what was sampled no longer says what the policy would do.",
        "fewer passes over a rollout (num_iterations, steps_per_generation), or a lower learning rate",
    )


def lost_updates(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """A step of the learning rate moves fewer than half of the weights; the rest round back."""
    share = _column(table, "update/share_that_moves")
    at = _first(share < 0.5)
    if at is None:
        return None
    return Flag(
        "lost updates",
        _step(table, at),
        f"a step of the learning rate changes {share[at]:.1%} of the weights, the rest round back",
        "Weights of 16 bits take no step smaller than half their last bit; the run would learn next to nothing.",
        "optimizer='adamw-8bit-split', or weights in float32",
    )


OF_ROLLOUTS = (
    entropy_collapse, mode_collapse, sparse_reward, cancelling_parts, length_explosion, cut_off, language_switch,
)  # fmt: skip
"""On the rows of steps that sampled; with num_iterations above 1 the others have no reward."""
OF_STEPS = (kl_spike, gradient_spike, hacking, sampler_gap, stale_rollouts, lost_updates)


def _column(table: pd.DataFrame, name: str) -> np.ndarray:
    return table[name].to_numpy(float) if name in table else np.full(len(table), np.nan)


def _trailing(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last `width` values at each step; NaN where one is missing."""
    return pd.Series(values).rolling(width).mean().to_numpy()


def _mean(table: pd.DataFrame, name: str) -> np.ndarray:
    return _trailing(_column(table, name), WINDOW)


def _start(values: np.ndarray) -> float:
    """Mean of the first three values that are there."""
    there = values[~np.isnan(values)][:3]
    return float(there.mean()) if len(there) else np.nan


def _usual(values: np.ndarray) -> np.ndarray:
    """Median of up to 8 steps before each one, from the fifth on."""
    return pd.Series(values).shift(1).rolling(8, min_periods=4).median().to_numpy()


def _unsolved(table: pd.DataFrame, setup: Setup) -> np.ndarray:
    return _mean(table, "reward") < SOLVED * setup.best


def _lasting(condition: np.ndarray, steps: int) -> np.ndarray:
    return pd.Series(condition).rolling(steps).sum().to_numpy() == steps


def _first(condition: np.ndarray) -> int | None:
    return int(condition.argmax()) if condition.any() else None


def _step(table: pd.DataFrame, row: int) -> int:
    return int(table["step"].iloc[max(row, 0)])
