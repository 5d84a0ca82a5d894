"""Completions as a page to read: the question once a group, every score, the whole text one click away."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import pandas as pd

from grpo_kit._support.display import COLOURS, colours_of, escape
from grpo_kit._support.kernel import visible

# A column that only other rows than completions have: the module whose pages_of shows them, loaded where it is there.
_OTHERS = {"turn": "grpo_kit.more.episodes._conversations"}
_VISIBLE, _LINES = 300, 3  # characters and lines of a text before the click
# Counters a notebook's own styles: widgets have lines of 28 px, and break words anywhere; outputs align tables right.
_PAGE = (
    "line-height:1.4;font-size:13px;overflow-wrap:break-word;text-align:left;max-width:100%;overflow-x:auto;"
)
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;"
PALE = "opacity:.65;"
_EMPTY = f'<span style="{PALE}">(nothing)</span>'
# The second: JupyterLab breaks what is printed in the middle of words, "rig|ht"; in this page now between them.
_STYLE = (
    "<style>details.kit-text[open]>summary>.kit-more{display:none}"
    ".jp-OutputArea-output pre{word-break:normal;overflow-wrap:anywhere}</style>"
)
# A rendered chat's last user message: ChatML (Qwen, SmolLM2) and Llama 3.
_SAID = re.compile(
    r"<\|(?:im_start\|>|start_header_id\|>)user(?:<\|end_header_id\|>)?\s*(.*?)<\|(?:im_end|eot_id)\|>", re.S
)


def reward_columns(table: pd.DataFrame) -> list[str]:
    """The total reward first, then its parts."""
    return [n for n in table if n == "reward"] + [n for n in table if str(n).startswith("reward/")]


def pick_three(table: pd.DataFrame) -> pd.DataFrame:
    """Best, median and worst reward of the last step in `table`; among equals the one written first.

    Completions without a reward are left out if there are three others. Adds a column `pick`.
    """
    last = table[table["step"] == table["step"].max()]
    judged = last[last["reward"].notna()]
    order = (judged if len(judged) >= 3 else last).sort_values("reward", ascending=False, kind="stable")
    places = {len(order) // 2: "median", len(order) - 1: "worst", 0: "best"} if len(order) else {}
    rows = order.iloc[sorted(places)]
    return rows.assign(pick=[places[place] for place in sorted(places)])


def completions_html(table: pd.DataFrame) -> str:
    """The completions of a table from read_completions, in its order, groups together; everything escaped.

    Each group is headed by its question and, if the rows have `answer`, the reference answer. A card has a completion's
    number, its scores and the response: the first lines, and the rest at a click.
    """
    scores = [*reward_columns(table), *(["advantage"] * ("advantage" in table))]

    def card(row: dict) -> str:
        label = row.get("pick", row.get("number", ""))
        words = " ".join(score_html(n.removeprefix("reward/"), score_text(row[n], n)) for n in scores)
        return card_html(f'<span style="{PALE}">{escape(label)}</span> {words}', response_html(row))

    return groups_html(table, lambda rows: map(card, rows))


def groups_html(table: pd.DataFrame, cards_of: Callable[[list[dict]], Iterable[str]]) -> str:
    """A page: each group's question, the whole prompt a click away, over its cards, as many side by side as fit."""
    parts = [
        _question_html(min(rows, key=lambda row: row.get("turn", 0))) + _cards_html(cards_of(rows))
        for rows in _groups_of(table)
    ]
    return _in_page("".join(parts))


def score_html(name: str, value: str, look: str = "white-space:nowrap") -> str:
    """A score's name and value."""
    return f'<span style="{look}">{escape(name)} <b>{value}</b></span>'


