"""Completions beside their rewards: widgets in a notebook, a plain table elsewhere."""

import importlib.util
import threading
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_kit._support.display import escape, widget_bundle
from grpo_kit._support.kernel import in_notebook, visible
from grpo_kit.record._run_folder import is_locked, path_of
from grpo_kit.record.files import read_completions
from grpo_kit.watch._completions import pages_of
from grpo_kit.watch._follow import Follower

AS_WRITTEN = "as written"
ALL = "all"
_MOST = 64  # shown at once


def select(
    table: pd.DataFrame,
    step: int,
    *,
    sort: str = AS_WRITTEN,
    text: str = "",
    group: int | None = None,
) -> pd.DataFrame:
    """Completions of one step with `text` (any case) in prompt or response, highest `sort` column first.

    Rows that belong together (turns of an episode) stay so: all are shown where one holds the text, at the place of the
    highest.
    """
    pages = pages_of(table)
    step_rows = table[table["step"] == step]
    if group is not None:
        step_rows = step_rows[step_rows["group"] == group]
    chosen = pages.whole(step_rows, step_rows[_holds(step_rows, text)])
    if sort == AS_WRITTEN:
        return chosen
    return pages.whole(step_rows, chosen.sort_values(sort, ascending=False, kind="stable"))


class CompletionBrowser:
    """Widgets over the completions of a run; the saved notebook keeps three of them. Made by `browse`."""

    def __init__(self, folder: str | Path) -> None:
        import ipywidgets as w

        self.folder = path_of(folder)
        self.table = pd.DataFrame()
        # JupyterLab's clicks may run in another thread than the follower's checks.
        self._lock = threading.RLock()
        narrow = w.Layout(width="190px")
        look = {"style": {"description_width": "initial"}, "layout": narrow}
        self.step = w.SelectionSlider(options=[0], description="step", continuous_update=False)
        self.sort = w.Dropdown(options=[AS_WRITTEN], description="sort by", **look)
        self.text = w.Text(placeholder="text to find", continuous_update=False, layout=narrow)
        self.group = w.Dropdown(options=[(ALL, ALL)], description="group", **look)
        self.follow = w.Checkbox(description="follow the run", indent=False, layout=narrow)
        self.button = w.Button(description="Refresh", tooltip="read the run folder again")
        self.view = w.HTML()
        filters = [self.step, self.group, self.sort, self.text]
        controls = [*filters, self.button, self.follow]
        for control in controls:
            _answer_while_busy(control)
        for control in filters:
            control.observe(self._show, "value")
        self.button.on_click(self._refresh_or_say)
        self.follow.observe(self._follow, "value")
        self._follower = Follower(
            self.folder, self.refresh, lambda: setattr(self.follow, "value", False)
        )
        row = w.Layout(flex_flow="row wrap", align_items="center")
        self.widget = w.VBox([w.HBox(controls, layout=row), self.view])
        self.refresh()
        self.follow.value = bool(is_locked(self.folder))

    def refresh(self) -> None:
        """Read the folder again; the slider moves to the newest step if it stood on the last one.

        Raises the RunFolderError of read_completions.
        """
        table = _table_of(self.folder)
        with self._lock, self.view.hold_sync():
            step = self.step.value
            was_at_end = self.table.empty or step == self.step.options[-1]
            self.table = table
            if not table.empty:
                steps = sorted(int(step) for step in table["step"].unique())
                if list(self.step.options) != steps:
                    self.step.options = steps
                    if was_at_end or step not in steps:
                        step = steps[-1]
                    self.step.value = step
                sortable = [AS_WRITTEN, *pages_of(table).scores(table)]
                if "advantage" in table:
                    sortable.append("advantage")
                if list(self.sort.options) != sortable:
                    self.sort.options = sortable
            self._show()

    def close(self) -> None:
        """Remove the widgets and stop following."""
        self._follower.stop()
        self.widget.close()

    def _refresh_or_say(self, _button: object) -> None:
        try:
            self.refresh()
        except (ValueError, OSError) as error:  # otherwise the error would be invisible
            self.view.value = escape(str(error), 1000)

    def _follow(self, change: dict) -> None:
        if not change["new"]:
            self._follower.stop()
        elif not self._follower.start("completions"):
            self.follow.value = False

    def _show(self, change: object = None) -> None:
        with self._lock:
            if self.table.empty:
                self.view.value = "No completions yet. Press Refresh once a step is done."
                return
            groups = (
                self.table.loc[self.table["step"] == self.step.value, "group"].dropna().unique()
            )
            options = [(ALL, ALL)]
            options += [(f"{int(group)}, side by side", int(group)) for group in sorted(groups)]
            if list(self.group.options) != options:
                group = self.group.value
                self.group.options = options
                self.group.value = group if group in dict(options).values() else ALL
            self.view.value = self._page()

    def _page(self) -> str:
        step = self.step.value
        text = self.text.value
        group = None
        part = f"step {step}"
        if self.group.value != ALL:
            group = self.group.value
            part = f"group {group} of step {step}"
        rows = select(self.table, step, sort=self.sort.value, text=text, group=group)
        pages = pages_of(self.table)
        if not rows.empty:
            first, count = pages.first(rows, _MOST)
            page = pages.html(first)
            if count > _MOST:
                page += f"<p>{count - _MOST} more are not shown: filter, or pick a group.</p>"
            return page
        elsewhere = sorted(
            int(step) for step in self.table.loc[_holds(self.table, text), "step"].unique()
        )
        hint = "Nor does any step."
        if elsewhere:
            hint = f"It is in step {', '.join(map(str, elsewhere[:12]))}."
        return f"No {pages.row_name} of {part} holds <b>{escape(text)}</b>. {hint}"

    def _repr_mimebundle_(self, **options: Any) -> dict:
        """The widget; for a saved notebook, which keeps no widgets, the three picks of the last step."""
        text = page = self.view.value
        if not self.table.empty:
            text, page = pages_of(self.table).picks(self.table)
        return widget_bundle(self.widget, **options) | {"text/plain": text, "text/html": page}


