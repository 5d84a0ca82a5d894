"""How different are a group's completions? Distinct n-grams, self-BLEU, and how many are unique.

GRPO learns from differences inside a group. If all completions of a prompt are equal, so are their rewards, and
the group teaches nothing, however many are sampled.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import pandas as pd

from grpo_kit._support.argument_checks import check_whole
from grpo_kit.rewards.form import WORD, ngrams

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
        raise ValueError(f"texts={list(texts)!r}: give at least two, the completions of one prompt")
    split = [pieces(text) for text in texts]
    if len(set(map(tuple, split))) == 1:
        return 1.0
    counts = [[Counter(ngrams(words, n + 1)) for words in split] for n in range(_ORDERS)]
    most = [_two_highest(of_order) for of_order in counts]
    lengths = [len(words) for words in split]
    return sum(_bleu(i, counts, most, lengths) for i in range(len(texts))) / len(texts)


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
    missing = [name for name in ("step", "group", "completion") if name not in completions]
    if missing:
        raise ValueError(f"completions lacks {missing}; it needs step, group, completion")
    rows = []
    for (step, _), group in completions.groupby(["step", "group"], sort=True)["completion"]:
        texts = list(group.fillna(""))
        if len(texts) < 2:
            continue
        rows.append((step, len(set(texts)) / len(texts), distinct_n(texts), self_bleu(texts)))
    columns = ["step", "diversity/unique", "diversity/distinct_2", "diversity/self_bleu"]
    return pd.DataFrame(rows, columns=columns).groupby("step", as_index=False).mean()


def _two_highest(counts: Sequence[Counter]) -> dict[tuple, tuple[int, int, int]]:
    """n-gram -> (highest count, its text, highest count of the others): the clip for every text in one pass."""
    most: dict[tuple, tuple[int, int, int]] = {}
    for i, counter in enumerate(counts):
        for gram, count in counter.items():
            first, owner, second = most.get(gram, (0, -1, 0))
            most[gram] = (count, i, first) if count > first else (first, owner, max(second, count))
    return most


def _bleu(i: int, counts: list[list[Counter]], most: list[dict], lengths: list[int]) -> float:
    logs, smoothing = [], 1.0
    for of_order, highest in zip(counts, most, strict=True):
        total = of_order[i].total()
        if not total:
            break
        hits = 0
        for gram, count in of_order[i].items():
            first, owner, second = highest[gram]
            hits += min(count, second if owner == i else first)
        if not hits:
            if not logs:
                return 0.0  # no piece is shared
            smoothing *= 2
        logs.append(math.log(hits / total if hits else 1 / (smoothing * total)))
    if not logs:
        return 0.0  # an empty text among others
    closest = min((abs(n - lengths[i]), n) for j, n in enumerate(lengths) if j != i)[1]
    brevity = min(0.0, 1 - closest / lengths[i])
    return math.exp(brevity + sum(logs) / len(logs))
