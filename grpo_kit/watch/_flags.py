"""Red flags in the metrics of a run: one function per failure.

Each takes the steps so far and the run's Setup, and returns a Flag or None. The decorator holds the flag's words, the
docstring its condition, the last lines its evidence. A flag once raised stays: more steps never take it back.
The thresholds lie between induced failures and healthy runs (tests/fixtures/flags). `python -m benchmarks.red_flags`
counts misses and false alarms. Groups without a signal are in _collapse.py, updates in _update_flags.py; the lists of
all flags stand below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from grpo_kit.watch._collapse import entropy_collapse, mode_collapse, one_answer, sparse_reward
from grpo_kit.watch._held_out_words import ACCURACY, REWARD
from grpo_kit.watch._red_flag import (
    WINDOW,
    Flag,
    Setup,
    Sign,
    column,
    first_mean,
    over_window,
    red_flag,
    scale,
    trailing,
)
from grpo_kit.watch._update_flags import OF_UPDATES

# Steps. None in 10 x 32 completions means a rate below 1 % (95 %): one success in a dozen groups of 8.
NEVER = 10


@red_flag(
    "cancelling parts",
    lasted=WINDOW,
    why="What one part rewards another takes back, so such groups teach nothing.",
    first="grpo_kit.rewards.cancelled_groups shows an example; change the weights or drop a part",
)
def _cancelling_parts(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps: in half of the groups parts of the reward differ and their sum does not."""
    share = over_window(table, "frac_cancelled_groups")
    return (
        share > 0.5,
        lambda at: f"in {share[at]:.0%} of groups the parts of the reward differ and their sum does not",
    )


def _hacking(table: pd.DataFrame, setup: Setup) -> Flag | None:
    """Held-out measures first, then parts of weight 0, which training does not use."""
    watched = [name for name, weight in setup.weights.items() if weight == 0]
    if "reward" not in table:  # evaluated before the first step
        return None
    for names in ([f"eval/reward/{n}" for n in watched], [f"reward/{n}" for n in watched], ["eval/reward"]):
        there = {name: table[name].notna() for name in names if name in table and table[name].notna().any()}
        rows = {name: table[table["reward"].notna() | measured] for name, measured in there.items()}
        found = [flag for name in rows if (flag := _left_behind(rows[name], setup, name))]
        if there:
            return min(found, key=lambda flag: flag.step, default=None)
    return None


@red_flag(
    "hacking",
    lasted=3,
    why="The policy found what earns the reward without doing the task.",
    first="read the best-rewarded completions (browse), close the hole, and try it with check_rewards",
)
def _left_behind(table: pd.DataFrame, setup: Setup, name: str) -> Sign:
    """The reward rose by a quarter of its range, and the measure by less than a quarter of that."""
    held_out = name.startswith("eval/")
    part = name.removeprefix("eval/").removeprefix("reward").removeprefix("/") or None
    (low, high), (least, most) = scale(table, setup), scale(table, setup, part)
    unit = (1.0 if part else setup.best) / (most - least)  # the whole reward keeps its weights' unit
    reward, measure = (pd.Series(column(table, one)).dropna() for one in ("reward", name))
    base, width = (measure.iloc[0], 2) if held_out else (measure.iloc[:3].mean(), 4)
    gained = (reward.rolling(4).mean() - reward.iloc[:3].mean()) / pd.Series(high - low)
    changes = (gained, (measure.rolling(width).mean() - base) * pd.Series(unit))
    rose, follows = (change.reindex(range(len(table))).ffill().to_numpy() for change in changes)
    behind = pd.Series((rose > 0.25) & (follows < rose / 4) & ((base - least) * unit < 0.9))
    what = name.removeprefix("eval/").removeprefix("reward/")
    return (
        behind.rolling(3).sum().to_numpy() == 3,
        lambda at: (
            f"the reward rose by {rose[at]:.2f} of its range, {'held-out ' * held_out}{what} "
            f"by {round(follows[at], 2) + 0.0:.2f}"  # no -0.00
        ),
    )


@red_flag(
    "held-out fall",
    why="What training still gains is lost on questions that it does not see.",
    first="keep='best', or the checkpoint before the fall; then a lower learning rate, or a reward without that gap",
)
def _held_out_fall(table: pd.DataFrame, setup: Setup) -> Sign:
    """After an evaluation: a fifth of the range below the best one so far, or a tenth that is half of it.

    Accuracy if it is measured, else the reward. Where intervals are recorded the two must not touch.
    """
    name = ACCURACY if np.isfinite(column(table, ACCURACY)).any() else REWARD
    low, high = scale(table, setup) if name == REWARD else (0.0, 1.0)
    share = (column(table, name) - low) / (high - low)
    best = np.fmax.accumulate(share)
    best_row = np.maximum.accumulate(np.where(share >= best, np.arange(len(table)), 0))
    least_before = column(table, f"{name}_low")[best_row]
    apart = ~(column(table, f"{name}_high") >= least_before)  # true where they are not known
    limit = np.where(share <= best / 2, 0.1, 0.2)
    what, value = name.removeprefix("eval/"), column(table, name)
    return (
        apart & (best - share >= limit),
        lambda at: (
            f"held-out {what} {value[at]:.2f} where it was {value[best_row[at]]:.2f} after step "
            f"{table['step'].iloc[best_row[at]]:.0f}"
        ),
    )


