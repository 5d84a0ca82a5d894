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
# What a chunk costs besides its tokens, in tokens: gradients of all weights are added up once more.
CHUNK_COST = 32


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
            raise ValueError(
                f"rows[{number}] has an empty prompt; every prompt needs at least one token"
            )
    builder = _Builder(rows)
    # Methods to call with their arguments, the last first; each gives what comes next, in that order.
    jobs = [
        (builder.grow, *span, 0, False) for span in reversed(builder.split(0, len(rows), 0))
    ]
    while jobs:
        method, *arguments = jobs.pop()
        jobs += method(*arguments)
    positions = builder.positions
    stretches: list[Stretch] = []
    end = len(positions)
    open_starts: list[int] = []  # of stretches behind this one, the nearest last
    for start, stop in reversed(builder.stretches):
        while open_starts and positions[open_starts[-1]] > positions[start]:
            open_starts.pop()  # it continues this one
        stretches.append(Stretch(start, stop, open_starts[-1] if open_starts else end))
        open_starts.append(start)
    stretches.reverse()
    path_of_row = dict(zip(builder.order, builder.paths, strict=True))
    return PrefixTree(
        np.array(builder.input_ids, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        np.array(builder.labels, dtype=np.int64),
        np.repeat([s.end for s in stretches], [s.stop - s.start for s in stretches]).astype(
            np.int64
        ),
        [path_of_row[row] for row in range(len(rows))],
        stretches,
    )


def tree_tokens(rows: Sequence[Row]) -> int:
    """How many tokens the rows' tree has."""
    return len(build_tree(rows)) if rows else 0


class _Builder:
    """Grows the tree over the sorted rows, so that rows with a common prefix are a range."""

    def __init__(self, rows: Sequence[Row]) -> None:
        tokens = [(*prompt, *completion) for prompt, completion in rows]
        self.order = sorted(range(len(rows)), key=tokens.__getitem__)
        self.rows = [tokens[r] for r in self.order]
        self.scored_from = [len(rows[r][0]) for r in self.order]
        # Tokens that are read: all but a completion's last; without completion the whole prompt.
        self.read = [len(rows[r][0]) + max(len(rows[r][1]) - 1, 0) for r in self.order]
        self.paths = [np.zeros(n, dtype=np.int64) for n in self.read]
        self.input_ids: list[int] = []
        self.positions: list[int] = []
        self.labels: list[int] = []
        self.stretches: list[tuple[int, int]] = []

    def grow(self, low: int, high: int, depth: int, repeats: bool) -> list[tuple]:
        """Rows low..high - 1 agree up to some depth: adds their common part from `depth` on, then each continuation.

        repeats: whether the token before `depth` is repeated first, with the label that follows it here.
        """
        start = len(self.input_ids)
        tokens, scored_from = self.rows[low], min(self.scored_from[low:high])
        shared = common_length(tokens, self.rows[high - 1])
        scored, unscored = [], []  # ranges of rows that continue beyond `shared`
        for span in self.split(low, high, shared):
            is_scored = min(self.scored_from[slice(*span)]) <= shared
            (scored if is_scored else unscored).append(span)
        splits = len(scored) > 1  # the tree then holds the last token once for each of them
        begin, stop = depth - repeats, min(shared, max(self.read[low:high])) - splits
        self.input_ids.extend(tokens[begin:stop])
        self.positions.extend(range(begin, stop))
        labels = [-100] * max(stop - begin, 0)
        for place in range(max(begin, scored_from - 1), min(stop, shared - 1)):
            labels[place - begin] = tokens[place + 1]
        self.labels.extend(labels)
        for row in range(low, high):
            # Where the last token splits, a row that ends here reads the first of its copies, which comes next.
            row_stop = min(stop + splits, self.read[row])
            self.paths[row][begin:row_stop] = np.arange(start, start + row_stop - begin)
        if stop > begin:
            self.stretches.append((start, start + stop - begin))
        if splits:
            jobs = [(self.grow, *span, shared, True) for span in reversed(scored[1:])]
            if unscored:
                jobs.append((self._copy, scored[0], unscored, shared))
            else:
                jobs.append((self.grow, *scored[0], shared, True))
            return jobs
        if scored:
            self.labels[-1] = self.rows[scored[0][0]][shared]
        return [
            (self.grow, *span, shared, False)
            for span in sorted(scored + unscored, reverse=True)
        ]

    def _copy(
        self, scored: tuple[int, int], unscored: list[tuple[int, int]], depth: int
    ) -> list[tuple]:
        """The token before `depth`, with the label that the scored rows have, and all these rows behind it."""
        place = len(self.input_ids)
        first = self.rows[scored[0]]
        self.input_ids.append(first[depth - 1])
        self.positions.append(depth - 1)
        self.labels.append(first[depth])
        spans = [scored, *unscored]
        for low, high in spans:
            for row in range(low, high):
                self.paths[row][depth - 1] = place
        self.stretches.append((place, place + 1))
        return [(self.grow, *span, depth, False) for span in reversed(spans)]

    def split(self, low: int, high: int, depth: int) -> list[tuple[int, int]]:
        """Ranges of the rows that continue beyond `depth`, by their token there."""
        longer = [row for row in range(low, high) if len(self.rows[row]) > depth]
        spans = []
        for _, group in groupby(longer, key=lambda row: self.rows[row][depth]):
            rows = list(group)
            spans.append((rows[0], rows[-1] + 1))
        return spans


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens with which both begin.

    >>> common_length((1, 2, 3), (1, 2, 4))
    2
    """
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    low, high = 0, length  # equal up to low, not up to high
    while high - low > 1:
        middle = (low + high) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle
    return low


def _positions(rows: Sequence[Row], order: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows in sorted order: positions each takes alone, and the most it adds to those before it; long (R,)."""
    alone, added = [], []
    previous: tuple[int, ...] = ()
    for i in order:
        prompt, completion = rows[i]
        tokens = (*prompt, *completion)
        read = len(tokens) - 1
        shared = common_length(previous, tokens)
        if shared < len(tokens) and (shared >= len(prompt) or shared == len(previous)):
            shared -= 1  # the token before the branch is there once more
        alone.append(read)
        added.append(max(0, read - max(0, shared)))
        previous = tokens
    return torch.tensor(alone), torch.tensor(added)


def make_chunks(rows: list[Row], max_tokens: int) -> list[list[int]]:
    """Indices of rows, cut into chunks of at most max_tokens packed positions: the cut that costs least in all.

    Cost: positions, of which what rows share in a chunk counts once, and CHUNK_COST for each chunk; of cuts that cost
    the same the most even one. A row larger than max_tokens is a chunk of its own.

    >>> make_chunks([((5, 6), [7, 8]), ((4,), [1]), ((5, 6), [9])], max_tokens=4)
    [[1], [0, 2]]
    """
    scored = [i for i, (_, completion) in enumerate(rows) if completion]
    unscored = [i for i, (_, completion) in enumerate(rows) if not completion]
    if not scored:
        return [unscored] if unscored else []
    order = sorted(scored, key=lambda i: (*rows[i][0], *rows[i][1]))
    alone, added = _positions(rows, order)
    total = torch.cat([torch.zeros(1, dtype=torch.long), added.cumsum(0)])
    # of the first n rows: the cost, and where the last chunk begins
    least_costs, last_begins = [0.0], [0]
    for n in range(1, len(order) + 1):
        # Positions of rows i..n - 1 as one chunk, for each i: the first alone, the others on top of it.
        tokens = alone[:n] + total[n] - total[1 : n + 1]
        tokens = tokens.masked_fill(tokens > max_tokens, 2**60)
        tokens[n - 1] = alone[n - 1]
        even = (tokens / total[-1].clamp(min=1)) ** 2 / 2  # over all chunks less than one token
        costs = torch.tensor(least_costs, dtype=torch.float64) + tokens + CHUNK_COST + even
        begin = int(costs.argmin())
        last_begins.append(begin)
        least_costs.append(float(costs[begin]))
    chunks, n = [], len(order)
    while n:
        begin = last_begins[n]
        chunks.append(sorted(order[begin:n]))
        n = begin
    chunks[-1] = sorted(chunks[-1] + unscored)
    return chunks[::-1]


def as_rows(
    prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
) -> list[Row]:
    """(prompt tokens, completion tokens) of each completion."""
    return [(tuple(p), list(c)) for p, c in zip(prompt_ids, completion_ids, strict=True)]
