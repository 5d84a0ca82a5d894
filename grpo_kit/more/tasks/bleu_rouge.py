"""Overlap with a reference text, for answers of several words: BLEU by sacrebleu, and ROUGE."""

from __future__ import annotations

import functools
import importlib.util
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from grpo_kit._support.argument_checks import check_choice, is_whole
from grpo_kit.rewards.answers import AnswerReward
from grpo_kit.rewards.cheat_cases import Case, answer_cases
from grpo_kit.rewards.form import ngrams, words

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

# times the longest reference; the overlap of a longer answer is about 1/50 at most
_TOO_LONG = 50
_KEYWORDS = (
    "water oxygen hydrogen carbon nitrogen sodium chloride acid base salt ion electron proton atom molecule cell "
    "nucleus protein enzyme membrane energy light heat gas liquid solid plant animal reaction equilibrium"
)

# Short vowels of Arabic and Hebrew, and Arabic's stretched line, which most texts leave out (as pyarabic strips them).
_POINTS = re.compile(
    "[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0640\u064b-\u0652\u0670\u06d6-\u06dc\u06df-\u06e8]"
)
_UNSEEN = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
# Other scripts' marks as their ASCII kin, which sacrebleu's tokenizers split off.
_MARKS = {
    ".": "。।॥۔။។።",
    ",": "、،၊፣",
    ";": "؛፤",
    "?": "؟፧",
    '"': "“”„‟«»「」『』",
    "'": "‘’‚‛",
}
_PLAIN = {ord(mark): plain for plain, marks in _MARKS.items() for mark in marks}


class _OverlapReward(AnswerReward):
    """Overlap of the answer with the gold column's reference, or with the best of several references."""

    takes_whole = True
    soft = True  # other wording earns less and may be as good: no completion is right or wrong

    def cheats(self, honest: Case) -> list[Case]:
        """Wrong answers made of the gold's words; no cases if there is no answer to replace."""
        golds = references(honest.columns.get(self.column))
        if not golds:
            return []
        pieces = golds[0].split()
        answers = {
            "gold five times": " ".join(golds[:1] * 5),
            "gold among keywords": f"{_KEYWORDS} {golds[0]}",
            "gold in a long text": f"It could be many things, and one of those that come to mind first is {golds[0]}, "
            "but there are others, and more would have to be known about it to say which one it is",
            "keywords": _KEYWORDS,
        }
        if pieces[::-1] != pieces:
            answers["gold backwards"] = " ".join(reversed(pieces))
            answers["one word of the gold"] = max(pieces, key=len)
        if len(golds) > 1:
            answers["all references"] = " ".join(golds)
        gold_words = [words(gold) for gold in golds]
        wrong = {name: text for name, text in answers.items() if words(text) not in gold_words}
        return answer_cases(honest, wrong, tag=self.tag)

    def score(self, answer: str | None, gold: Any) -> float | None:
        """The overlap in [0, 1], None if the gold has no words."""
        return self._overlap(answer or "", references(gold))


class Bleu(_OverlapReward):
    """BLEU of the answer against the gold, in [0, 1]: sacrebleu's sentence BLEU / 100.

    column: data set column of the gold, a text or a list of references (clipped counts over all of them, length
    of the closest). tag: name of the answer tag; None judges the whole completion, without the prefill.
    N-grams up to max_order words, no more than the answer has (effective order); orders without a match are
    smoothed exponentially (sacrebleu's "exp"). Without a common word the score is 0. Short answers pay the brevity
    penalty, long and repeating ones lose precision. tokenize: sacrebleu's "13a" (punctuation marks are words),
    "intl", "zh" or "char". Case is ignored unless lowercase=False. Unicode is normalised (CO₂ = CO2, NFKC), also
    other scripts' punctuation and, where one side leaves them out, the short vowels of Arabic and Hebrew; white
    space and full stops at the ends do not count. None if the gold is empty. No answer, two answers, or an answer
    over 50 times as long as the gold give 0.0.
    Raises ImportError where sacrebleu is not installed; it comes with the extra `rewards`.
    Source: Papineni et al. 2002; Post 2018, arXiv:1804.08771; smoothing: Chen and Cherry 2014, method 3.

    >>> answers = ["<answer>Sodium chloride.</answer>", "<answer>sodium</answer>"]
    >>> [round(score, 4) for score in Bleu()(answers, answer=["sodium chloride"] * 2)]
    [1.0, 0.3679]
    """

    def __init__(
        self,
        *,
        column: str = "answer",
        tag: str | None = "answer",
        lowercase: bool = True,
        max_order: int = 4,
        tokenize: Literal["13a", "intl", "zh", "char"] = "13a",
    ) -> None:
        super().__init__("bleu", column, tag=tag)
        if not is_whole(max_order, 1) or max_order > 9:
            raise ValueError(
                f"max_order={max_order!r} must be from 1 to 9; 4 is usual, 2 for answers of few words"
            )
        check_choice("tokenize", tokenize, ("13a", "intl", "zh", "char"))
        if importlib.util.find_spec("sacrebleu") is None:
            raise ImportError(
                'Bleu needs the package sacrebleu: run `pip install "grpo-kit[rewards]"`'
            )
        self.lowercase, self.max_order, self.tokenize = (
            bool(lowercase),
            int(max_order),
            tokenize,
        )

    def _overlap(self, answer: str, golds: list[str]) -> float | None:
        if not golds:
            return None
        if _too_long(answer, golds) or not normalize(answer):
            return 0.0
        answer, *golds = unpointed([normalize(answer), *golds])
        metric = _sacrebleu(self.lowercase, self.max_order, self.tokenize)
        score = metric.sentence_score(answer, golds).score / 100
        _forget(metric)
        # rounding may leave a full score above or below 1
        return 1.0 if score > 1 - 1e-9 else score


