"""The work every arm is given: prompts of exact lengths, completions fixed beforehand, rewards that follow from them.

Simplification: a completion's tokens are drawn at random from the tokenizer's plain words and not sampled from the
model. A dense model takes the same time over any token, and random weights would never stop where they should.
"""

from __future__ import annotations

import math
import random
import zlib
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
    max_completion; flat: P, whether the group's rewards are all equal (its advantages are then zero).
    """

    prompts: list[str]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    flat: list[bool]
    group_size: int
    max_completion: int
    eos: int
    seed: int

    def dataset(self) -> Dataset:
        """One row a prompt, with the columns that `reward` reads."""
        return Dataset.from_dict(
            {"prompt": self.prompts, "number": list(range(len(self.prompts))), "flat": self.flat}
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


def make_workload(
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    *,
    prompts: int,
    group_size: int,
    prompt_tokens: tuple[int, int],
    mean_completion: float,
    max_completion: int,
    seed: int,
) -> Workload:
    """kind "fixed": prompts as long as the middle of prompt_tokens, completions of max_completion tokens.

    kind "realistic": prompt lengths spread evenly over prompt_tokens (low, high); completion lengths log-normal,
    cut off at max_completion, with the given mean.
    Raises ValueError for another kind or a mean that the maximum does not allow.
    """
    if kind not in ("fixed", "realistic"):
        raise ValueError(f"kind={kind!r} is not known; use 'fixed' or 'realistic'")
    draw = random.Random(seed)
    low, high = prompt_tokens
    rows = prompts * group_size
    if kind == "fixed":
        prompt_lengths, lengths = [(low + high) // 2] * prompts, [max_completion] * rows
    else:
        prompt_lengths = [round(low + (i + 0.5) / prompts * (high - low)) for i in range(prompts)]
        draw.shuffle(prompt_lengths)
        lengths = completion_lengths(rows, mean_completion, max_completion, seed)
    words = plain_words(tokenizer, draw)
    texts, ids = zip(*(exact_prompt(tokenizer, n, words, draw) for n in prompt_lengths), strict=True)
    eos = tokenizer.eos_token_id
    completions = [
        [draw.choice(words)[0] for _ in range(n if n == max_completion else n - 1)]
        + ([] if n == max_completion else [eos])
        for n in lengths
    ]
    flat_groups = set(draw.sample(range(prompts), max(1, round(FLAT_SHARE * prompts))))
    return Workload(
        prompts=list(texts),
        prompt_ids=list(ids),
        completion_ids=completions,
        flat=[i in flat_groups for i in range(prompts)],
        group_size=group_size,
        max_completion=max_completion,
        eos=eos,
        seed=seed,
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
    raise ValueError(f"tokenizer: only {len(found)} of {count} plain words found; give another tokenizer")


def exact_prompt(
    tokenizer: PreTrainedTokenizerBase, tokens: int, words: list[tuple[int, str]], draw: random.Random
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
    raise ValueError(f"tokens={tokens}: no prompt of that length found; the last had {len(ids)} tokens")


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of made-up words w2, w3, ...: token counts are right and nothing has to be downloaded.

    >>> word_tokenizer(10)("w3 w7").input_ids
    [3, 7]
    """
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
