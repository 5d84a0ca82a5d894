"""How different are a group's completions? Distinct n-grams, self-BLEU, and how many are unique.

GRPO learns from differences inside a group. If all completions of a prompt are equal, so are their rewards, and
the group teaches nothing, however many are sampled.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from grpo_kit._support.argument_checks import check_whole
from grpo_kit.rewards.form import WORD, ngrams
from grpo_kit.watch._red_flag import WINDOW, Sign, Steps, red_flag, trailing

_PIECE = re.compile(rf"{WORD.pattern}|[^\w\s]")  # words and signs: 3+4 is not 3*4
_ORDERS = 4


def pieces(text: str) -> list[str]:
    """Words in lower case and single signs; a Chinese or Japanese character is a word by itself.

    >>> pieces("Then 3*4=12.")
    ['then', '3', '*', '4', '=', '12', '.']
    """
    return _PIECE.findall(text.lower())


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Different n-grams divided by all n-grams of the texts, in (0, 1]; NaN if no text has n pieces.

    G equal texts without repetition give 1 / G. Short answers share their tags and signs, so compare a run with its
    own start, not with other tasks.
    Source: Li et al. 2016, arXiv:1510.03055.
    Raises ValueError for n below 1.

    >>> distinct_n(["a b c", "a b d"])
    0.75
    """
    check_whole("n", n, hint="; 1 and 2 are usual")
    grams = [gram for text in texts for gram in ngrams(pieces(text), n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def self_bleu(texts: Sequence[str]) -> float:
    """Mean BLEU of each text against all others, in [0, 1]: 1 if all are equal, 0 if no word is shared.

    N-grams up to 4, no more than the text has; orders without a match are smoothed exponentially; the brevity penalty
    uses the other text of closest length (ties: the shorter), as in sacrebleu. Two empty texts are equal.
    Counts each n-gram of the group once: linear in its length.
    Source: Zhu et al. 2018, arXiv:1802.01886.
    Raises ValueError for fewer than two texts.

    >>> self_bleu(["a b c", "a b c"]), self_bleu(["a b", "c d"])
    (1.0, 0.0)
    """
    if len(texts) < 2:
        raise ValueError(
            f"texts={list(texts)!r}: give at least two, the completions of one prompt"
        )
    split = [pieces(text) for text in texts]
    if all(words == split[0] for words in split):
        return 1.0
    counts = [[Counter(ngrams(words, n)) for words in split] for n in range(1, _ORDERS + 1)]
    highest = [_two_highest(of_order) for of_order in counts]
    scores = []
    for text, words in enumerate(split):
        distances = [
            (abs(len(neighbour) - len(words)), len(neighbour))
            for neighbour in split[:text] + split[text + 1 :]
        ]
        _, closest = min(distances)
        scores.append(
            _bleu(
                [of_order[text] for of_order in counts], highest, closest / max(1, len(words))
            )
        )
    return sum(scores) / len(scores)


def group_diversity(completions: pd.DataFrame) -> pd.DataFrame:
    """Per step, the means over its groups of measures that show whether completions still differ.

    completions: from read_completions (columns step, group, completion). Groups of one are left out.
    Returns step, diversity/unique (different completions / completions, in [1 / G, 1]), diversity/distinct_2 (see
    distinct_n) and diversity/self_bleu.
    Raises ValueError if a column is missing.

    >>> table = pd.DataFrame({"step": 1, "group": 0, "completion": ["4", "4", "4", "5"]})
    >>> group_diversity(table)["diversity/unique"].tolist()
    [0.5]
    """
    missing_columns = [
        name for name in ("step", "group", "completion") if name not in completions
    ]
    if missing_columns:
        raise ValueError(
            f"completions lacks {missing_columns}; it needs step, group, completion"
        )
    rows = []
    for (step, _), group in completions.groupby(["step", "group"])["completion"]:
        texts = list(group.fillna(""))
        if len(texts) > 1:
            rows.append(
                (step, len(set(texts)) / len(texts), distinct_n(texts), self_bleu(texts))
            )
    columns = ["step", "diversity/unique", "diversity/distinct_2", "diversity/self_bleu"]
    return pd.DataFrame(rows, columns=columns).groupby("step", as_index=False).mean()


def _two_highest(counts: Sequence[Counter]) -> dict[tuple, tuple[int, int]]:
    """n-gram -> its highest count in a text, and the highest in the others: the clip for every text in one pass."""
    highest: dict[tuple, tuple[int, int]] = {}
    for counter in counts:
        for gram, count in counter.items():
            _, second, first = sorted([*highest.get(gram, (0, 0)), count])
            highest[gram] = first, second
    return highest


def _bleu(counts: Sequence[Counter], highest: Sequence[dict], length: float) -> float:
    """BLEU of a text by its n-grams of each order. length: of the closest other text, in lengths of this one."""
    logs = []
    smoothing = 1.0
    for counter, of_order in zip(counts, highest, strict=True):
        total = counter.total()
        if not total:
            break
        hits = 0
        for gram, count in counter.items():
            first, second = of_order[gram]
            hits += second if count == first else count
        if hits:
            logs.append(math.log(hits / total))
        elif logs:
            smoothing *= 2
            logs.append(math.log(1 / (smoothing * total)))
        else:
            return 0.0  # no piece is shared
    if not logs:
        return 0.0  # an empty text among others
    return math.exp(min(0.0, 1 - length) + sum(logs) / len(logs))


SOLVED = 0.6  # of the reward's range: a run below it has not solved its task
CERTAIN = 0.9  # of reward and of answer parts: a policy that earns so much is not wrong
FROZEN = 0.01  # entropy of a policy that samples one text
NEARLY = 0.8  # of the answer parts: nearly the highest
NEAR_1 = 0.9  # temperatures from here on are near 1
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


def _warmer_or(remedy: str) -> Callable[[Steps, int], str]:
    """The remedy, after a temperature near 1 where the run's is lower or unknown."""

    def first(steps: Steps, row: int) -> str:
        temperature = np.nan_to_num(steps["temperature"][row], nan=steps.setup.temperature)
        if temperature >= NEAR_1:
            return remedy
        if temperature < NEAR_1:
            return f"a temperature near 1 (it was {temperature:.3g}); else {remedy}"
        return f"a temperature near 1 where it is lower; else {remedy}"

    return first


@red_flag(
    "mode collapse",
    lasted=WINDOW,
    why="Without differences in a group there is no advantage: nothing more is learnt.",
    first=_warmer_or("an earlier checkpoint, more prompts a step, a lower rate"),
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
    first=_warmer_or("an earlier checkpoint and a lower learning rate"),
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
