"""Completions as a page to read: the question once a group, every score, the whole text one click away."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import pandas as pd

from grpo_kit._support.display import COLOURS, colours_of, escape
from grpo_kit._support.kernel import visible

_CONVERSATIONS = (
    # pages of rows that are turns; loaded where they are read
    "grpo_kit.more.episodes._conversations"
)
Row = Mapping[str, Any]  # a completion's
_VISIBLE, _LINES = 300, 3  # characters and lines of a text before the click
# Counters a notebook's own styles: widgets have lines of 28 px, and break words anywhere; outputs align tables right.
_PAGE = "line-height:1.4;font-size:13px;overflow-wrap:break-word;text-align:left;max-width:100%;overflow-x:auto;"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;"
PALE = "opacity:.65;"
_EMPTY = f'<span style="{PALE}">(nothing)</span>'
# The second: JupyterLab breaks what is printed in the middle of words, "rig|ht"; in this page now between them.
_STYLE = (
    "<style>details.kit-text[open]>summary>.kit-more{display:none}"
    ".jp-OutputArea-output pre{word-break:normal;overflow-wrap:anywhere}</style>"
)
# A rendered chat's last user message: ChatML (Qwen, SmolLM2) and Llama 3.
_USER_MESSAGE = re.compile(
    r"<\|(?:im_start\|>|start_header_id\|>)user(?:<\|end_header_id\|>)?\s*(.*?)<\|(?:im_end|eot_id)\|>",
    re.S,
)


def reward_columns(table: pd.DataFrame) -> list[str]:
    """The total reward first, then its parts."""
    names = [name for name in table if name == "reward" or str(name).startswith("reward/")]
    return sorted(names, key=lambda name: name != "reward")


def pick_three(table: pd.DataFrame) -> pd.DataFrame:
    """Best, median and worst reward of the last step in `table`; among equals the one written first.

    Completions without a reward are left out if there are three others. Adds a column `pick`.
    """
    last = last_step_of(table)
    with_reward = last.dropna(subset="reward")
    if len(with_reward) >= 3:
        last = with_reward
    ranked = last.sort_values("reward", ascending=False, kind="stable")
    if ranked.empty:
        return ranked.assign(pick=[])
    picks = {len(ranked) // 2: "median", len(ranked) - 1: "worst", 0: "best"}
    places = sorted(picks)
    return ranked.iloc[places].assign(pick=[picks[place] for place in places])


def last_step_of(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last step."""
    return table[table["step"] == table["step"].max()]


def completions_html(table: pd.DataFrame) -> str:
    """The completions of a table from read_completions, in its order, groups together; everything escaped.

    Each group is headed by its question and, if the rows have `answer`, the reference answer. A card has a completion's
    number, its scores and the response: the first lines, and the rest at a click.
    """
    scores = reward_columns(table)
    if "advantage" in table:
        scores.append("advantage")

    def card(row: Row) -> str:
        words = [pale(row.get("pick", row.get("number", "")))]
        words += [
            score_html(name.removeprefix("reward/"), score_text(row[name], name))
            for name in scores
        ]
        return card_html(" ".join(words), response_html(row))

    return groups_html(table, lambda rows: map(card, rows))


def groups_html(table: pd.DataFrame, cards_of: Callable[[list[dict]], Iterable[str]]) -> str:
    """A page: each group's question, the whole prompt a click away, over its cards, as many side by side as fit."""
    parts = []
    for rows in _groups_of(table):
        first = min(rows, key=lambda row: row.get("turn", 0))
        parts += [_question_html(first), _cards_html(cards_of(rows))]
    return _in_page("".join(parts))


def score_html(name: str, value: str, look: str = "white-space:nowrap") -> str:
    """A score's name and value."""
    return f'<span style="{look}">{escape(name)} <b>{value}</b></span>'


