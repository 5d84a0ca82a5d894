"""Training as it happens: a chart that updates in place at every step, a progress bar, the last completions."""

import json
import statistics
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd

from grpo_kit._support.display import duration, escape, marimo_notebook
from grpo_kit._support.kernel import in_notebook
from grpo_kit.record.control import CONTROL
from grpo_kit.record.files import read_completions
from grpo_kit.watch._completions import completions_page
from grpo_kit.watch._flags import Flag
from grpo_kit.watch._panel import LIVE, panel_row, panel_status, panel_update, panel_values
from grpo_kit.watch._red_flag import badge, flags_page
from grpo_kit.watch._run_state import RunState, change_line, flag_line, held_out_lines
from grpo_kit.watch._svg import HEIGHT, WIDTH, draw_svg
from grpo_kit.watch._svg_axes import axis_end
from grpo_kit.watch.chart import SHOWN, RunChart

_ONE_LINE = "height:1.5em;white-space:nowrap;overflow:hidden;text-overflow:ellipsis"


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

    SHARE, LATEST = 0.015, 5.0  # of the time; seconds until the next step is drawn whatever it costs

    def __init__(self, *, pictures: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._may_draw = clock, pictures
        self._reset(0)

    def _reset(self, total_steps: int) -> None:
        self._total = total_steps
        self._run = RunState()
        self._completions: pd.DataFrame | None = None
        self._status, self._over = "", False
        self._folder: Path | None = None
        self._panel = uuid.uuid4().hex  # the name of its buttons in the page
        self._said, self._paused = "", False  # the trainer's last answer
        self._handles: dict[str, object] = {}
        self._shown: dict[str, dict] = {}
        self._drawn, self._updates = self._clock(), 0
        self._costs: deque[float] = deque(maxlen=5)  # seconds, of the last drawings
        self._pictures = self._may_draw and (in_notebook() or marimo_notebook() is not None)

    def start(self, total_steps: int, folder: str | Path | None = None) -> None:
        """Begin; if the folder holds steps of an earlier session, chart and time continue from them."""
        self._reset(total_steps)
        self._folder = None if folder is None else Path(folder)
        try:
            if self._folder is not None:
                self._read(self._folder)
        except (ValueError, OSError):  # a chart of this session only is better than no training
            self._run = RunState()
        self._draw(
            self._show_line, self._show_chart, self._show_panel, self._show_flags, self._show_completions
        )
        if not self._run.step:
            self._say_held_out(self._run.rows.values())  # before the first step

    def _read(self, folder: Path) -> None:
        self._run = RunState.read(folder)
        table = read_completions(folder)
        self._completions = table[table["step"] == table["step"].max()] if len(table) else None

    def update(
        self, rows: Sequence[Mapping], completions: pd.DataFrame | None = None, total_steps: int | None = None
    ) -> None:
        """Add the rows of new steps (all rows so far are allowed too) and the last step's completions.

        total_steps: if the run has more or fewer by now.
        """
        self._total = total_steps or self._total
        self._run.add(rows)
        self._completions = completions if completions is not None else self._completions
        self._updates += 1
        self._status = ""
        self._refresh(at_once=self._updates <= 2)
        self._otherwise(lambda: self._run.step_line(self._run.step, self._total))
        self._say_held_out(rows)

    def flag(self, flag: Flag) -> None:
        """Show a red flag: marked in the chart, the first in the progress line, all below; elsewhere a line."""
        self._run.flags.append(flag)
        self._refresh(at_once=True)
        self._otherwise(lambda: flag_line(flag))

    def change(self, step: int, text: str) -> None:
        """Mark a user's change: a dotted line at its first step, and the text below; elsewhere a line."""
        if (step, text) not in self._run.changes:
            self._run.changes.append((step, text))
        line = change_line((step, text))
        self._answer(line)
        self._refresh(at_once=True)
        self._otherwise(lambda: line)

    def say(self, text: str) -> None:
        """Show a sentence in the progress line until the next step; elsewhere a line."""
        self._status = text
        self._answer(text)
        self._refresh(at_once=True)
        self._otherwise(lambda: text)

    def finish(self) -> None:
        """Show the last state, at any cost, as a saved notebook keeps it."""
        self._status, self._over = "", True
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / CONTROL / LIVE).unlink(missing_ok=True)
        for name in ("buttons", "answer"):  # of which a saved notebook keeps nothing
            if name in self._handles:
                self._draw(lambda name=name: self._show(name, {}))
        self._draw(self._show_line, self._show_flags, self._show_completions, self._show_chart)

    def line(self, *, done: bool = False) -> str:
        """The last step in one line.

        >>> chart.line()
        'step 12/60  reward 0.41 ± 0.12  exact 0.30  length 11  cut off 2 %  entropy 0.80  4 min 10 s left'
        """
        return "  ".join([self._step(), *self._run.measures(), self._time(done)])

    def _step(self) -> str:
        return f"step {self._run.step}/{self._total}"

    def _time(self, done: bool) -> str:
        if done:
            ended = "done in" if self._run.step >= self._total else "stopped after"
            return f"{ended} {duration(self._run.trained)}"
        if not self._updates:
            return "waiting for the first step" if not self._run.rows else "waiting for the next step"
        return f"{duration(self._run.seconds_left(self._total))} left"

    def _say_held_out(self, rows: Iterable[Mapping]) -> None:
        """A line for each evaluation among these rows, where no pictures are shown."""
        for line in held_out_lines(rows):
            self._otherwise(lambda line=line: line)

    def _refresh(self, *, at_once: bool = False) -> None:
        """Draw the changes of a step, unless the last drawing was so recent that this costs too much."""
        begun = self._clock()
        wait = min(self.LATEST, statistics.median(self._costs) / self.SHARE) if self._costs else 0.0
        if not self._handles:  # before start()
            return
        if self._over:
            self._draw(self._show_line)
        elif at_once or begun - self._drawn >= wait:
            self._draw(
                self._show_line, self._show_chart, self._show_flags, self._show_completions, self._write_page
            )
        else:
            return
        self._drawn = self._clock()
        self._costs.append(self._drawn - begun)

    def _draw(self, *shows: Callable[[], None]) -> None:
        for show in shows:
            if self._pictures:
                self._guard(show)

    def _otherwise(self, text: Callable[[], str]) -> None:
        """Prints a line if no pictures are shown."""
        if not self._pictures or not self._handles:
            self._guard(lambda: print(text(), flush=True))

    def _guard(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception as error:  # drawing must never stop training; the error is reported once
            if self._pictures:
                warnings.warn(
                    f"The live chart stops ({type(error).__name__}: {error}). "
                    "Training goes on: a line a step.",
                    RuntimeWarning,
                    stacklevel=4,
                )
            self._pictures = False

    def _show_line(self) -> None:
        """Two lines under a bar: the step, with present work or errors, and the last step's measures."""
        flags, time_word = self._run.flags, self._time(self._over)
        said = [escape(word) for word in (self._step(), time_word, self._status) if word]
        plain = [self.line(done=self._over), *([self._status] if self._status else [])]
        if flags:
            flag = flags[0].brief + f" (and {len(flags) - 1} more, below)" * (len(flags) > 1)
            said.append(badge("red flag") + escape(flag))
            plain.append(f"red flag: {flag}")
        page = _line_page(self._run.step, self._total, said, self._run.measures())
        if "buttons" in self._handles and not self._over:
            update = panel_update(self._values(), self._paused, self._panel)
            page = f'<div data-kit-progress="{self._panel}">{page}</div>{update}'
        self._show("progress", {"text/plain": "  ".join(plain), "text/html": page})

    def _show_chart(self) -> None:
        end = axis_end(self._run.step, self._total)
        if self._over:
            self._show("chart", RunChart({"": self._run}, last_step=end).bundle())
            return
        drawing = draw_svg({"": self._run}, last_step=end, told=False)
        size = f"min-width:{WIDTH // 3}px;aspect-ratio:{WIDTH}/{HEIGHT}"  # a narrow page scrolls it: words stay legible
        page = (
            f'<div data-kit-chart="{self._panel}" style="max-width:{WIDTH // 2}px;overflow-x:auto">'
            f'<div style="{size}">{drawing}</div></div>'
        )
        self._show("chart", {"text/plain": "the run's chart so far", "text/html": page})

    def _values(self) -> dict[str, str]:
        return panel_values(self._run.rows.get(self._run.step, {}))

    def _show_panel(self) -> None:
        """Buttons directly under the chart, and the line that answers them."""
        if self._folder is not None:
            self._show("buttons", panel_row(self._folder, self._panel))
            self._show("answer", panel_status("", self._panel))

    def _answer(self, text: str) -> None:
        """The trainer's words under the buttons, while they are there."""
        self._said = text
        if text.startswith(("Paused", "Going on")):
            self._paused = text.startswith("Paused")
        if "answer" in self._handles and not self._over:
            self._draw(lambda: self._show("answer", panel_status(text, self._panel)))

    def _write_page(self) -> None:
        """What a page reads that was opened again: the kernel's output does not reach it."""
        if "buttons" in self._handles and (folder := self._folder / CONTROL).is_dir():
            page = {n: self._shown[n]["text/html"].partition("<script>")[0] for n in ("progress", "chart")}
            page |= {"said": self._said, "paused": self._paused, "values": self._values()}
            (folder / LIVE).write_text(json.dumps(page), encoding="utf-8")

    def _show_flags(self) -> None:
        """Under the chart in a box of fixed height, so that the page does not move; the newest on top."""
        flags = self._run.flags
        lines = [f"{n}. {flag_line(flag)}" for n, flag in enumerate(flags, 1)] or ["No red flag."]
        page = flags_page(flags, scrolls=not self._over)
        self._show("flags", {"text/plain": "\n".join(lines), "text/html": page})

    def _show_completions(self) -> None:
        plain, page = completions_page(self._completions, scrolls=not self._over)
        self._show("completions", {"text/plain": plain, "text/html": page})

    def _show(self, name: str, bundle: dict) -> None:
        if self._shown.get(name) == bundle:
            return
        if (marimo := marimo_notebook()) is not None:  # it has one output a cell
            self._shown[name], self._handles[name] = bundle, None
            pages = [each.get("text/html") or each.get("image/svg+xml", "") for each in self._shown.values()]
            marimo.output.replace(marimo.Html("".join(pages)))
            return
        from IPython.display import display

        metadata = SHOWN if "image/png" in bundle else {}
        if name in self._handles:
            self._handles[name].update(bundle, raw=True, metadata=metadata)
        else:
            self._handles[name] = display(bundle, raw=True, metadata=metadata, display_id=True)
        self._shown[name] = bundle


def _line_page(step: int, total: int, said: Sequence[str], measured: Sequence[str]) -> str:
    """A bar and two lines: the step and present work (HTML), and the last step's measures (text)."""
    bar = f'<progress value="{step}" max="{total}" style="width:100%;height:1em"></progress>'
    lines = " · ".join(said), escape(" · ".join(measured))
    page = "".join(f'<div style="{_ONE_LINE}">{line}</div>' for line in lines)
    return f'<div style="line-height:1.5;max-width:{WIDTH // 2}px">{bar}{page}</div>'