@red_flag(
    "length explosion",
    lasted=3,
    why="Every token is paid for twice, in sampling and in the update, and what is cut off has no answer.",
    first="see whether the reward pays for length; rewards.RightSize; loss='dr_grpo'; a maximum that fits",
)
def _length_explosion(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 3 steps: 4 times the tokens of the first steps, or twice with 30 points more cut off."""
    raw = column(table, "completion_length")
    length, start = trailing(raw, 3), first_mean(raw)
    cut = trailing(column(table, "completion_cut_off"), 3)
    grown = np.nan_to_num(cut) - np.nan_to_num(first_mean(column(table, "completion_cut_off")))
    return (
        (length > 4 * start) | (length > 2 * start) & (grown > 0.3),
        lambda at: (
            f"completions of {length[at]:.0f} tokens where {start:.0f} were usual, {cut[at]:.0%} cut off; "
            f"{_longest_that_ended(table, at)}"
        ),
    )


@red_flag(
    "cut off",
    lasted=3,
    why="A completion that is cut off is scored on half an answer, and stopping is not learnt.",
    first="a larger max_completion_tokens, or a prompt and reward that ask for less",
)
def _cut_off(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 3 steps: more than half of the completions cut off."""
    share = trailing(column(table, "completion_cut_off"), 3)
    return (
        share > 0.5,
        lambda at: (
            f"{share[at]:.0%} of completions were cut off at {setup.max_tokens or 'the most'} tokens; "
            f"{_longest_that_ended(table, at)}"
        ),
    )


def _longest_that_ended(table: pd.DataFrame, at: int) -> str:
    """Evidence on the length that would suffice: the longest completion of the last 8 steps that was not cut off."""
    ended = 1 - trailing(column(table, "completion_cut_off"), 3)[at]
    longest = column(table, "completions/max_terminated_length")[: at + 1]
    if not ended > 0.05 or not np.nansum(longest[-8:]):
        return "hardly one ended by itself, so the length that would do is not known"
    return f"the longest that ended by itself took {np.nanmax(longest[-8:]):.0f} tokens"


@red_flag(
    "language switch",
    lasted=3,
    why="A policy that leaves its language is often about to collapse, and a reader loses the thread.",
    first="an earlier checkpoint, a lower learning rate; rewards.Language as a part of the reward",
)
def _language_switch(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 3 steps: a fifth fewer letters in the first rollout's script, if that had at least 60 %."""
    scripts = [str(name) for name in table if str(name).startswith("script/")]
    if not scripts:
        return None
    shares = table[scripts].astype(float)
    shares = shares.where(shares.notna() | shares.isna().all(axis=1).to_numpy()[:, None], 0.0)
    # One rollout: a reward can change the language within three.
    was = shares.dropna(how="all").head(1).mean()
    if not was.max() >= 0.6:  # nothing to read, or no usual script
        return None
    usual = was.idxmax()
    share = trailing(shares[usual].to_numpy(), 3)

    def saw(at: int) -> str:
        now = shares.iloc[at].drop(usual)
        other = f", {now.idxmax().removeprefix('script/')} {now.max():.0%}" if now.max() > 0 else ""
        return f"letters in {usual.removeprefix('script/')} script fell from {was[usual]:.0%} to {share[at]:.0%}{other}"

    return share < 0.8 * was[usual], saw


@red_flag(
    "part never paid",
    lasted=NEVER,
    why="What is never rewarded is not learnt; the other parts may rise all the same.",
    first="check_rewards on a few rows; then an easier task, partial credit or a warm start",
)
def _part_never_paid(table: pd.DataFrame, setup: Setup) -> Sign:
    """A trained part gave 0, or the low end of its range, to every completion of 10 steps.

    Of a sum's parts only those that judge the answer: others may be penalties, where 0 is best.
    """
    trained = [name for name in {**setup.weights, **setup.answer} if setup.weights.get(name, 1) > 0]
    low = {name: scale(table, setup, name)[0] for name in trained}
    is_dead = lambda name, mean: np.isclose(mean, low[name], rtol=1e-6, atol=0)  # noqa: E731
    return _dead(table, trained, is_dead, lambda name, at: f"{low[name][at]:g}")


@red_flag(
    "part never judged",
    lasted=NEVER,
    why="It moves nothing: the total is that of the other parts, or there is none at all.",
    first="the columns that it reads: a gold answer that cannot be read gives None; check_rewards says in which rows",
)
def _part_never_judged(table: pd.DataFrame, setup: Setup) -> Sign:
    """A part, of any weight, gave None to every completion of 10 steps."""
    return _dead(table, [*setup.weights, *setup.inside], lambda _, mean: np.isnan(mean), lambda *_: "None")


def _dead(
    table: pd.DataFrame, parts: Sequence[str], is_dead: Callable[..., np.ndarray], gave: Callable[..., str]
) -> Sign:
    """Parts whose means satisfy is_dead(part, means) in NEVER consecutive rows; parts without a column are skipped."""
    names = [name for name in parts if f"reward/{name}" in table]
    if not names:
        return None
    dead = np.stack([is_dead(name, column(table, f"reward/{name}")) for name in names], axis=1)
    lasted = pd.DataFrame(dead, dtype=float).rolling(NEVER).sum().to_numpy() == NEVER  # (steps, parts)

    def saw(at: int) -> str:
        which = [name for name, there in zip(names, lasted[at], strict=True) if there]
        what = " and ".join(dict.fromkeys(gave(name, at) for name in which))
        return f"{' and '.join(which)} gave {what} to every completion of {NEVER} steps"

    return lasted.any(axis=1), saw


OF_ROLLOUTS = (
    entropy_collapse, mode_collapse, sparse_reward, _cancelling_parts, _length_explosion, _cut_off, _language_switch,
)  # fmt: skip
"""On the rows of steps that sampled; with iterations above 1 the others have no reward."""
OF_PARTS = (_part_never_paid, _part_never_judged)
"""On the rows of steps that sampled, those without any total among them."""
OF_STEPS = (*OF_UPDATES, _hacking, _held_out_fall, one_answer)
"""On all rows."""