class Pages:
    """How the rows of completions.jsonl are counted, searched and shown: here each is a completion. See pages_of."""

    row_name = "completion"
    scores = staticmethod(reward_columns)  # of a table, to sort by
    html = staticmethod(completions_html)  # a page of a table, in its order

    def numbered(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table with a column `number`: the place of a completion in its group, from 0, in the order written."""
        keys = [name for name in ("step", "group") if name in table]
        if not keys:
            return table.assign(number=range(len(table)))
        return table.assign(number=table.groupby(keys, dropna=False).cumcount())

    def texts(self, table: pd.DataFrame) -> pd.Series:
        """Each row's text, for searching."""
        # The prompt ends in the prefill, the completion continues it.
        return table["prompt"].fillna("") + table["completion"].fillna("")

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

    def readable(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table with what a reader without widgets needs besides."""
        return table


def pages_of(table: pd.DataFrame) -> Pages:
    """The pages of a table from read_completions, by the columns that it has."""
    if "turn" in table and (pages := import_module(_CONVERSATIONS).pages_of(table)):
        return pages
    return Pages()


def completions_page(table: pd.DataFrame | None, *, scrolls: bool) -> tuple[str, str]:
    """Best, median and worst of the last step, as text and as HTML.

    scrolls: in a box of fifteen lines, so that the page does not move; else as many lines as needed.
    """
    if table is None or not len(table):
        plain = page = (
            "The best, the median and the worst completion of the last step come here."
        )
    else:
        plain, page = pages_of(table).picks(table)
    return plain, box(page, "15em", scrolls=scrolls)


def box(page: str, height: str, *, scrolls: bool, look: str = "") -> str:
    """A page in a box of this height, or, unless it scrolls, of at least this height."""
    room = "overflow:auto;height" if scrolls else "min-height"
    return f'<div style="{look}{room}:{height}">{page}</div>'


def side_by_side(name: str, question: str, answer: str, texts: Mapping[str, str]) -> str:
    """One question with its answer, and several responses to it side by side, each under its author's name."""
    colours = colours_of(list(texts))
    cards = []
    for author, text in texts.items():
        body = folded(text) if text else _EMPTY
        cards.append(card_html(f"<b>{escape(author)}</b>", body, colour=colours[author]))
    head = _question_html({"prompt": question, "answer": answer}, name)
    return _in_page(head + _cards_html(cards))


def text_of(row: Row, name: str) -> str:
    """The text of a row's column; empty if there is none."""
    return str(row[name]) if is_known(row.get(name)) else ""


def pale(text: object) -> str:
    """A text of less weight than its page's."""
    return f'<span style="{PALE}">{escape(text)}</span>'


def _in_page(content: str) -> str:
    """The frame of every page."""
    return f'<div style="{_PAGE}">{_STYLE}{content}</div>'


def _groups_of(table: pd.DataFrame) -> list[list[dict]]:
    """The rows of each group together, groups in the order of their first row."""
    groups: dict[tuple, list[dict]] = {}
    for row in table.to_dict("records"):
        group = row.get("group", row.get("prompt"))
        groups.setdefault((row.get("step"), group), []).append(row)
    return list(groups.values())


def card_html(head: str, body: str, *, colour: str = COLOURS[0]) -> str:
    """One of several texts that stand side by side, under its scores; colour: of the line above."""
    look = (
        f"flex:1 1 240px;max-width:560px;border-top:3px solid {colour};padding:4px 0 4px 18px"
    )
    return f'<div style="{look}"><div style="font-size:12px">{head}</div>{body}</div>'


def _cards_html(cards: Iterable[str]) -> str:
    """As many side by side as fit."""
    return (
        f'<div style="display:flex;flex-wrap:wrap;gap:14px;margin:8px 0">{"".join(cards)}</div>'
    )


def question_of(row: Row) -> str:
    """The last user message in the row's prompt; the prompt's end if it is no chat."""
    prompt = _prompt_of(row)
    return [prompt[-600:], *_USER_MESSAGE.findall(prompt)][-1].strip()


def _prompt_of(row: Row) -> str:
    """The row's prompt without the prefill."""
    return text_of(row, "prompt").removesuffix(text_of(row, "prefill"))


def _question_html(row: Row, name: str = "") -> str:
    """The user's question, the whole prompt behind a click; then the reference answer."""
    if not name:
        name = f"group {int(row['group'])}" if is_known(row.get("group")) else "question"
    before = f'<span style="{PALE}font-weight:400">{escape(name)}</span> '
    prompt = _prompt_of(row)
    question = question_of(row)
    html = folded(question, before=before, look="font-weight:600;")
    if len(prompt.strip()) > len(question):
        text = f'<div style="{_TEXT}{PALE}">{escape(prompt, len(prompt))}</div>'
        if html.startswith("<details"):  # a long question: the prompt has a line of its own
            html += _details(pale("the whole prompt"), text)
        else:
            html = _details(html, text)
    answer = text_of(row, "answer")
    if answer:  # episodes have none
        html += f'<div>{pale("answer")} <span style="{_TEXT}">{folded(answer)}</span></div>'
    return html


def _details(line: str, text: str) -> str:
    """A line that opens to a text."""
    return f'<details><summary style="cursor:pointer">{line}</summary>{text}</details>'


def response_html(row: Row) -> str:
    """The model's text, behind the prefill."""
    prefill = f'<span style="{PALE}">{escape(row.get("prefill"), 10_000)}</span>'
    completion = text_of(row, "completion")
    return folded(completion, before=prefill) if completion else f"{prefill}{_EMPTY}"


def folded(text: str, *, before: str = "", look: str = "") -> str:
    """A text: its first lines, the rest behind a click. before: HTML in front of it."""
    line_ends = [place for place, letter in enumerate(text) if letter == "\n"]
    end = min([_VISIBLE, *line_ends[_LINES - 1 : _LINES]])
    # Where possible it ends between two words.
    word_end = max(text.rfind(space, end // 2, end + 1) for space in (" ", "\n"))
    if word_end > 0:
        end = word_end
    # a click for a word gains nothing
    if len(text) <= end + 60 and len(line_ends) <= _LINES + 1:
        end = len(text)
    first = f'<span style="{_TEXT}{look}">{before}{escape(text[:end], end)}</span>'
    hidden = text[end:].removeprefix("\n")  # which begins a line of its own anyway
    if not hidden:
        return first
    words = f"… {len(text) - end:,} characters more"
    link = f' <span class="kit-more" style="{PALE}text-decoration:underline">{words}</span>'
    return (
        f'<details class="kit-text"><summary style="cursor:pointer;list-style-position:outside">{first}{link}</summary>'
        f'<span style="{_TEXT}{look}">{escape(hidden, len(hidden))}</span></details>'
    )


def score_text(value: object, name: str = "") -> str:
    """A score as a page shows it; an advantage with its sign."""
    if not isinstance(value, (int, float)) or value != value:
        return "none"
    if name == "advantage":
        return f"{value:+.2f}"
    return f"{value:.2f}"


def is_known(value: object) -> bool:
    """Is it neither None nor NaN? True for a list, as in files."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))
