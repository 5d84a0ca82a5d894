"""How long must a completion be? Samples with a generous maximum, the share each maximum cuts off, and its cost."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from grpo_kit._support.argument_checks import check_job, check_temperature, check_whole
from grpo_kit.engine.complete import Completion
from grpo_kit.engine.memory._free import card_itemsize, decode_bytes
from grpo_kit.evaluation._as_trained import say_difference
from grpo_kit.evaluation.generate_and_score import Decoding, answer
from grpo_kit.evaluation.intervals import Estimate, share
from grpo_kit.models._model_facts import config_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from grpo_kit.loop.config import Config
    from grpo_kit.tasks import Task

QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Lengths:
    """Tokens until the end, for n completions with the maximum `limit`.

    ended: {tokens, the end included: how many completions ended with that length}. cut_off: how many had not ended.
    """

    ended: dict[int, int]
    cut_off: int
    limit: int

    @classmethod
    def of(cls, completions: Sequence[Completion], limit: int) -> Lengths:
        """Lengths of completions made with max_completion_tokens=limit."""
        counts = Counter(c.tokens for c in completions if not c.cut_off)
        return cls(dict(sorted(counts.items())), sum(c.cut_off for c in completions), limit)

    @property
    def n(self) -> int:
        """Number of completions."""
        return sum(self.ended.values()) + self.cut_off

    def within(self, tokens: int) -> float:
        """Share that ended within so many tokens. Beyond `limit`, which was not observed, no further end is assumed."""
        return sum(count for length, count in self.ended.items() if length <= tokens) / self.n

    def share_cut_off(self, maximum: int) -> Estimate:
        """Share that a maximum would cut off, with Wilson's interval; n counts completions.

        Completions of one prompt are alike, so the interval is too narrow if a prompt was sampled several times.
        Raises ValueError for a maximum above `limit`, which the probe did not observe.
        """
        if not 1 <= maximum <= self.limit:
            raise ValueError(
                f"maximum={maximum!r} must lie in 1..{self.limit}, what the probe allowed"
            )
        longer = self.cut_off + sum(
            count for length, count in self.ended.items() if length > maximum
        )
        return share(longer, self.n)

    def quantile(self, q: float) -> int | None:
        """The fewest tokens within which a share q had ended; None if fewer had ended at the probe's limit.

        >>> Lengths({5: 6, 6: 3}, cut_off=1, limit=64).quantile(0.9)
        6
        """
        if not 0 < q <= 1:
            raise ValueError(f"q={q!r} must lie above 0 and be at most 1")
        return next(
            (length for length in sorted(self.ended) if self.within(length) >= q - 1e-12), None
        )

    def table(self) -> pd.DataFrame:
        """Tokens by quantile, as text if the probe's limit hides them, and the share that had not ended."""
        rows = {}
        for q in QUANTILES:
            rows[f"{q:.0%} end within"] = str(self.quantile(q) or f"more than {self.limit}")
        rows[f"not ended at {self.limit}"] = f"{self.cut_off / self.n:.1%}"
        return pd.DataFrame({"tokens": rows}).rename_axis(f"{self.n} completions")


def length_probe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    max_completion_tokens: int | None = None,
    rows: Sequence[dict] | None = None,
    samples: int = 4,
    temperature: float = 1.0,
    batch_size: int | None = None,
    seed: int = 0,
) -> Lengths:
    """Sample with a generous maximum and record where completions end. rows: default, the task's held-out rows.

    max_completion_tokens: None means the task's, which shows how many it cuts off; several times as many show how long
    completions would be. batch_size: sequences at once; None: by free memory.

    >>> length_probe(model, tokenizer, task, max_completion_tokens=128).quantile(0.99)  # doctest: +SKIP
    """
    check_job(model, tokenizer, task)
    check_temperature(temperature, greedy=True)
    say_difference(model, task, caller="length_probe", temperature=temperature, tokens=None)
    decoding = Decoding(samples, temperature, max_completion_tokens, batch_size, seed)
    answers = answer(model, tokenizer, task, rows, decoding)
    return Lengths.of(answers.completions, answers.settings["max_completion_tokens"])


def decode_steps(lengths: Lengths, maximum: int, rows: int) -> float:
    """Expected decoding steps for a batch of `rows` independent completions, which runs until the last one ends.

    E[longest] = sum over t = 1..maximum of 1 - P(one ends before t) ** rows. A completion not ended at the probe's end
    is assumed never to end: a runaway row.

    >>> decode_steps(Lengths({1: 1, 3: 1}, 0, 8), maximum=8, rows=2)
    2.5
    """
    check_whole("maximum", maximum)
    check_whole("rows", rows)
    return math.fsum(1 - lengths.within(t - 1) ** rows for t in range(1, maximum + 1))


