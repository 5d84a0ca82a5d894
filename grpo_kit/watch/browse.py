"""Completions beside their rewards: widgets in a notebook, plain tables elsewhere."""

import importlib.util
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_kit.display import escape, in_notebook
from grpo_kit.record.files import read_completions

AS_WRITTEN = "as written"
_MOST = 64  # completions shown at once
_CELL = (
    "text-align:left;vertical-align:top;padding:2px 10px 2px 0;white-space:pre-wrap;overflow-wrap:anywhere;"
)


def reward_columns(table: pd.DataFrame) -> list[str]:
    """The total reward first, then its parts."""
    return [n for n in table if n == "reward"] + [n for n in table if str(n).startswith("reward/")]


def pick_three(table: pd.DataFrame) -> pd.DataFrame:
    """Best, median and worst reward of the last step in `table`; of equals the one written first.

    Completions without a reward are left out where three others are there. Adds a column `pick`.
    """
    last = table[table["step"] == table["step"].max()]
    judged = last[last["reward"].notna()]
    order = (judged if len(judged) >= 3 else last).sort_values("reward", ascending=False, kind="stable")
    places = {len(order) // 2: "median", len(order) - 1: "worst", 0: "best"} if len(order) else {}
    rows = order.iloc[sorted(places)]
    return rows.assign(pick=[places[place] for place in sorted(places)])


def completions_html(table: pd.DataFrame) -> str:
    """One row a completion: its rewards, the end of its prompt, prefill + completion; everything escaped."""
    rewards = reward_columns(table)
    picks = ["pick"] if "pick" in table else []
    heads = [*picks, *(name.removeprefix("reward/") for name in rewards), "end of prompt", "response"]
    rows = []
    for row in table.to_dict("records"):
        cells = [escape(row[name]) for name in picks] + [_number(row[name]) for name in rewards]
        cells += [f"<small>{escape(_question(row), 160, end=True)}</small>", _response_html(row)]
        rows.append("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>")
    head = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def group_html(table: pd.DataFrame) -> str:
    """The completions of one prompt side by side, each under its rewards."""
    cards = []
    for row in table.to_dict("records"):
        rewards = "<br>".join(
            f"{escape(name.removeprefix('reward/'))} <b>{_number(row[name])}</b>"
            for name in reward_columns(table)
        )
        cards.append(
            f'<div style="flex:1 1 180px;max-width:360px;border-top:3px solid #0072B2;{_CELL}">'
            f"<small>{rewards}</small><hr>{_response_html(row)}</div>"
        )
    question = escape(_question(table.iloc[0]), 600, end=True)
    return (
        f'<div style="{_CELL}"><small>{question}</small></div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:10px">{"".join(cards)}</div>'
    )


def select(
    table: pd.DataFrame, step: int, *, sort: str = AS_WRITTEN, text: str = "", group: int | None = None
) -> pd.DataFrame:
    """Completions of one step with `text` (any case) in prompt or response, highest `sort` column first."""
    chosen = table[table["step"] == step]
    if group is not None:
        chosen = chosen[chosen["group"] == group]
    chosen = chosen[_holds(chosen, text)]
    return chosen if sort == AS_WRITTEN else chosen.sort_values(sort, ascending=False, kind="stable")


class CompletionBrowser:
    """Widgets over the completions of a run; the saved notebook keeps a plain table. Made by `browse`."""

    def __init__(self, folder: str | Path) -> None:
        import ipywidgets as w

        self.folder = Path(folder)
        self.table = pd.DataFrame()
        wide = {"description_width": "initial"}
        self.step = w.SelectionSlider(options=[0], description="step", continuous_update=False)
        self.sort = w.Dropdown(options=[AS_WRITTEN], description="sort by", style=wide)
        self.text = w.Text(placeholder="text to find", description="filter", continuous_update=False)
        self.group = w.Dropdown(options=[("all", None)], description="group", style=wide)
        self.button = w.Button(description="Refresh", tooltip="read the run folder again")
        self.view = w.HTML()
        for control in (self.step, self.sort, self.text, self.group):
            control.observe(self._show, "value")
        self.button.on_click(self.refresh)
        controls = [self.step, self.sort, self.group, self.text, self.button]
        self.widget = w.VBox([w.HBox(controls, layout=w.Layout(flex_flow="row wrap")), self.view])
        self.refresh()

    def refresh(self, _button: object = None) -> None:
        """Read the folder again; the slider follows to the newest step if it stood on the last one."""
        at_end = self.table.empty or self.step.value == self.step.options[-1]
        before = self.step.value
        self.table = read_completions(self.folder)
        if not self.table.empty:
            steps = sorted(int(step) for step in self.table["step"].unique())
            self.step.options = steps
            self.step.value = steps[-1] if at_end or before not in steps else before
            sortable = [
                AS_WRITTEN,
                *reward_columns(self.table),
                *(["advantage"] * ("advantage" in self.table)),
            ]
            if list(self.sort.options) != sortable:
                self.sort.options = sortable
        self._show()

    def _show(self, change: object = None) -> None:
        if self.table.empty:
            self.view.value = "No completions yet. Press Refresh once a step is done."
            return
        groups = self.table.loc[self.table["step"] == self.step.value, "group"].dropna().unique()
        options = [("all", None), *((f"{int(g)}, side by side", int(g)) for g in sorted(groups))]
        if list(self.group.options) != options:
            chosen = self.group.value if self.group.value in [value for _, value in options] else None
            self.group.options = options
            self.group.value = chosen
        self.view.value = self._page()

    def _page(self) -> str:
        step, text, group = self.step.value, self.text.value, self.group.value
        found = select(self.table, step, sort=self.sort.value, text=text, group=group)
        if found.empty:
            elsewhere = sorted(int(s) for s in self.table.loc[_holds(self.table, text), "step"].unique())
            where = (
                f"It is in step {', '.join(map(str, elsewhere[:12]))}." if elsewhere else "Nor does any step."
            )
            part = f"step {step}" if group is None else f"group {group} of step {step}"
            return f"No completion of {part} holds <b>{escape(text)}</b>. {where}"
        if group is not None:
            return group_html(found)
        more = f"<p>{len(found) - _MOST} more are not shown: filter, or pick a group.</p>" * (
            len(found) > _MOST
        )
        return completions_html(found.head(_MOST)) + more

    def _repr_mimebundle_(self, **options: Any) -> dict:
        """The widget, and for a saved notebook (which keeps no widgets) the three picks of the last step."""
        three = pick_three(self.table) if not self.table.empty else self.table
        bundle = self.widget._repr_mimebundle_(**options)
        page = completions_html(three) if len(three) else self.view.value
        return bundle | {"text/plain": three.to_string(), "text/html": page}


def browse(folder: str | Path) -> CompletionBrowser | pd.DataFrame:
    """Completions of a run: a browser with step slider, sorting, text filter and groups side by side.

    Reads the folder when made and at each press of Refresh, also while the run writes it.
    Outside a notebook or without ipywidgets: a table with the columns of completions.parquet and `response`.
    Raises RunFolderError (a ValueError) if there is no such folder.
    """
    if in_notebook() and importlib.util.find_spec("ipywidgets"):
        return CompletionBrowser(folder)
    table = read_completions(folder)
    if {"prefill", "completion"} <= set(table):
        table["response"] = table["prefill"].fillna("") + table["completion"].fillna("")
    return table


def _question(row: Any) -> str:
    """The prompt without its prefill, which is shown with the completion."""
    return str(row.get("prompt") or "").removesuffix(str(row.get("prefill") or ""))


def _response_html(row: Any) -> str:
    return f'<span style="opacity:.6">{escape(row.get("prefill"))}</span>{escape(row.get("completion"))}'


def _number(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, (int, float)) and value == value else "none"


def _holds(table: pd.DataFrame, text: str) -> pd.Series:
    whole = table["prompt"].fillna("") + table["completion"].fillna("")  # the prompt ends in the prefill
    return whole.str.lower().str.contains(text.lower(), regex=False)
