"""Red flags in the metrics of a run: one function per failure.

Each takes the steps so far, and returns a Flag or None. The decorator holds the flag's words, the docstring its
condition, the last lines its evidence. A flag once raised stays: more steps never take it back.
The thresholds lie between induced failures and healthy runs (tests/fixtures/flags). `python -m benchmarks.red_flags`
counts misses and false alarms. Groups without a signal are in _diversity.py, updates in _update_flags.py; the lists of
all flags stand below.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from grpo_kit.watch._diversity import entropy_collapse, mode_collapse, one_answer, sparse_reward
from grpo_kit.watch._red_flag import (
    ACCURACY,
    REWARD,
    WINDOW,
    Flag,
    Sign,
    Steps,
    first_mean,
    red_flag,
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
def _cancelling_parts(steps: Steps) -> Sign:
    """Over 5 steps: in half of the groups parts of the reward differ and their sum does not."""
    share = steps.mean("frac_cancelled_groups")
    return (
        share > 0.5,
        lambda row: (
            f"in {share[row]:.0%} of groups the parts of the reward differ and their sum does not"
        ),
    )


def _hacking(steps: Steps) -> Flag | None:
    """Held-out measures first, then parts of weight 0, which training does not use."""
    table = steps.table
    if "reward" not in table:  # evaluated before the first step
        return None
    unused = [name for name, weight in steps.setup.weights.items() if weight == 0]
    held_out_parts = [f"eval/reward/{name}" for name in unused]
    training_parts = [f"reward/{name}" for name in unused]
    for names in (held_out_parts, training_parts, [REWARD]):
        recorded = [name for name in names if name in table and table[name].notna().any()]
        flags = []
        for name in recorded:
            rows = table[table["reward"].notna() | table[name].notna()]
            flag = _left_behind(Steps(rows, steps.setup), name)
            if flag is not None:
                flags.append(flag)
        if recorded:
            return min(flags, key=lambda flag: flag.step, default=None)
    return None


@red_flag(
    "hacking",
    lasted=3,
    why="The policy found what earns the reward without doing the task.",
    first="read the best-rewarded completions (browse), close the hole, and try it with check_rewards",
)
def _left_behind(steps: Steps, name: str) -> Sign:
    """The reward rose by a quarter of its range, and the measure by less than a quarter of that."""
    part = name.removeprefix("eval/").removeprefix("reward").removeprefix("/") or None
    low, high = steps.scale()
    part_low, part_high = steps.scale(part)
    best = 1.0 if part else steps.setup.best  # the whole reward keeps its weights' unit
    unit = best / (part_high - part_low)
    reward = pd.Series(steps["reward"]).dropna()
    measure = pd.Series(steps[name]).dropna()
    held_out = ""
    width = 4
    start = measure.iloc[:3].mean()
    if name.startswith("eval/"):
        held_out = "held-out "
        width = 2
        start = measure.iloc[0]

    reward_rose = (reward.rolling(4).mean() - reward.iloc[:3].mean()) / pd.Series(high - low)
    measure_rose = (measure.rolling(width).mean() - start) * pd.Series(unit)
    rows = range(len(steps.table))
    rose = reward_rose.reindex(rows).ffill().to_numpy()
    follows = measure_rose.reindex(rows).ffill().to_numpy()
    has_room = (start - part_low) * unit < 0.9
    is_behind = pd.Series((rose > 0.25) & (follows < rose / 4) & has_room)

    measure_name = name.removeprefix("eval/").removeprefix("reward/")
    return (
        is_behind.rolling(3).sum().to_numpy() == 3,
        lambda row: (
            f"the reward rose by {rose[row]:.2f} of its range, {held_out}{measure_name} "
            f"by {round(follows[row], 2) + 0.0:.2f}"  # no -0.00
        ),
    )


@red_flag(
    "held-out fall",
    why="What training still gains is lost on questions that it does not see.",
    first="keep='best', or the checkpoint before the fall; then a lower learning rate, or a reward without that gap",
)
def _held_out_fall(steps: Steps) -> Sign:
    """After an evaluation: a fifth of the range below the best one so far, or a tenth that is half of it.

    Accuracy if it is measured, else the reward. Where intervals are recorded the two must not touch.
    """
    name = REWARD
    if np.isfinite(steps[ACCURACY]).any():
        name = ACCURACY
    value = steps[name]
    if not np.isfinite(value).any():
        return None
    share = steps.share_of_scale(REWARD) if name == REWARD else value
    best = np.fmax.accumulate(share)
    rows = np.arange(len(steps.table))
    best_row = np.maximum.accumulate(np.where(share >= best, rows, 0))
    # False where the best row's bounds are not known.
    touches = steps[f"{name}_high"] >= steps[f"{name}_low"][best_row]
    limit = np.where(share <= best / 2, 0.1, 0.2)

    def evidence(row: int) -> str:
        at_best = best_row[row]
        return (
            f"held-out {name.removeprefix('eval/')} {value[row]:.2f} where it was {value[at_best]:.2f} after step "
            f"{steps['step'][at_best]:.0f}"
        )

    return ~touches & (best - share >= limit), evidence


@red_flag(
    "length explosion",
    lasted=3,
    why="Every token is paid for twice, in sampling and in the update, and what is cut off has no answer.",
    first="see whether the reward pays for length; rewards.RightSize; loss='dr_grpo'; a maximum that fits",
)
def _length_explosion(steps: Steps) -> Sign:
    """Over 3 steps: 4 times the tokens of the first steps, or twice with 30 points more cut off."""
    length = steps.mean("completion_length", 3)
    start = first_mean(steps["completion_length"])
    cut_off = steps.mean("completion_cut_off", 3)
    more_cut_off = np.nan_to_num(cut_off) - np.nan_to_num(
        first_mean(steps["completion_cut_off"])
    )
    return (
        (length > 4 * start) | (length > 2 * start) & (more_cut_off > 0.3),
        lambda row: (
            f"completions of {length[row]:.0f} tokens where {start:.0f} were usual, {cut_off[row]:.0%} cut off; "
            f"{_longest_that_ended(steps, row)}"
        ),
    )


@red_flag(
    "cut off",
    lasted=3,
    why="A completion that is cut off is scored on half an answer, and stopping is not learnt.",
    first="a larger max_completion_tokens, or a prompt and reward that ask for less",
)
def _cut_off(steps: Steps) -> Sign:
    """Over 3 steps: more than half of the completions cut off."""
    share = steps.mean("completion_cut_off", 3)
    most = steps.setup.max_tokens or "the most"
    return (
        share > 0.5,
        lambda row: (
            f"{share[row]:.0%} of completions were cut off at {most} tokens; {_longest_that_ended(steps, row)}"
        ),
    )


def _longest_that_ended(steps: Steps, row: int) -> str:
    """Evidence on the length that would suffice: the longest completion of the last 8 steps that was not cut off."""
    share_that_ended = 1 - steps.mean("completion_cut_off", 3)[row]
    longest = steps["completions/max_terminated_length"][: row + 1][-8:]
    if not share_that_ended > 0.05 or not np.nansum(longest):
        return "hardly one ended by itself, so the length that would do is not known"
    return f"the longest that ended by itself took {np.nanmax(longest):.0f} tokens"


@red_flag(
    "language switch",
    lasted=3,
    why="A policy that leaves its language is often about to collapse, and a reader loses the thread.",
    first="an earlier checkpoint, a lower learning rate; rewards.Language as a part of the reward",
)
def _language_switch(steps: Steps) -> Sign:
    """Over 3 steps: a fifth fewer letters in the first rollout's script, if that had at least 60 %."""
    scripts = steps.table.filter(regex="^script/").astype(float)
    if scripts.empty:
        return None
    # A script that a measured step lacks has no letters in it.
    is_measured = scripts.notna().any(axis=1)
    scripts[is_measured] = scripts[is_measured].fillna(0.0)
    # One rollout: a reward can change the language within three.
    first_shares = scripts[is_measured].head(1).mean()
    if not first_shares.max() >= 0.6:  # nothing to read, or no usual script
        return None
    usual = first_shares.idxmax()
    start = first_shares[usual]
    share = trailing(scripts[usual].to_numpy(), 3)

    def evidence(row: int) -> str:
        shares = scripts.iloc[row].drop(usual)
        text = f"letters in {usual.removeprefix('script/')} script fell from {start:.0%} to {share[row]:.0%}"
        if shares.max() > 0:
            text += f", {shares.idxmax().removeprefix('script/')} {shares.max():.0%}"
        return text

    return share < 0.8 * start, evidence


