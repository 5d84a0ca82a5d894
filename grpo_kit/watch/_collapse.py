"""Red flags of groups without a signal: collapsed, or never right. A solved task shows the same signs.

The accuracy of the answers distinguishes the two, see unsolved().
"""

import numpy as np
import pandas as pd

from grpo_kit.watch._red_flag import WINDOW, Sign, Steps, red_flag, trailing

SOLVED = 0.6  # of the reward's range: a run below it has not solved its task
CERTAIN = 0.9  # of reward and of answer parts: a policy that earns so much is not wrong
FROZEN = 0.01  # entropy of a policy that samples one text
NEARLY = 0.8  # of the answer parts: nearly the highest
ONE_ANSWER = 0.9  # share of the most frequent answer
ABOVE_GOLDS = 0.3  # and how far above the share of the most frequent gold


def unsolved(steps: Steps) -> np.ndarray:
    """Is the task not solved, over 5 steps? A bool at each step.

    Below SOLVED of the reward it is not. Above it a shortcut may pay (the format always does), so the answer parts must
    have covered a quarter of the way from the best constant strategy to 1. Held-out measures of those 5 steps take
    precedence. If that strategy is unknown, a frozen policy (two steps without entropy and without
    any signal) counts as unsolved unless its answer parts are nearly at their highest.
    If reward and answer parts both earn CERTAIN of their range the task is solved, whatever a constant earns: a
    policy that earns nearly all is not wrong.
    """
    constant = steps.setup.constant
    answers = _answer_share(steps)
    low, high = steps.scale()
    reward = (steps.mean("reward") - low) / (high - low)
    is_low = reward < SOLVED
    if constant is not None:
        nearly_all = (reward >= CERTAIN) & (answers >= CERTAIN)
        near_constant = answers < constant + (1 - constant) / 4
        return is_low | near_constant & ~nearly_all
    frozen = (steps["entropy"] < FROZEN) & (steps["groups/equal_rewards"] == 1)
    return is_low | (trailing(frozen, 2) == 1) & (answers < NEARLY)


def _answer_share(steps: Steps) -> np.ndarray:
    """The answer parts' mean over 5 steps as a share of their ranges; the reward's if none is known."""
    held_out = pd.Series(_weighted_share(steps, "eval/")).ffill(limit=WINDOW - 1)
    training = pd.Series(_weighted_share(steps, "")).rolling(WINDOW).mean()
    return held_out.fillna(training).to_numpy()


def _weighted_share(steps: Steps, prefix: str) -> np.ndarray:
    """The answer parts as a share of their ranges at each step. prefix: eval/ for the held-out measures."""
    answer = steps.setup.answer
    if not answer:
        return steps.share_of_scale(f"{prefix}reward")
    total = np.zeros(len(steps.table))
    for part, weight in answer.items():
        total = total + weight * steps.share_of_scale(f"{prefix}reward/{part}", part)
    return total / sum(answer.values())


def _earned(steps: Steps, row: int) -> str:
    """The reward in words, beside a shortcut's if that is known."""
    earned = f"reward {steps.mean('reward')[row]:.2f}"
    constant = steps.setup.constant
    if constant is None:
        return earned
    answers = _answer_share(steps)[row]
    return f"{earned}, {answers:.2f} for answers where the best constant strategy earns {constant:.2f}"


@red_flag(
    "mode collapse",
    lasted=WINDOW,
    why="Without differences in a group there is no advantage: nothing more is learnt.",
    first="an earlier checkpoint and a higher temperature; then more prompts a step, a lower learning rate or beta",
)
def mode_collapse(steps: Steps) -> Sign:
    """Over 5 steps: nearly equal completions (self-BLEU above 0.9), no signal, and the task not solved."""
    bleu = steps.mean("diversity/self_bleu")
    equal = steps.mean("groups/equal_rewards")
    unique = steps.mean("diversity/unique")
    distinct = steps.mean("diversity/distinct_2")
    return (
        (bleu > 0.9) & (equal > 0.8) & unsolved(steps),
        lambda row: (
            f"{equal[row]:.0%} of groups have no signal and their completions are the same "
            f"(self-BLEU {bleu[row]:.2f}, {unique[row]:.0%} unique, distinct-2 {distinct[row]:.2f}) "
            f"at {_earned(steps, row)}"
        ),
    )


@red_flag(
    "entropy collapse",
    lasted=WINDOW,
    why="The policy is sure of itself and wrong; it will hardly sample anything better.",
    first="an earlier checkpoint and a lower learning rate; then a higher temperature or epsilon_high",
)
def entropy_collapse(steps: Steps) -> Sign:
    """Over 5 steps: entropy below 0.05 nats a token, and the task not solved."""
    entropy = steps.mean("entropy")
    return (
        (entropy < 0.05) & unsolved(steps),
        lambda row: f"entropy {entropy[row]:.3f} nats a token at {_earned(steps, row)}",
    )


@red_flag(
    "sparse reward",
    lasted=WINDOW,
    why="These completions cost time and teach nothing.",
    first="easier prompts or partial credit; more completions a prompt; a warm start if none is ever right",
)
def sparse_reward(steps: Steps) -> Sign:
    """Over 5 steps: 4 groups of 5 without a signal though completions differ, and the task not solved."""
    equal = steps.mean("groups/equal_rewards")
    bleu = steps.mean("diversity/self_bleu")

    def evidence(row: int) -> str:
        differ = " though completions differ" if bleu[row] >= 0 else ""
        return f"{equal[row]:.0%} of groups have no signal{differ}, at {_earned(steps, row)}"

    return (equal > 0.8) & ~(bleu > 0.9) & unsolved(steps), evidence


@red_flag(
    "one answer",
    why="A policy that answers alike whatever is asked earns what a constant does, and has not learnt the task.",
    first="keep='best', or an earlier checkpoint; then golds in equal shares, a lower learning rate or a higher beta",
)
def one_answer(steps: Steps) -> Sign:
    """After a step: nine in ten held-out answers are the same, 30 points above the share of the most frequent gold.

    Measured by evaluation.HeldOut if at least 8 answers and half of them can be read.
    """
    answer = steps["eval/one_answer"]
    gold = steps["eval/one_gold"]
    return (
        (steps["step"] > 0) & (answer >= ONE_ANSWER) & (answer >= gold + ABOVE_GOLDS),
        lambda row: (
            f"{answer[row]:.0%} of held-out answers are the same, where the most frequent gold is {gold[row]:.0%}"
        ),
    )