class Rouge(_OverlapReward):
    """ROUGE of the answer against the gold, in [0, 1]: the F-measure, of the best reference if there are several.

    variant: "rougeL" (longest common subsequence of words), "rouge2" (pairs of adjacent words), "rouge1" (words in
    any order: token F1, as SQuAD counts it but for articles, which that drops). column, tag: as for Bleu. Case and
    punctuation do not count. Words are runs of letters, digits and their signs of any script; each character of
    Chinese, Japanese, Thai, Lao, Burmese and Khmer is a word; no stemming. Repeated and listed words cost precision,
    missing words cost recall. None if the gold has no word (rouge2: no pair). No answer, two answers, or an answer over
    50 times as long as the gold give 0.0.
    On ASCII text this is the F-measure of rouge-score 0.1.2. The kit does not use that package: its last release was in
    2022, it drops every letter but a to z, and its stemmer needs nltk.
    Source: Lin 2004, aclanthology.org/W04-1013.

    >>> Rouge()(["<answer>the cell wall</answer>"], answer=["cell membrane"])
    [0.4]
    """

    def __init__(
        self,
        variant: Literal["rouge1", "rouge2", "rougeL"] = "rougeL",
        *,
        column: str = "answer",
        tag: str | None = "answer",
    ) -> None:
        check_choice("variant", variant, ("rouge1", "rouge2", "rougeL"))
        super().__init__("rouge_l" if variant == "rougeL" else variant, column, tag=tag)
        self.variant = variant

    def cheats(self, honest: Case) -> list[Case]:
        """The cheats of Bleu. "rouge1" leaves out the gold's words backwards, which it cannot tell from the gold."""
        cases = super().cheats(honest)
        if self.variant == "rouge1":
            return [case for case in cases if case.name != "gold backwards"]
        return cases

    def _overlap(self, answer: str, golds: list[str]) -> float | None:
        answer, *golds = unpointed([normalize(answer), *golds])
        answer_words = [] if _too_long(answer, golds) else words(answer)
        scores, order = [], 1
        if self.variant == "rouge2":
            order = 2
        for gold_words in map(words, golds):
            if len(gold_words) >= order:
                scores.append(self._f_measure(answer_words, gold_words, order))
        return max(scores, default=None)

    def _f_measure(self, answer: list[str], gold: list[str], order: int) -> float:
        if self.variant == "rougeL":
            return 2 * common_subsequence(answer, gold) / (len(answer) + len(gold))
        a, b = ngrams(answer, order), ngrams(gold, order)
        return 2 * (Counter(a) & Counter(b)).total() / (len(a) + len(b))


def references(gold: Any) -> list[str]:
    """The gold as a list of normalized references, without empty ones."""
    if isinstance(gold, str | bytes) or not isinstance(gold, Iterable):
        gold = [gold]
    texts = [normalize(str(text)) for text in gold if text is not None]
    return [text for text in texts if text]


def _too_long(answer: str, golds: list[str]) -> bool:
    return len(answer) > _TOO_LONG * max(map(len, golds), default=0)


@functools.cache
def _sacrebleu(lowercase: bool, max_order: int, tokenize: str) -> BLEU:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(
        lowercase=lowercase, max_ngram_order=max_order, tokenize=tokenize, effective_order=True
    )


def _forget(metric: BLEU) -> None:
    """Clear sacrebleu's caches: each tokenizer keeps its last 65,536 texts, which would fill memory in training."""
    inner = getattr(metric.tokenizer, "_post_tokenizer", metric.tokenizer)
    for tokenizer in (metric.tokenizer, inner):
        cached = type(tokenizer).__call__
        if hasattr(cached, "cache_info") and cached.cache_info().currsize > 2048:
            cached.cache_clear()


def normalize(text: str) -> str:
    """NFKC, other scripts' punctuation as ASCII's, single spaces, no white space or full stop at the ends.

    >>> normalize(" carbon  dioxide (CO₂)."), normalize("“你好。”")
    ('carbon dioxide (CO2)', '"你好."')
    """
    text = unicodedata.normalize("NFKC", _UNSEEN.sub("", text)).translate(_PLAIN)
    return " ".join(text.split()).strip(" .")


def unpointed(texts: Sequence[str]) -> list[str]:
    """The texts without the short vowels of Arabic and Hebrew, unless each of them is written with some.

    >>> unpointed(["كَتَبَ", "كتب"]) == ["كتب", "كتب"]
    True
    """
    if all(map(_POINTS.search, texts)):
        return list(texts)
    return [_POINTS.sub("", text) for text in texts]


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, one bit per element (Hyyrö 2004).

    >>> common_subsequence("the cat sat".split(), "the dog sat down".split())
    2
    """
    a, b = sorted((a, b), key=len)
    places = {}
    for place, piece in enumerate(a):
        places[piece] = places.get(piece, 0) | 1 << place
    full = (1 << len(a)) - 1
    row = full  # a zero bit: the subsequence grows here
    for piece in b:
        matches = row & places.get(piece, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(a) - row.bit_count()
