"""How different are a group's completions? Distinct n-grams, self-BLEU, and how many are unique.

GRPO learns from differences inside a group. If all completions of a prompt are equal, so are their rewards, and
the group teaches nothing, however many are sampled.
"""

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
        scores.append(_bleu([of_order[text] for of_order in counts], highest, closest / max(1, len(words))))
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
    missing_columns = [name for name in ("step", "group", "completion") if name not in completions]
    if missing_columns:
        raise ValueError(f"completions lacks {missing_columns}; it needs step, group, completion")
    rows = []
    for (step, _), group in completions.groupby(["step", "group"])["completion"]:
        texts = list(group.fillna(""))
        if len(texts) > 1:
            rows.append((step, len(set(texts)) / len(texts), distinct_n(texts), self_bleu(texts)))
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