def cost_of_maximum(
    lengths: Lengths,
    maxima: Sequence[int],
    cfg: Config,
    *,
    config: PretrainedConfig | None = None,
    prompt_tokens: int = 256,
    seconds_a_step: float | None = None,
) -> pd.DataFrame:
    """The cost of a rollout of the config's batch at each maximum; one row a maximum.

    cut off: share of completions (nothing for a maximum beyond the probe). batches with a runaway: chance that at least
    one row of the batch is still writing at the maximum. steps: decode_steps. padded: tokens computed if ended rows
    are not dropped (rows x steps). written: expected tokens that completions contain. keys and values: GiB that the
    rollout reserves on a card, as plan_memory has it. seconds: steps x seconds_a_step, if that is given.
    config: of the model, if its name is none of Qwen2.5's and the hub cannot be asked.
    """
    count = cfg.completions_per_step
    rows = {}
    for maximum in maxima:
        steps = decode_steps(lengths, maximum, count)
        memory = decode_bytes(
            config or config_of(cfg.model),
            card_itemsize(cfg),
            rows=count,
            prompts=cfg.prompts_per_step,
            prompt_tokens=prompt_tokens,
            completion_tokens=maximum,
        )
        rows[maximum] = {
            "cut off": math.nan,
            "batches with a runaway": 1 - lengths.within(maximum) ** count,
            "steps": steps,
            "padded": steps * count,
            "written": decode_steps(lengths, maximum, 1) * count,
            "keys and values": memory["keys and values"] / 2**30,
        }
        if maximum <= lengths.limit:
            rows[maximum]["cut off"] = lengths.share_cut_off(maximum).value
        if seconds_a_step is not None:
            rows[maximum]["seconds"] = steps * seconds_a_step
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("maximum")


_R1_ZERO = "Liu et al., arXiv:2503.20783, their keyword pool"
_PILOT = "Liu et al., There May Not be Aha Moment in R1-Zero-like Training, 2025"
_LASER = "Liu et al., arXiv:2505.15612, their self-reflection keywords"
_R1 = "DeepSeek-R1, arXiv:2501.12948, its aha moment"

# word -> (regular expression of its spellings, source of the count)
WORDS: dict[str, tuple[str, str]] = {
    "aha": ("aha", _R1),
    "wait": ("wait", _R1 + "; " + _LASER),
    "recheck": ("re-?check", _R1_ZERO),
    "rethink": ("re-?think", _R1_ZERO),
    "reassess": ("re-?assess", _R1_ZERO),
    "reevaluate": ("re-?evaluat(?:e|ion)", _R1_ZERO),
    "reexamine": ("re-?examine", _R1_ZERO),
    "reconsider": ("re-?consider", _R1_ZERO),
    "reanalyze": ("re-?analy[sz]e", _R1_ZERO),
    "double-check": ("double[- ]check", _R1_ZERO),
    "check again": ("check again", _R1_ZERO),
    "think again": ("think again", _R1_ZERO),
    "verify again": ("verify again", _R1_ZERO),
    "go over the steps": ("go over the steps", _R1_ZERO),
    "try again": ("try again", _PILOT),
    "retry": ("retry", _LASER),
    "alternatively": ("alternatively", _LASER),
    "however": ("however", _LASER),
}
# Everyday words: weak evidence alone, so the total leaves them out.
COMMON = ("however", "alternatively")
_PATTERNS = {
    word: re.compile(rf"\b(?:{spellings})\b", re.IGNORECASE)
    for word, (spellings, _) in WORDS.items()
}


def count_words(texts: Sequence[str]) -> dict[str, int]:
    """How many texts hold each of WORDS, whole words in any case; "any" counts those that hold one not in COMMON.

    >>> counts = count_words(["Wait, let me re-check.", "He waited. However, 5"])
    >>> {word: n for word, n in counts.items() if n}
    {'wait': 1, 'recheck': 1, 'however': 1, 'any': 1}
    """
    counts = dict.fromkeys([*WORDS, "any"], 0)
    for text in texts:
        words = {word for word, pattern in _PATTERNS.items() if pattern.search(text)}
        if not words <= set(COMMON):
            words.add("any")
        for word in words:
            counts[word] += 1
    return counts


def word_table(counts: Mapping[str, int], n: int) -> pd.DataFrame:
    """Words that occur, most frequent first: samples with the word, per 1000 samples, source; "any" last.

    counts: from count_words over n texts.
    """
    sources = {word: source for word, (_, source) in WORDS.items()}
    sources["any"] = f"any of these but {', '.join(COMMON)}"
    words = [word for word, count in counts.items() if count and word != "any"]
    words = [*sorted(words, key=counts.get, reverse=True), "any"]
    columns = {
        "samples": [counts[word] for word in words],
        "per 1000": [round(1000 * counts[word] / n, 1) for word in words],
        "source": [sources[word] for word in words],
    }
    return pd.DataFrame(columns, index=pd.Index(words, name="word"))
