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
        return visible(self._text or super().__repr__())

    def _repr_html_(self) -> str | None:
        return self._page or super()._repr_html_()

    def _display_(self) -> object:
        """What marimo asks for, whose own tables have the numbers alone."""
        return sys.modules["marimo"].Html(self._repr_html_())


def estimates_table(
    task: str,
    estimates: Mapping[str, Estimate],
    constants: Iterable[tuple[str, float] | None],
    n: int,
) -> pd.DataFrame:
    """One row a measure: value, low, high (95 %), n; then the known constant strategies, of n rows."""
    rows = {name: asdict(estimate) for name, estimate in estimates.items()}
    for name, value in filter(None, constants):
        rows[name] = {"value": value, "low": None, "high": None, "n": n}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis(task)
    return table.astype({"value": float, "low": float, "high": float, "n": int})


def in_columns(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """The estimates as cells of one row: <name>, <name>_low, <name>_high."""
    cells = {}
    for name, estimate in estimates.items():
        cells |= {
            name: estimate.value,
            f"{name}_low": estimate.low,
            f"{name}_high": estimate.high,
        }
    return cells


def shown(
    table: pd.DataFrame, sentence: str, cells: Mapping[str, Mapping[str, str]]
) -> ShownTable:
    """The same table, shown as the sentence and the cells {row: {column: words}}."""
    words = pd.DataFrame.from_dict(cells, orient="index").fillna("")
    header = "".join(f'<th style="{_CELL}">{html.escape(name)}</th>' for name in ["", *words])
    rows = ""
    for name, row in words.iterrows():
        rows += f'<tr><th style="{_CELL}">{html.escape(name)}</th>'
        rows += "".join(f'<td style="{_CELL}">{_unbroken(text)}</td>' for text in row) + "</tr>"
    page = (
        f'<div style="line-height:1.4;max-width:100%;overflow-x:auto"><p style="margin:0 0 6px">'
        f'{html.escape(sentence)}</p><table style="table-layout:auto;border-collapse:collapse;margin:0;'
        f'font-variant-numeric:tabular-nums"><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
    return with_page(table, page, f"{sentence}\n{words.to_string()}")


def _unbroken(words: str) -> str:
    """A cell's HTML that a narrow page breaks in front of an interval alone, not "19.9 | %" or "[15.5, | 25.2]"."""
    return html.escape(re.sub(r"(?<=[\d,<]) (?=[-+\d%p])", "\u00a0", words))


def with_page(table: pd.DataFrame, page: str, text: str) -> ShownTable:
    """The same table, shown as the page in a notebook and as the text in print()."""
    result = ShownTable(table)
    result._page, result._text = page, text
    return result


def percent(value: float) -> str:
    """A rate as a sentence shows it.

    >>> percent(0.883)
    '88.3 %'
    """
    return f"{100 * value:.1f} %"


def p_value(p: float | None) -> str:
    """The p-value as written in a sentence.

    >>> p_value(1e-9), p_value(0.0314), p_value(None)
    ('< 0.001', '0.031', '')
    """
    if p is None:
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
