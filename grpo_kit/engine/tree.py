"""Rows of tokens as a tree of shared prefixes: a common beginning of several rows is stored and computed once.

The system text and worked example in front of all prompts of a task, a group's prompt, the turns of an episode,
completions that begin alike: all are found from the token ids; callers need not name shared parts.

The tree is flat, in preorder: a token comes after the one it continues, and all its continuations lie in one
stretch behind it. So visibility takes one number a token, `end`: the query at q sees the key at k if
k <= q < end[k].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

Row = tuple[Sequence[int], Sequence[int]]  # prompt tokens, completion tokens


class Stretch(NamedTuple):
    """Tokens start..stop - 1 of the tree, without a branch between them; continuations of the last end at `end`."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True)
class PrefixTree:
    """R rows as N tokens. All arrays are integers.

    input_ids, positions, labels, end: (N,). labels: the token to be scored behind each one, -100 where none is.
    places: one array a row; the tokens on the row's way, as indices: of its prompt, then of its completion without the
    last token, which nothing continues. stretches: the tree's parts without a branch, in order.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    end: np.ndarray
    places: list[np.ndarray]
    stretches: list[Stretch]

    def __len__(self) -> int:
        return len(self.input_ids)

    def sees(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """bool (n, n) of the tokens start..stop - 1, True where a query (row) may see a key (column)."""
        end = torch.from_numpy(self.end[start:stop])
        order = torch.arange(start, start + len(end))
        return (order <= order[:, None]) & (order[:, None] < end)


def build_tree(rows: Sequence[Row]) -> PrefixTree:
    """The tree of R rows (prompt, completion), in any order; completions are scored, prompts are not.

    A token has one label. If two rows score different continuations of it, the tree holds it once for each.
    A row without completion takes part with its prompt alone. Raises ValueError for an empty prompt.

    >>> tree = build_tree([([5, 6], [7, 8]), ([5, 6], [9, 9])])
    >>> tree.input_ids.tolist(), tree.labels.tolist()
    ([5, 6, 7, 6, 9], [-100, 7, 8, 9, 9])
    >>> [place.tolist() for place in tree.places]
    [[0, 1, 2], [0, 3, 4]]
    """
    for number, (prompt, _) in enumerate(rows):
        if not len(prompt):
            raise ValueError(f"rows[{number}] has an empty prompt; every prompt needs at least one token")
    return _Builder(rows).tree()


def tree_tokens(rows: Sequence[Row]) -> int:
    """How many tokens the rows' tree has."""
    return len(build_tree(rows)) if rows else 0