@red_flag(
    "part never paid",
    lasted=NEVER,
    why="What is never rewarded is not learnt; the other parts may rise all the same.",
    first="check_rewards on a few rows; then an easier task, partial credit or a warm start",
)
def _part_never_paid(steps: Steps) -> Sign:
    """A trained part gave 0, or the low end of its range, to every completion of 10 steps.

    Of a sum's parts only those that judge the answer: others may be penalties, where 0 is best.
    """
    setup = steps.setup
    names = [
        name for name in {**setup.weights, **setup.answer} if setup.weights.get(name, 1) > 0
    ]
    low = {name: steps.scale(name)[0] for name in names}

    def is_unpaid(name: str, means: np.ndarray) -> np.ndarray:
        return np.isclose(means, low[name], rtol=1e-6, atol=0)

    return _never(steps, names, is_unpaid, lambda name, row: f"{low[name][row]:g}")


@red_flag(
    "part never judged",
    lasted=NEVER,
    why="It moves nothing: the total is that of the other parts, or there is none at all.",
    first="the columns that it reads: a gold answer that cannot be read gives None; check_rewards says in which rows",
)
def _part_never_judged(steps: Steps) -> Sign:
    """A part, of any weight, gave None to every completion of 10 steps."""
    return _never(steps, steps.setup.parts, lambda _, means: np.isnan(means), lambda *_: "None")


