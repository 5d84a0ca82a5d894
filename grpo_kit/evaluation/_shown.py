"""Tables that hold numbers and show words: percent with one decimal, an interval in the cell of its value."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict

import pandas as pd

from grpo_kit._support.kernel import visible
from grpo_kit.evaluation.intervals import Estimate

_CELL = "text-align:left;vertical-align:top;padding:3px 16px 3px 0;line-height:1.4;white-space:normal;"


class ShownTable(pd.DataFrame):
    """A table of numbers to compute with, shown by a notebook and print() as a sentence and readable cells.

    A part of it (a column, a row, a selection) is a plain table.

    >>> shown(pd.DataFrame({"n": [256]}, index=["strict"]), "Half of them.", {"strict": {"right": "50.0 %"}})
    Half of them.
             right
    strict  50.0 %
    """

    _internal_names = [*pd.DataFrame._internal_names, "_text", "_page"]
    _internal_names_set = set(_internal_names)
    _text: str | None = None  # lost when pickled
    _page: str | None = None

    def __repr__(self) -> str:
        return visible(super().__repr__() if self._text is None else self._text)

    def _repr_html_(self) -> str | None:
        return super()._repr_html_() if self._page is None else self._page

    def _display_(self) -> object:
        """What marimo asks for, whose own tables have the numbers alone."""
        return sys.modules["marimo"].Html(self._repr_html_())


def estimates_table(
    task: str, estimates: Mapping[str, Estimate], constants: Iterable[tuple[str, float] | None], n: int
) -> pd.DataFrame:
    """One row a measure: value, low, high (95 %), n; then the known constant strategies, of n rows."""
    rows = {name: asdict(estimate) for name, estimate in estimates.items()}
    for constant in filter(None, constants):
        rows[constant[0]] = {"value": constant[1], "low": None, "high": None, "n": n}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis(task)
    return table.astype({"value": float, "low": float, "high": float, "n": int})


def shown(table: pd.DataFrame, sentence: str, cells: Mapping[str, Mapping[str, str]]) -> ShownTable:
    """The same table, shown as the sentence and the cells {row: {column: words}}."""
    heads = list(dict.fromkeys(name for row in cells.values() for name in row))
    head = "".join(f'<th style="{_CELL}">{html.escape(name)}</th>' for name in ["", *heads])
    rows = [
        f'<tr><th style="{_CELL}">{html.escape(name)}</th>'
        + "".join(f'<td style="{_CELL}">{_unbroken(row.get(key, ""))}</td>' for key in heads)
        + "</tr>"
        for name, row in cells.items()
    ]
    page = (
        f'<div style="line-height:1.4;max-width:100%;overflow-x:auto"><p style="margin:0 0 6px">'
        f'{html.escape(sentence)}</p><table style="table-layout:auto;border-collapse:collapse;margin:0;'
        f'font-variant-numeric:tabular-nums"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
    text = pd.DataFrame.from_dict(cells, orient="index").fillna("").to_string()
    return with_page(table, page, f"{sentence}\n{text}")


def _unbroken(words: str) -> str:
    """A cell's HTML that a narrow page breaks in front of an interval alone, not "19.9 | %" or "[15.5, | 25.2]"."""
    return html.escape(re.sub(r"(?<=[\d,<]) (?=[-+\d%p])", "\u00a0", words))


def with_page(table: pd.DataFrame, page: str, text: str) -> ShownTable:
    """The same table, shown as the page in a notebook and as the text in print()."""
    made = ShownTable(table)
    made._page, made._text = page, text
    return made


def percent(value: float) -> str:
    """A rate as a sentence shows it.

    >>> percent(0.883)
    '88.3 %'
    """
    return f"{100 * value:.1f} %"


def p_value(p: float | None) -> str:
    """The p-value as written in a sentence.

    >>> p_value(1e-9), p_value(0.0314)
    ('< 0.001', '0.031')
    """
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
