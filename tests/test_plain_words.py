"""Plain words in notebooks: how many, how many a cell, and no term before the sentence that says what it means."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST, MOST_A_CELL = 1500, 80  # words of prose, code blocks of exercises included
# Read in this order: what one of these defines, in bold, all that come later may use.
FIRST = ("00_start_here", "01_prompts_and_prefill", "05_train_full", "06_train_lora")
TERMS = (
    "advantage", "adapter", "completion", "entropy", "greedy", "group", "KL", "policy", "prefill", "preset", "prompt",
    "response", "reward", "rollout", "signal", "task", "token",
)  # fmt: skip


def _prose(name):
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))[
        "cells"
    ]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]


def words(cells):
    """(words in all, words of the longest cell)."""
    # nobody reads what links lead to
    counts = [len(re.sub(r'<a id="[^"]*"></a>', "", cell).split()) for cell in cells]
    return sum(counts), max(counts)


def _plain(cells):
    """The prose without code, links' addresses, headings and the title, which may name what is to come."""
    text = "\n".join(cells[1:])
    text = re.sub(
        r"```.*?```|`[^`]*`|\]\([^)]*\)|^#[^\n]*$", " ", text, flags=re.DOTALL | re.MULTILINE
    )
    return text


def undefined(cells, known=()):
    """Terms of the prose that stand somewhere before they are in bold, and are not known from before."""
    text, found = _plain(cells), []
    for term in set(TERMS) - set(known):
        used = re.search(rf"\b{term}s?\b", text, re.IGNORECASE * term.islower())
        said = re.search(rf"\*\*{term}s?\*\*", text, re.IGNORECASE)
        if used and not (said and said.start() <= used.start()):
            found.append(term)
    return sorted(found)


def defined(cells):
    """Terms that the prose has in bold."""
    text = _plain(cells)
    return {term for term in TERMS if re.search(rf"\*\*{term}s?\*\*", text, re.IGNORECASE)}


NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def counts(name):
    """Words in all, words of the longest cell, number of terms before their definition."""
    cells = _prose(name)
    before = FIRST[: FIRST.index(name)] if name in FIRST else FIRST
    known = set().union(*(defined(_prose(one)) for one in before))
    return *words(cells), undefined(cells, known)


@pytest.mark.parametrize("name", NAMES)
def test_few_words_and_none_before_it_is_defined(name):
    total, longest, terms = counts(name)
    assert total <= MOST and longest <= MOST_A_CELL and not terms, (total, longest, terms)


def test_a_term_is_defined_before_it_is_used():
    title = "# A policy and its title"
    assert undefined([title, "The policy samples.", "A **policy** is a model."]) == ["policy"]
    assert undefined([title, "The **policy** is a model.", "The policy samples."]) == []
    assert undefined([title, "The policy samples."], known={"policy"}) == []
    assert undefined([title, "`policy` and [a link](policy.md)"]) == []
    assert undefined([title, "KL is small; two prefills"]) == ["KL", "prefill"]
    assert words([title, "one two", '<a id="here"></a><a id="there"></a>\none']) == (9, 6)