def _never(
    steps: Steps,
    parts: Sequence[str],
    is_dead: Callable[[str, np.ndarray], np.ndarray],
    score_text: Callable[[str, int], str],
) -> Sign:
    """Parts whose means satisfy is_dead(part, means) in NEVER consecutive rows; parts without a column are skipped.

    score_text: what (part, row) gave to every completion.
    """
    names = [name for name in parts if f"reward/{name}" in steps.table]
    if not names:
        return None
    dead = pd.DataFrame(
        {name: is_dead(name, steps[f"reward/{name}"]) for name in names}, dtype=float
    )
    lasted = dead.rolling(NEVER).sum() == NEVER  # (steps, parts)

    def evidence(row: int) -> str:
        parts_in_row = [name for name in names if lasted[name].iloc[row]]
        scores = dict.fromkeys(score_text(name, row) for name in parts_in_row)
        return f"{' and '.join(parts_in_row)} gave {' and '.join(scores)} to every completion of {NEVER} steps"

    return lasted.any(axis=1).to_numpy(), evidence


OF_ROLLOUTS = (
    entropy_collapse, mode_collapse, sparse_reward, _cancelling_parts, _length_explosion, _cut_off, _language_switch,
)  # fmt: skip
"""On the rows of steps that sampled; with iterations above 1 the others have no reward."""
OF_PARTS = (_part_never_paid, _part_never_judged)
"""On the rows of steps that sampled, those without any total among them."""
OF_STEPS = (*OF_UPDATES, _hacking, _held_out_fall, one_answer)
"""On all rows."""
