"""Red flags of groups without a signal: collapsed, or never right. A solved task shows the same signs.

The accuracy of the answers distinguishes the two, see unsolved().
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from grpo_kit.watch._red_flag import WINDOW, Setup, Sign, column, over_window, red_flag, scale, trailing

SOLVED = 0.6  # of the reward's range: a run below it has not solved its task
CERTAIN = 0.9  # of reward and of answer parts: a policy that earns so much is not wrong
FROZEN, NEARLY = (
    0.01,
    0.8,
)  # entropy of a policy that samples one text; of the answer parts: nearly the highest
ONE_ANSWER, ABOVE_GOLDS = (
    0.9,
    0.3,
)  # share of the most frequent answer, and how far above the most frequent gold's


def unsolved(table: pd.DataFrame, setup: Setup) -> np.ndarray:
    """Is the task not solved, over 5 steps? A bool at each step.

    Below SOLVED of the reward it is not. Above it a shortcut may pay (the format always does), so the answer parts must
    have covered a quarter of the way from the best constant strategy to 1. Held-out measures of those 5 steps take
    precedence. If that strategy is unknown, a frozen policy (two steps without entropy and without
    any signal) counts as unsolved unless its answer parts are nearly at their highest.
    If reward and answer parts both earn CERTAIN of their range the task is solved, whatever a constant earns: a
    policy that earns nearly all is not wrong.
    """
    right = _answer_share(table, setup)
    low, high = scale(table, setup)
    earned = (over_window(table, "reward") - low) / (high - low)
    short = earned < SOLVED
    if setup.constant is not None:
        nearly_all = (earned >= CERTAIN) & (right >= CERTAIN)
        return short | (right < setup.constant + (1 - setup.constant) / 4) & ~nearly_all
    frozen = (column(table, "entropy") < FROZEN) & (column(table, "groups/equal_rewards") == 1)
    return short | (trailing(frozen, 2) == 1) & (right < NEARLY)


def _answer_share(table: pd.DataFrame, setup: Setup) -> np.ndarray:
    """The answer parts' mean over 5 steps as a share of their ranges; the reward's if none is known."""

    def share(prefix: str) -> pd.Series:
        weighted, weights = np.zeros(len(table)), 0.0
        for part, weight in (setup.answer or {None: 1.0}).items():
            low, high = scale(table, setup, part)
            name = "reward" if part is None else f"reward/{part}"
            weighted = weighted + weight * ((column(table, prefix + name) - low) / (high - low))
            weights += weight
        return pd.Series(weighted / weights)

    held_out = share("eval/").ffill(limit=WINDOW - 1)
    return held_out.fillna(share("").rolling(WINDOW).mean()).to_numpy()


def _earned(table: pd.DataFrame, setup: Setup, at: int) -> str:
    """The reward in words, beside a shortcut's if that is known."""
    earned = f"reward {over_window(table, 'reward')[at]:.2f}"
    if setup.constant is None:
        return earned
    right = _answer_share(table, setup)[at]
    return f"{earned}, {right:.2f} for answers where the best constant strategy earns {setup.constant:.2f}"


@red_flag(
    "mode collapse",
    lasted=WINDOW,
    why="Without differences in a group there is no advantage: nothing more is learnt.",
    first="an earlier checkpoint and a higher temperature; then more prompts a step, a lower learning rate or beta",
)
def mode_collapse(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps: nearly equal completions (self-BLEU above 0.9), no signal, and the task not solved."""
    same, equal = over_window(table, "diversity/self_bleu"), over_window(table, "groups/equal_rewards")
    unique, distinct = over_window(table, "diversity/unique"), over_window(table, "diversity/distinct_2")
    return (
        (same > 0.9) & (equal > 0.8) & unsolved(table, setup),
        lambda at: (
            f"{equal[at]:.0%} of groups have no signal and their completions are the same (self-BLEU {same[at]:.2f}, "
            f"{unique[at]:.0%} unique, distinct-2 {distinct[at]:.2f}) at {_earned(table, setup, at)}"
        ),
    )


@red_flag(
    "entropy collapse",
    lasted=WINDOW,
    why="The policy is sure of itself and wrong; it will hardly sample anything better.",
    first="an earlier checkpoint and a lower learning rate; then a higher temperature or epsilon_high",
)
def entropy_collapse(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps: entropy below 0.05 nats a token, and the task not solved."""
    entropy = over_window(table, "entropy")
    return (
        (entropy < 0.05) & unsolved(table, setup),
        lambda at: f"entropy {entropy[at]:.3f} nats a token at {_earned(table, setup, at)}",
    )


@red_flag(
    "sparse reward",
    lasted=WINDOW,
    why="These completions cost time and teach nothing.",
    first="easier prompts or partial credit; more completions a prompt; a warm start if none is ever right",
)
def sparse_reward(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps: 4 groups of 5 without a signal though completions differ, and the task not solved."""
    equal, same = over_window(table, "groups/equal_rewards"), over_window(table, "diversity/self_bleu")
    return (
        (equal > 0.8) & ~(same > 0.9) & unsolved(table, setup),
        lambda at: (
            f"{equal[at]:.0%} of groups have no signal{' though completions differ' if same[at] >= 0 else ''}, "
            f"at {_earned(table, setup, at)}"
        ),
    )


@red_flag(
    "one answer",
    why="A policy that answers alike whatever is asked earns what a constant does, and has not learnt the task.",
    first="keep='best', or an earlier checkpoint; then golds in equal shares, a lower learning rate or a higher beta",
)
def one_answer(table: pd.DataFrame, setup: Setup) -> Sign:
    """After a step: nine in ten held-out answers are the same, 30 points above the share of the most frequent gold.

    Measured by evaluation.HeldOut if at least 8 answers and half of them can be read.
    """
    same, gold = column(table, "eval/one_answer"), column(table, "eval/one_gold")
    return (
        (column(table, "step") > 0) & (same >= ONE_ANSWER) & (same >= gold + ABOVE_GOLDS),
        lambda at: (
            f"{same[at]:.0%} of held-out answers are the same, where the most frequent gold is {gold[at]:.0%}"
        ),
    )
