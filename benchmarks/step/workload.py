"""The work every arm is given: prompts, completions fixed beforehand, rewards that follow from them.

Simplification: but for the main job, a completion's tokens are drawn at random from the tokenizer's plain words and not
sampled from the model. A dense model takes the same time over any token, and random weights would never stop where
they should.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPREAD = 0.6  # of the log-normal distribution that completion lengths come from
FLAT_SHARE = 0.25  # share of groups whose rewards are all equal


@dataclass(frozen=True)
class Workload:
    """P prompts with G completions each; the rows of one prompt are adjacent.

    prompt_ids: what the tokenizer makes of `prompts`; completion_ids: P * G rows, ending in eos unless cut off at
    max_completion; flat: P, whether the group's rewards are all equal (its advantages are then zero); tokens: where
    the completions come from.
    """

    prompts: list[str]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    flat: list[bool]
    group_size: int
    max_completion: int
    eos: int
    seed: int
    tokens: str = ""

    @property
    def rows(self) -> list[list[int]]:
        """P * G rows, prompt and completion."""
        return [
            self.prompt_ids[r // self.group_size] + ids
            for r, ids in enumerate(self.completion_ids)
        ]

    @property
    def checksum(self) -> int:
        """CRC-32 of all tokens and of which groups are flat."""
        return zlib.crc32(repr((self.prompt_ids, self.completion_ids, self.flat)).encode())

    def dataset(self) -> Dataset:
        """One row a prompt, with the columns that `reward` reads."""
        return Dataset.from_dict(
            {
                "prompt": self.prompts,
                "number": list(range(len(self.prompts))),
                "flat": self.flat,
            }
        )

    def reward(self, completions, *, completion_ids, flat, **columns) -> list[float]:
        """A number in [0, 1] that follows from seed and tokens alone; 0.5 for every completion of a flat group."""
        return [
            0.5 if equal else zlib.crc32(repr((self.seed, list(ids))).encode()) % 1025 / 1024
            for ids, equal in zip(completion_ids, flat, strict=True)
        ]

    __name__ = "seeded_reward"  # TRL names metrics after the reward

    def __call__(self, completions, **columns) -> list[float]:
        return self.reward(completions, **columns)


@dataclass(frozen=True)
class Shape:
    """How much: prompts, group_size completions each, of at most max_completion tokens.

    prompt_tokens: (shortest, longest) of prompts made of words; None where a task makes them.
    mean_completion: tokens in the mean; None: each completion has max_completion of them.
    """

    prompts: int
    group_size: int
    prompt_tokens: tuple[int, int] | None
    mean_completion: float | None
    max_completion: int


def make_workload(tokenizer: PreTrainedTokenizerBase, shape: Shape, seed: int) -> Workload:
    """Prompts and completions of words: prompt lengths spread evenly over shape.prompt_tokens.

    Completion lengths are log-normal, cut off at the maximum, with the given mean; without a mean all are the maximum.
    Raises ValueError for a mean that the maximum does not allow.
    """
    draw = random.Random(seed)
    low, high = shape.prompt_tokens
    prompt_lengths = [
        round(low + (i + 0.5) / shape.prompts * (high - low)) for i in range(shape.prompts)
    ]
    if shape.mean_completion is not None:
        draw.shuffle(prompt_lengths)
    words = plain_words(tokenizer, draw)
    texts, ids = zip(
        *(exact_prompt(tokenizer, n, words, draw) for n in prompt_lengths), strict=True
    )
    completions = word_completions(tokenizer, shape, seed, words, draw)
    return finished(tokenizer, shape, seed, texts, ids, completions, draw)


def word_completions(
    tokenizer: PreTrainedTokenizerBase,
    shape: Shape,
    seed: int,
    words: list[tuple[int, str]],
    draw: random.Random,
) -> list[list[int]]:
    """prompts * group_size rows of word tokens, ending in eos unless cut off at the maximum."""
    most = shape.max_completion
    rows = shape.prompts * shape.group_size
    lengths = [most] * rows
    if shape.mean_completion is not None:
        lengths = completion_lengths(rows, shape.mean_completion, most, seed)
    return [
        [draw.choice(words)[0] for _ in range(n if n == most else n - 1)]
        + ([] if n == most else [tokenizer.eos_token_id])
        for n in lengths
    ]


def finished(
    tokenizer: PreTrainedTokenizerBase,
    shape: Shape,
    seed: int,
    texts: Sequence[str],
    ids: Sequence[list[int]],
    completions: list[list[int]],
    draw: random.Random,
    tokens: str = "random words of the vocabulary, forced",
) -> Workload:
    """The workload of these prompts and completions; draws which groups have equal rewards."""
    # Where there is one group only it has something to teach, else there were no gradient to compare.
    flat_groups = min(shape.prompts - 1, max(1, round(FLAT_SHARE * shape.prompts)))
    flat_groups = set(draw.sample(range(shape.prompts), flat_groups))
    return Workload(
        prompts=list(texts),
        prompt_ids=list(ids),
        completion_ids=completions,
        flat=[i in flat_groups for i in range(shape.prompts)],
        group_size=shape.group_size,
        max_completion=shape.max_completion,
        eos=tokenizer.eos_token_id,
        seed=seed,
        tokens=tokens,
    )


def completion_lengths(n: int, mean: float, maximum: int, seed: int) -> list[int]:
    """n lengths in [2, maximum], log-normal and cut off at the maximum, in an order that the seed draws.

    They are the distribution's n evenly spaced quantiles, so that any seed gives the same amount of work.
    Raises ValueError unless 2 < mean < maximum.

    >>> lengths = completion_lengths(64, 300, 512, seed=0)
    >>> round(sum(lengths) / 64), max(lengths)
    (300, 512)
    """
    if not 2 < mean < maximum:
        raise ValueError(f"mean={mean} must lie between 2 and maximum={maximum}")
    quantiles = [SPREAD * NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)]

    def cut(mu: float) -> list[int]:
        return [min(maximum, max(2, round(math.exp(mu + q)))) for q in quantiles]

    low, high = 0.0, math.log(maximum) + 4
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) < mean * n else (low, middle)
    lengths = cut(high)
    random.Random(seed).shuffle(lengths)
    return lengths


def plain_words(
    tokenizer: PreTrainedTokenizerBase, draw: random.Random, count: int = 256
) -> list[tuple[int, str]]:
    """(id, word) of tokens that are one word each and stay one token behind a space.

    Raises ValueError when the vocabulary has too few.
    """
    found: list[tuple[int, str]] = []
    special = set(tokenizer.all_special_ids)
    for i in draw.sample(range(len(tokenizer)), len(tokenizer)):
        word = tokenizer.decode([i]).strip()
        if i not in special and word.isascii() and word.isalnum():
            if tokenizer(" " + word, add_special_tokens=False).input_ids == [i]:
                found.append((i, word))
        if len(found) == count:
            return found
    raise ValueError(
        f"tokenizer: only {len(found)} of {count} plain words found; give another tokenizer"
    )


def exact_prompt(
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    words: list[tuple[int, str]],
    draw: random.Random,
) -> tuple[str, list[int]]:
    """A text of exactly that many tokens, special ones that the tokenizer adds by itself included, and its ids.

    Raises ValueError if no text tried comes out right.
    """
    own = len(tokenizer("").input_ids)
    for _ in range(20):
        text = "".join(" " + draw.choice(words)[1] for _ in range(tokens - own))
        ids = tokenizer(text).input_ids
        if len(ids) == tokens:
            return text, ids
    raise ValueError(
        f"tokens={tokens}: no prompt of that length found; the last had {len(ids)} tokens"
    )


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of made-up words w2, w3, ...: token counts are right and nothing has to be downloaded.

    >>> word_tokenizer(10)("w3 w7").input_ids
    [3, 7]
    """
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