class Pages:
    """How the rows of completions.jsonl are counted, searched and shown: here each is a completion. See pages_of."""

    what = "completion"
    scores = staticmethod(reward_columns)  # of a table, to sort by
    html = staticmethod(completions_html)  # a page of a table, in its order

    def numbered(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table with a column `number`: the place of a completion in its group, from 0, in the order written."""
        keys = [name for name in ("step", "group") if name in table]
        return table.assign(
            number=table.groupby(keys, dropna=False).cumcount() if keys else range(len(table))
        )

    def texts(self, table: pd.DataFrame) -> pd.Series:
        """Each row's text, for searching."""
        return table["prompt"].fillna("") + table["completion"].fillna("")  # the prompt ends in the prefill

    def whole(self, table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows, in their order, and what of the table belongs to them."""
        return rows

    def first(self, table: pd.DataFrame, most: int) -> tuple[pd.DataFrame, int]:
        """The first `most`, and how many there are."""
        return table.head(most), len(table)

    def picks(self, table: pd.DataFrame) -> tuple[str, str]:
        """The best, the median and the worst of the last step, as text and as HTML."""
        three = pick_three(table)
        plain = three[["pick", "reward", "completion"]].to_string(index=False)
        return visible(plain), self.html(three)

    def told(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table with what a reader without widgets needs besides."""
        return table


def pages_of(table: pd.DataFrame) -> Pages:
    """The pages of a table from read_completions, by the columns that it has."""
    for column, module in _OTHERS.items():
        if column in table and (pages := import_module(module).pages_of(table)):
            return pages
    return Pages()


def completions_page(table: pd.DataFrame | None, *, scrolls: bool) -> tuple[str, str]:
    """Best, median and worst of the last step, as text and as HTML.

    scrolls: in a box of fifteen lines, so that the page does not move; else as many lines as needed.
    """
    if table is None or not len(table):
        plain = page = "The best, the median and the worst completion of the last step come here."
    else:
        plain, page = pages_of(table).picks(table)
    room = "overflow:auto;height" if scrolls else "min-height"
    return plain, f'<div style="{room}:15em">{page}</div>'


def side_by_side(name: str, question: str, answer: str, texts: Mapping[str, str]) -> str:
    """One question with its answer, and several responses to it side by side, each under its author's name."""
    row = {"prompt": question, "answer": answer}
    cards = [
        card_html(f"<b>{escape(who)}</b>", folded(text) if text else _EMPTY, colour=colour)
        for (who, text), colour in zip(texts.items(), colours_of(list(texts)).values(), strict=True)
    ]
    return _in_page(_question_html(row, name) + _cards_html(cards))


def text_of(row: Mapping[str, Any], name: str) -> str:
    """The text of a row's column; empty if there is none."""
    return str(row[name]) if there(row.get(name)) else ""


def _in_page(inside: str) -> str:
    """The frame of every page."""
    return f'<div style="{_PAGE}">{_STYLE}{inside}</div>'


def _groups_of(table: pd.DataFrame) -> Iterator[list[dict]]:
    """The rows of each group together, groups in the order of their first row."""
    found: dict[Any, list[dict]] = {}
    for row in table.to_dict("records"):
        key = (row.get("step"), row.get("group"), None if "group" in row else row.get("prompt"))
        found.setdefault(key, []).append(row)
    yield from found.values()


def card_html(head: str, body: str, *, colour: str = COLOURS[0]) -> str:
    """One of several texts that stand side by side, under its scores; colour: of the line above."""
    look = f"flex:1 1 240px;max-width:560px;border-top:3px solid {colour};padding:4px 0 4px 18px"
    return f'<div style="{look}"><div style="font-size:12px">{head}</div>{body}</div>'


def _cards_html(cards: Iterable[str]) -> str:
    """As many side by side as fit."""
    return f'<div style="display:flex;flex-wrap:wrap;gap:14px;margin:8px 0">{"".join(cards)}</div>'


def question_of(row: Mapping[str, Any]) -> str:
    """The last user message in the row's prompt; the prompt's end if it is no chat."""
    prompt = text_of(row, "prompt").removesuffix(text_of(row, "prefill"))
    said = _SAID.findall(prompt)
    return (said[-1] if said else prompt[-600:]).strip()


def _question_html(row: dict, name: str = "") -> str:
    """The user's question, the whole prompt behind a click; then the reference answer."""
    prompt, question = text_of(row, "prompt").removesuffix(text_of(row, "prefill")), question_of(row)
    name = name or (f"group {int(row['group'])}" if there(row.get("group")) else "question")
    name = f'<span style="{PALE}font-weight:400">{escape(name)}</span> '
    html = folded(question, before=name, look="font-weight:600;")
    if len(prompt.strip()) > len(question):
        long = html.startswith("<details")  # a long question: the prompt has a line of its own
        line = f'<span style="{PALE}">the whole prompt</span>' if long else html
        whole = f'<div style="{_TEXT}{PALE}">{escape(prompt, len(prompt))}</div>'
        html = html * long + f'<details><summary style="cursor:pointer">{line}</summary>{whole}</details>'
    if answer := text_of(row, "answer"):  # episodes have none
        html += f'<div><span style="{PALE}">answer</span> <span style="{_TEXT}">{folded(answer)}</span></div>'
    return html


def response_html(row: dict) -> str:
    """The model's text, behind the prefill."""
    prefill = f'<span style="{PALE}">{escape(row.get("prefill"), 10_000)}</span>'
    completion = text_of(row, "completion")
    return folded(completion, before=prefill) if completion else f"{prefill}{_EMPTY}"


def folded(text: str, *, before: str = "", look: str = "") -> str:
    """A text: its first lines, the rest behind a click. before: HTML in front of it."""
    lines = [place for place, letter in enumerate(text) if letter == "\n"]
    end = min(_VISIBLE, lines[_LINES - 1] if len(lines) >= _LINES else _VISIBLE)
    end = max(text.rfind(" ", end // 2, end + 1), text.rfind("\n", end // 2, end + 1), 0) or end
    if len(text) <= end + 60 and len(lines) <= _LINES + 1:  # a click for a word gains nothing
        end = len(text)
    first = f'<span style="{_TEXT}{look}">{before}{escape(text[:end], end)}</span>'
    rest = text[end:].removeprefix("\n")  # which begins a line of its own anyway
    if not rest:
        return first
    words = f"… {len(text) - end:,} characters more"
    more = f' <span class="kit-more" style="{PALE}text-decoration:underline">{words}</span>'
    return (
        f'<details class="kit-text"><summary style="cursor:pointer;list-style-position:outside">{first}{more}</summary>'
        f'<span style="{_TEXT}{look}">{escape(rest, len(rest))}</span></details>'
    )


def score_text(value: object, name: str = "") -> str:
    """A score as a page shows it; an advantage with its sign."""
    if not isinstance(value, (int, float)) or value != value:
        return "none"
    return f"{value:+.2f}" if name == "advantage" else f"{value:.2f}"


def there(value: object) -> bool:
    """Is it neither None nor NaN? True for a list, as in files."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))
