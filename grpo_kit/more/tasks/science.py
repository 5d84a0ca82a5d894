"""science: questions of chemistry and biology with answers of several words, rewarded by overlap with references.

The data (data/science.json) are the kit's own wording and under its licence, Apache-2.0; each row's `source`
names a place to check its fact. 124 rows; a third, fixed by the question's hash, is held out.
Training cannot teach the facts of held-out rows. It can teach the form: a short phrase instead of a sentence,
which raises the overlap where the model knew the fact before.

Mean reward, format included, of answers that need no knowledge, on the 37 held-out rows, for each kind of overlap:

| answer                                                                                | right | ROUGE-L | BLEU  |
|---------------------------------------------------------------------------------------|-------|---------|-------|
| always 'the volume of a gas to its amount', the nearest to all                        | 0.0 % | 0.387   | 0.294 |
| always 'an atom of the same element with a different number of neutrons', the longest | 0.0 % | 0.367   | 0.279 |
| the question's words                                                                  | 0.0 % | 0.340   | 0.284 |
| always 'a bilayer of phospholipids with proteins'                                     | 0.0 % | 0.331   | 0.282 |

Base rate: SmolLM2-135M-Instruct, 24 held-out prompts x 8 samples at temperature 1 (`python -m benchmarks.base_rates
--prompts 24`, CPU, seed 0, 2026-11-21): right 0.5 % [0.0, 1.6], mean reward 0.26 [0.21, 0.31], well-formed 54 %,
rewards differ in 96 % of the groups.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from grpo_kit._support.argument_checks import check_choice
from grpo_kit.more.tasks.bleu_rouge import Bleu, Rouge
from grpo_kit.rewards import SoftFormat
from grpo_kit.rewards.form import words
from grpo_kit.tasks.task import Strategy, Task, most_frequent_answer, with_answer_tag

_FILE = Path(__file__).parent / "data" / "science.json"
_EXAMPLE = ("What is a solvent?", "<answer>a substance that dissolves a solute</answer>")
_SMALL = frozenset(
    "a an the is are was were be it its they their of in to by with on for that which called".split()
)


def science(
    *,
    overlap: Literal["rougeL", "bleu"] = "rougeL",
    prefill: str | None = None,
    answer_tag: str = "answer",
) -> Task:
    """Rows "What is osmosis?" -> "the diffusion of water across a semipermeable membrane".

    overlap: the reward, Rouge("rougeL") or Bleu(), against the best of the accepted answers (0.75), beside soft
    format (0.25).
    prefill: the assistant's opening words; None: the answer tag. Another where a chat template does not let it through.
    answer_tag: name of the tag around answers, such as a plainer one that audit_tags suggests.
    Row columns: question, answer (the first accepted one), answers (all of them), subject ("chemistry", "biology"),
    source.
    is_correct: `same_words` as one of the accepted answers. Both overlaps, which lose a little for a plural or an extra
    article, thus have the same accuracy beside them. The accuracy is strict: it rejects a right answer in other
    words, which gets credit from overlap. Overlap in turn can miss the one word that makes an answer wrong: "an ion
    with a negative charge" for "an ion with a positive charge" has a ROUGE-L of 5/6.
    Strategies: the most frequent, the longest and the most overlapping train answer, the question's own words.
    Raises ValueError for another overlap.

    >>> science().train[0]["question"]
    'What is a Brønsted acid?'
    """
    check_choice("overlap", overlap, ("rougeL", "bleu"))
    if overlap == "rougeL":
        reward = Rouge("rougeL", column="answers")
    else:
        reward = Bleu(column="answers")
    rows = [{"answer": row["answers"][0], **row} for row in load_rows()]
    train = [row for row in rows if not _is_held_out(row["question"])]
    task = Task(
        name="science",
        train=train,
        held_out=[row for row in rows if _is_held_out(row["question"])],
        rewards=[reward, SoftFormat(think=None)],
        reward_weights=[0.75, 0.25],
        is_correct=lambda text, row: any(same_words(text, answer) for answer in row["answers"]),
        strategies=_strategies(train),
        system="Answer in <answer> tags, in a few words.",
        prefill="<answer>" if prefill is None else prefill,
        examples=(_EXAMPLE,),
        max_completion_tokens=32,
    )
    return with_answer_tag(task, answer_tag)


def load_rows() -> list[dict]:
    """The shipped questions: question, answers (accepted ones), subject, source.

    >>> sorted(load_rows()[0])
    ['answers', 'question', 'source', 'subject']
    """
    return json.loads(_FILE.read_text(encoding="utf-8"))["rows"]


def same_words(text: str, answer: str) -> bool:
    """Whether the words and their order are the same, ignoring case, punctuation, plural s and small words (a, of, is).

    "not", "or" and "and" are not ignored, since they change the answer.

    >>> [same_words(text, "the loss of electrons") for text in ("Loss of an electron.", "no loss of electrons")]
    [True, False]
    """
    return bool(_core(answer)) and _core(text) == _core(answer)


def _core(text: str) -> list[str]:
    core = []
    for word in words(text):
        if word in _SMALL:
            continue
        if len(word) > 3 and word[-1] == "s" and word[-2] not in "suiy":
            word = word[:-1]  # a plural
        core.append(word)
    return core


def _is_held_out(question: str) -> bool:
    """The question alone decides, so that new rows move no other row between train and held-out."""
    return zlib.crc32(question.encode()) % 3 == 0


def _strategies(train: Sequence[dict]) -> dict[str, Strategy]:
    answers = [row["answer"] for row in train]
    golds = [row["answers"] for row in train]
    rouge = Rouge("rougeL", column="answers", tag=None)
    overlaps = {text: sum(rouge([text] * len(golds), answers=golds)) for text in answers}
    nearest = max(answers, key=lambda text: overlaps[text])
    longest = max(answers, key=len)
    return {
        **most_frequent_answer(train),
        f"always {longest!r}, the longest": lambda row: longest,
        f"always {nearest!r}, the nearest to all": lambda row: nearest,
        "the question's words": lambda row: row["question"].rstrip("?"),
    }
