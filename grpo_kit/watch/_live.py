"""Training as it happens: a chart that updates in place at every step, a progress bar, the last completions.

Longer than 300 lines because the chart, its buttons and its last completions are drawn from one state.
"""

import json
import statistics
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd

from grpo_kit._support.display import duration, marimo_notebook
from grpo_kit._support.kernel import in_notebook
from grpo_kit.record.files import CONTROL, read_completions
from grpo_kit.watch._completions import completions_page, last_step_of
from grpo_kit.watch._panel import (
    LIVE,
    flags_page,
    panel_row,
    panel_status,
    panel_update,
    panel_values,
    progress_page,
)
from grpo_kit.watch._red_flag import Flag
from grpo_kit.watch._run_state import RunState, change_line, flag_line, held_out_lines
from grpo_kit.watch._svg import HEIGHT, WIDTH, draw_svg
from grpo_kit.watch.chart import SHOWN, RunChart


class LiveChart:
    """Chart, progress line and three completions of the last step, updated in place while training runs.

    In a notebook (Lab, VS Code, nbclient, papermill, marimo) the chart is drawn at every step, as SVG; finish() adds a
    line below for each red flag and change, and a PNG for pages that show no SVG. All outputs have their height from
    the start, so that a page does not jump. Elsewhere it prints one line a step and never imports matplotlib.
    From the third step on drawing takes at most 2 % of the time: if steps are so short that a drawing each would cost
    more, some are left out, and none is older than 5 s when the next step ends. Errors in here never stop training.

    pictures: False prints lines in a notebook too. clock: seconds, any origin.

    >>> chart = LiveChart()
    >>> chart.start(60, "runs/demo")
    >>> chart.update([{"step": 1, "reward": 0.25}])
    >>> chart.finish()
    """

    # of the time; seconds until the next step is drawn whatever it costs
    SHARE, LATEST = 0.015, 5.0

    def __init__(
        self, *, pictures: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._may_draw = pictures
        self._reset(0)

    def _reset(self, total_steps: int) -> None:
        self._total = total_steps
        self._run = RunState()
        self._folder = None
        self._completions = None
        self._status = ""
        self._is_over = False
        self._panel = uuid.uuid4().hex  # the name of its buttons in the page
        self._answer = ""  # the trainer's last one to a button
        self._is_paused = False
        self._handles = {}  # of the displays, by their place in the page
        self._bundles = {}  # what each of them shows
        self._drawn_at = self._clock()
        self._updates = 0
        self._costs = deque(maxlen=5)  # seconds, of the last drawings
        self._pictures = self._may_draw and (in_notebook() or marimo_notebook() is not None)

    def start(
        self,
        total_steps: int,
        folder: str | Path | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        """Begin; if the folder holds steps of an earlier session, chart and time continue from them.

        numbers: learning rate and temperature of the first step, shown in the fields until it is done.
        """
        self._reset(total_steps)
        self._numbers = numbers or {}
        if folder is not None:
            self._folder = Path(folder)
            # a chart of this session only is better than no training
            with suppress(ValueError, OSError):
                last = last_step_of(read_completions(folder))
                self._run, self._completions = RunState.read(folder), last
        self._draw(
            self._show_progress,
            self._show_chart,
            self._show_panel,
            self._show_flags,
            self._show_completions,
        )
        if not self._run.step:  # evaluated before the first step
            self._print(*held_out_lines(self._run.rows.values()))

    def update(
        self,
        rows: Sequence[Mapping],
        completions: pd.DataFrame | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Add the rows of new steps (all rows so far are allowed too) and the last step's completions.

        total_steps: if the run has more or fewer by now.
        """
        self._total = total_steps or self._total
        self._run.add(rows)
        step = self._run.step
        self._numbers = self._run.rows[step]
        if completions is not None:
            self._completions = completions
        self._updates += 1
        self._status = ""
        if self._handles:
            self._refresh(at_once=self._updates <= 2)
        self._guard(
            lambda: self._print(self._run.step_line(step, self._total), *held_out_lines(rows))
        )

    def flag(self, flag: Flag) -> None:
        """Show a red flag: marked in the chart, the first in the progress line, all below; elsewhere a line."""
        self._run.flags.append(flag)
        self._tell(flag_line(flag))

    def change(self, step: int, text: str) -> None:
        """Mark a user's change: a dotted line at its first step, and the text below; elsewhere a line."""
        change = step, text
        if change not in self._run.changes:
            self._run.changes.append(change)
        self._show_answer(change_line(change))
        self._tell(change_line(change))

    def say(self, text: str) -> None:
        """Show a sentence in the progress line until the next step; elsewhere a line."""
        self._status = text
        self._show_answer(text)
        self._tell(text)

    def finish(self) -> None:
        """Show the last state, at any cost, as a saved notebook keeps it."""
        self._status = ""
        self._is_over = True
        if self._has_buttons:
            with suppress(OSError):
                (self._folder / CONTROL / LIVE).unlink(missing_ok=True)
            self._draw(lambda: self._show("buttons", {}), lambda: self._show("answer", {}))
        self._draw(
            self._show_progress, self._show_flags, self._show_completions, self._show_chart
        )

    def line(self) -> str:
        """The last step in one line.

        >>> chart.line()
        'step 12/60  reward 0.41 ± 0.12  exact 0.30  length 11  cut off 2 %  entropy 0.80  4 min 10 s left'
        """
        return "  ".join([self._step_text(), *self._run.measures(), self._time_text()])

    def _step_text(self) -> str:
        return f"step {self._run.step}/{self._total}"

    def _time_text(self) -> str:
        if self._is_over:
            end = "done in" if self._run.step >= self._total else "stopped after"
            return f"{end} {duration(self._run.seconds)}"
        if self._updates:
            return f"{duration(self._run.seconds_left(self._total))} left"
        return "waiting for the next step" if self._run.rows else "waiting for the first step"

    @property
    def _has_buttons(self) -> bool:
        return "buttons" in self._handles

    def _refresh(self, *, at_once: bool = False) -> None:
        """Draw the changes of a step, unless the last drawing was so recent that this costs too much."""
        start = self._clock()
        if self._is_over:
            self._draw(self._show_progress)
        else:
            if self._costs and not at_once:
                wait = min(self.LATEST, statistics.median(self._costs) / self.SHARE)
                if start - self._drawn_at < wait:
                    return
            self._draw(
                self._show_progress,
                self._show_chart,
                self._show_flags,
                self._show_completions,
                self._write_page,
            )
        self._drawn_at = self._clock()
        self._costs.append(self._drawn_at - start)

    def _draw(self, *shows: Callable[[], None]) -> None:
        for show in shows:
            if self._pictures:
                self._guard(show)

    def _tell(self, line: str) -> None:
        """Draw what has changed at once; print the line if no pictures are shown."""
        if self._handles:
            self._refresh(at_once=True)
        self._print(line)

    def _print(self, *lines: str) -> None:
        """Print the lines if no pictures are shown."""
        if not self._pictures or not self._handles:
            for line in lines:
                print(line, flush=True)

    def _guard(self, show: Callable[[], None]) -> None:
        """Show; an error is reported once, ends the pictures, and never stops training."""
        try:
            show()
        except Exception as error:
            if self._pictures:
                warnings.warn(
                    f"The live chart stops ({type(error).__name__}: {error}). Training goes on: a line a step.",
                    RuntimeWarning,
                    stacklevel=4,
                )
            self._pictures = False

    def _show_progress(self) -> None:
        """Two lines under a bar: the step, with present work or errors, and the last step's measures."""
        status = [self._status] if self._status else []
        words = [self._step_text(), self._time_text(), *status]
        plain = [self.line(), *status]
        flag = ""
        if self._run.flags:
            first = self._run.flags[0]
            flag = f"{first.name} since step {first.step}"
            if len(self._run.flags) > 1:
                flag += f" (and {len(self._run.flags) - 1} more, below)"
            plain.append(f"red flag: {flag}")
        page = progress_page(self._run.step, self._total, words, flag, self._run.measures())
        if self._has_buttons and not self._is_over:
            update = panel_update(panel_values(self._numbers), self._is_paused, self._panel)
            page = f'<div data-kit-progress="{self._panel}">{page}</div>{update}'
        self._show("progress", {"text/plain": "  ".join(plain), "text/html": page})

    def _show_chart(self) -> None:
        end = _axis_end(self._run.step, self._total)
        if self._is_over:
            self._show("chart", RunChart({"": self._run}, last_step=end).bundle())
            return
        drawing = draw_svg({"": self._run}, last_step=end, full=False)
        # a narrow page scrolls it: words keep 9 pixels
        page = (
            f'<div data-kit-chart="{self._panel}" style="max-width:{WIDTH // 2}px;overflow-x:auto">'
            f'<div style="min-width:560px;aspect-ratio:{WIDTH}/{HEIGHT}">{drawing}</div></div>'
        )
        self._show("chart", {"text/plain": "the run's chart so far", "text/html": page})

    def _show_panel(self) -> None:
        """Buttons directly under the chart, and the line that answers them."""
        if self._folder is not None:
            self._show(
                "buttons", panel_row(self._folder, self._panel, panel_values(self._numbers))
            )
            self._show("answer", panel_status("", self._panel))

    def _show_answer(self, text: str) -> None:
        """The trainer's words under the buttons, while they are there."""
        self._answer = text
        if text.startswith(("Paused", "Going on")):
            self._is_paused = text.startswith("Paused")
        if self._has_buttons and not self._is_over:
            self._draw(lambda: self._show("answer", panel_status(text, self._panel)))

    def _write_page(self) -> None:
        """What a page reads that was opened again: the kernel's output does not reach it."""
        if not self._has_buttons or not (self._folder / CONTROL).is_dir():
            return
        page = {
            "said": self._answer,
            "paused": self._is_paused,
            "values": panel_values(self._numbers),
        }
        for name in ("progress", "chart"):
            page[name] = self._bundles[name]["text/html"].partition("<script>")[0]
        (self._folder / CONTROL / LIVE).write_text(json.dumps(page), encoding="utf-8")

    def _show_flags(self) -> None:
        """Under the chart in a box of fixed height, so that the page does not move; the newest on top."""
        flags = self._run.flags
        lines = [f"{number}. {flag_line(flag)}" for number, flag in enumerate(flags, 1)]
        plain = "\n".join(lines) or "No red flag."
        page = flags_page(flags, scrolls=not self._is_over)
        self._show("flags", {"text/plain": plain, "text/html": page})

    def _show_completions(self) -> None:
        plain, page = completions_page(self._completions, scrolls=not self._is_over)
        self._show("completions", {"text/plain": plain, "text/html": page})

    def _show(self, name: str, bundle: dict) -> None:
        """Show a bundle at its place in the page."""
        if self._bundles.get(name) == bundle:
            return
        self._bundles[name] = bundle
        marimo = marimo_notebook()
        if marimo is not None:  # it has one output a cell
            self._handles[name] = None
            pages = [
                shown.get("text/html") or shown.get("image/svg+xml", "")
                for shown in self._bundles.values()
            ]
            marimo.output.replace(marimo.Html("".join(pages)))
            return
        from IPython.display import display

        metadata = SHOWN if "image/png" in bundle else {}
        if name in self._handles:
            self._handles[name].update(bundle, raw=True, metadata=metadata)
        else:
            self._handles[name] = display(bundle, raw=True, metadata=metadata, display_id=True)


def _axis_end(step: int, total: int) -> int:
    """To which step a chart reaches while its run goes on: the axis doubles before the lines come to its end.

    >>> [_axis_end(step, 3000) for step in (0, 25, 26, 46, 2900)], _axis_end(3, 8)
    ([32, 32, 64, 64, 3000], 8)
    """
    end = 32
    while end < 1.25 * step:
        end *= 2
    return min(end, total)