def browse(folder: str | Path) -> CompletionBrowser | pd.DataFrame:
    """Completions of a run: a browser with step slider, sorting, text filter and groups side by side.

    The browser reads the folder when made, at each press of Refresh, and repeatedly while a run writes to it ("follow
    the run"). For a run of episodes the page has episodes, turn under turn.
    Outside a notebook or without ipywidgets: a table with the columns of its completions, `response`, and
    `number`, the place in the group; for episodes also `turns`, the number of turns, and `conversation`, the text.
    That table is for reading: what would steer a terminal is written as escapes, which read_completions does not do.
    Raises RunFolderError (a ValueError) if there is no such folder.
    """
    if in_notebook() and importlib.util.find_spec("ipywidgets"):
        return CompletionBrowser(folder)
    table = _table_of(folder)
    if {"prefill", "completion"} <= set(table):
        table["response"] = table["prefill"].fillna("") + table["completion"].fillna("")
    table = pages_of(table).readable(table)
    return table.map(lambda cell: visible(cell) if isinstance(cell, str) else cell)


def _answer_while_busy(control: Any) -> None:
    """Let JupyterLab's clicks be handled while a cell runs, such as training.

    Lab sends them to a thread beside the cell; ipykernel 7.4 returns them to the last writer of the control.
    """
    comm = getattr(control, "comm", None)
    if hasattr(comm, "_reply_subshell_for"):  # private: tests/browser fails when it is gone
        comm._reply_subshell_for = lambda data, default: default


def _table_of(folder: str | Path) -> pd.DataFrame:
    """The completions of a run, each with its number."""
    table = read_completions(folder)
    return pages_of(table).numbered(table)


def _holds(table: pd.DataFrame, text: str) -> pd.Series:
    if not text:
        return pd.Series(True, index=table.index)
    return pages_of(table).texts(table).str.lower().str.contains(text.lower(), regex=False)