class _Builder:
    """Grows the tree over the sorted rows, so that rows with a common prefix are a range."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.whole = [tuple(prompt) + tuple(completion) for prompt, completion in rows]
        self.order = sorted(range(len(rows)), key=self.whole.__getitem__)
        self.sorted = [self.whole[r] for r in self.order]
        self.scored_from = [len(rows[r][0]) for r in self.order]
        # Tokens that are read: all but a completion's last; without completion the whole prompt.
        self.read = [len(rows[r][0]) + max(len(rows[r][1]) - 1, 0) for r in self.order]
        self.input_ids: list[int] = []
        self.positions: list[int] = []
        self.labels: list[int] = []
        self.stretches: list[list[int]] = []
        self.paths = [np.zeros(n, dtype=np.int64) for n in self.read]

    def tree(self) -> PrefixTree:
        # Work to do, the last first: grow a range of rows from a depth, or close a stretch's tree.
        waiting: list[tuple] = [
            ("grow", *span, 0, False) for span in reversed(self._split(0, len(self.sorted), 0))
        ]
        while waiting:
            what, *rest = waiting.pop()
            if what == "end":
                self.stretches[rest[0]][2] = len(self.input_ids)
            else:
                waiting += self._grow(*rest) if what == "grow" else self._copy(*rest)
        end = np.zeros(len(self.input_ids), dtype=np.int64)
        for start, stop, last in self.stretches:
            end[start:stop] = last
        places: list[np.ndarray] = [None] * len(self.order)
        for path, r in zip(self.paths, self.order, strict=True):
            places[r] = path
        return PrefixTree(
            np.array(self.input_ids, dtype=np.int64),
            np.array(self.positions, dtype=np.int64),
            np.array(self.labels, dtype=np.int64),
            end,
            places,
            [Stretch(*s) for s in self.stretches if s[1] > s[0]],
        )

    def _grow(self, low: int, high: int, depth: int, again: bool) -> list[tuple]:
        """Rows low..high - 1 agree up to some depth: adds their common part from `depth` on, then each continuation.

        again: whether the token before `depth` is repeated first, with the label that follows it here.
        """
        start = len(self.input_ids)
        shared = common_length(self.sorted[low], self.sorted[high - 1])
        tokens, scored = self.sorted[low], min(self.scored_from[low:high])
        parts: list[
            tuple[int, int, int | None]
        ] = []  # each range, with its token at `shared` if a row scores it
        for a, b in self._split(low, high, shared):
            is_scored = min(self.scored_from[a:b]) <= shared
            parts.append((a, b, self.sorted[a][shared] if is_scored else None))
        scored_parts = [part for part in parts if part[2] is not None]
        repeated = len(scored_parts) > 1  # the tree then holds the last token once for each of them
        last = min(shared, max(self.read[low:high])) - repeated
        begin = depth - again
        self.input_ids.extend(tokens[begin:last])
        self.positions.extend(range(begin, last))
        labels = [-100] * max(last - begin, 0)
        for place in range(max(begin, scored - 1), min(last, shared - 1)):
            labels[place - begin] = tokens[place + 1]
        self.labels.extend(labels)
        for row in range(low, high):
            # With `repeated`, one that ends here reads the first of the last token's copies, which comes next.
            stop = min(last + repeated, self.read[row])
            self.paths[row][begin:stop] = np.arange(start, start + stop - begin)
        self.stretches.append([start, len(self.input_ids), 0])
        ending = [("end", len(self.stretches) - 1)]
        if not repeated:
            if scored_parts:
                self.labels[-1] = scored_parts[0][2]
            return ending + [("grow", a, b, shared, False) for a, b, _ in reversed(parts)]
        rest = [part for part in parts if part[2] is None]
        copies = [("grow", a, b, shared, True) for a, b, _ in scored_parts]
        if rest:
            copies[0] = ("copy", [scored_parts[0], *rest], shared)
        return ending + copies[::-1]

    def _copy(self, parts: list[tuple[int, int, int | None]], depth: int) -> list[tuple]:
        """The token before `depth`, with the first part's label, and all these parts behind it."""
        place = len(self.input_ids)
        a, _, label = parts[0]
        self.input_ids.append(self.sorted[a][depth - 1])
        self.positions.append(depth - 1)
        self.labels.append(label)
        for low, high, _ in parts:
            for row in range(low, high):
                self.paths[row][depth - 1] = place
        self.stretches.append([place, place + 1, 0])
        grow = [("grow", a, b, depth, False) for a, b, _ in reversed(parts)]
        return [("end", len(self.stretches) - 1), *grow]

    def _split(self, low: int, high: int, depth: int) -> list[tuple[int, int]]:
        """Ranges of the rows that continue beyond `depth`, by their token there."""
        longer = [row for row in range(low, high) if len(self.sorted[row]) > depth]
        ranges = (list(same) for _, same in groupby(longer, key=lambda row: self.sorted[row][depth]))
        return [(rows[0], rows[-1] + 1) for rows in ranges]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin.

    >>> common_length((1, 2, 3), (1, 2, 4))
    2
    """
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    low, high = 0, length  # equal up to low, not up to high
    while high - low > 1:
        middle = (low + high) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle
    return low
