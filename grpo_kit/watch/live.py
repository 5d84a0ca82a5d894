"""Training as it happens: a chart that updates in place, a progress bar, the last completions."""

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from grpo_kit.display import RED, duration, escape, in_notebook, to_png
from grpo_kit.record.files import read_metrics
from grpo_kit.watch.browse import completions_html, pick_three
from grpo_kit.watch.chart import draw
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.monitor import read_flags


class LiveChart:
    """Chart, progress bar and three completions of the last step, updated in place while training runs.

    In a notebook (Lab, VS Code, nbclient, papermill) the last state stays in the saved file as one PNG.
    Elsewhere it prints one line a step and never imports matplotlib. Between start() and finish() it takes
    at most 2 % of the time: a picture is drawn only once it fits. Trouble in here never stops training.

    pictures: False prints lines in a notebook too. clock: seconds, any origin.

    >>> chart = LiveChart()
    >>> chart.start(60, "runs/demo")
    >>> chart.update([{"step": 1, "reward": 0.25}])
    >>> chart.finish()
    """

    TEXT_SHARE, CHART_SHARE = 0.004, 0.015  # of the elapsed time

    def __init__(self, *, pictures: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._may_draw = clock, pictures
        self._reset(0)

    def _reset(self, total_steps: int) -> None:
        self._total = total_steps
        self._rows: dict[int, Mapping] = {}
        self._completions: pd.DataFrame | None = None
        self._flags: list[Flag] = []
        self._handles: dict[str, object] = {}
        self._started = self._clock()
        self._times: deque[float] = deque([self._started], maxlen=21)  # when the last steps ended
        self._spent = {"text": 0.0, "chart": 0.0}
        # Expected seconds of the next one; then of the last one, as measured.
        self._cost = {"text": 0.01, "chart": 0.6}
        self._pictures = self._may_draw and in_notebook()

    def start(self, total_steps: int, folder: str | Path | None = None) -> None:
        """Begin; with a folder that holds steps of an earlier session, the chart goes on from them."""
        self._reset(total_steps)
        try:
            rows = read_metrics(folder).to_dict("records") if folder is not None else []
            self._flags = read_flags(folder) if folder is not None else []
        except (ValueError, OSError):  # a chart of this session only is better than no training
            rows = []
        self._rows = {int(row["step"]): row for row in rows}
        if self._pictures:
            self._guard(_load_matplotlib)
            self._spent["chart"] = self._clock() - self._started  # loading counts as drawing
            self._guard(self._show_text)
            self._guard(lambda: self._show("chart", {"text/plain": "The chart follows in a moment."}))
            self._guard(self._show_flags)

    def update(self, rows: Sequence[Mapping], completions: pd.DataFrame | None = None) -> None:
        """Take in the rows of new steps (all rows so far will do too) and the last step's completions."""
        now = self._clock()
        self._rows |= {int(row["step"]): row for row in rows}
        self._completions = completions if completions is not None else self._completions
        self._times.append(now)
        if self._pictures:
            self._if_affordable("text", self._show_text, now)
            self._if_affordable("chart", self._show_chart, now)
        if not self._pictures:
            self._guard(lambda: print(self.line(), flush=True))

    def replace(self, row: Mapping) -> None:
        """Take in a row again that an evaluation added to."""
        self._rows[int(row["step"])] = row

    def flag(self, flag: Flag) -> None:
        """Show a red flag: a marker in the chart and words under it; elsewhere a line."""
        self._flags.append(flag)
        if self._pictures:
            self._guard(self._show_flags)
        if not self._pictures:
            self._guard(lambda: print(f"Red flag: {flag}", flush=True))

    def change(self, step: int, text: str) -> None:
        print(f"From step {step}: {text}", flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def finish(self) -> None:
        """Show the last state, whatever it costs."""
        if self._pictures and self._rows:
            self._guard(lambda: self._show_text(done=True))
            self._guard(self._show_chart)

    def line(self, *, done: bool = False) -> str:
        """The last step in one line.

        >>> chart.line()
        'step 12/60  reward 0.41 ± 0.12  exact 0.30  length 11  cut off 2 %  entropy 0.80  4 min 10 s left'
        """
        step = max(self._rows, default=0)
        words = [f"step {step}/{self._total}"]
        row = self._rows.get(step, {})
        for name, label in _line_names(row):
            value = row.get(name)
            if value is None or value != value:
                continue
            spread = row.get("reward_std")
            if name == "reward" and spread is not None and spread == spread:
                words.append(f"reward {value:.2f} ± {spread:.2f}")
            elif name == "completion_length":
                words.append(f"{label} {value:.0f}")
            else:
                words.append(f"{label} {value:{'.0%' if name == 'completion_cut_off' else '.2f'}}")
        return "  ".join([*words, self._time(step, done)])

    def _time(self, step: int, done: bool) -> str:
        if done:
            word = "done in" if step >= self._total else "stopped after"
            return f"{word} {duration(self._clock() - self._started)}"
        if len(self._times) < 2:
            return "waiting for the first step"
        seconds_a_step = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        if len(self._times) == 2:  # start() may have been called at any point of the first step
            seconds_a_step = self._rows.get(step, {}).get("step_seconds") or seconds_a_step
        return f"{duration(seconds_a_step * max(0, self._total - step))} left"

    def _if_affordable(self, kind: str, show: Callable[[], None], now: float) -> None:
        share = self.TEXT_SHARE if kind == "text" else self.CHART_SHARE
        if self._spent[kind] + self._cost[kind] > share * (now - self._started):
            return
        begun = self._clock()
        self._guard(show)
        self._cost[kind] = self._clock() - begun
        self._spent[kind] += self._cost[kind]

    def _guard(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception as error:  # drawing must never stop training; what went wrong is said once
            if self._pictures:
                warnings.warn(
                    f"The live chart stops ({type(error).__name__}: {error}). "
                    "Training goes on: a line a step.",
                    RuntimeWarning,
                    stacklevel=4,
                )
            self._pictures = False

    def _show_text(self, *, done: bool = False) -> None:
        step = max(self._rows, default=0)
        line = self.line(done=done)
        bar = f'<progress value="{step}" max="{self._total}" style="width:100%"></progress>'
        page = f"{bar}<br>{escape(line.replace('  ', ' · '))}"
        self._show("progress", {"text/plain": line, "text/html": page})
        if self._completions is not None and len(self._completions):
            three = pick_three(self._completions)
            plain = three[["pick", "reward", "completion"]].to_string(index=False)
            self._show("completions", {"text/plain": plain, "text/html": completions_html(three)})

    def _show_chart(self) -> None:
        table = pd.DataFrame([self._rows[step] for step in sorted(self._rows)])
        picture = to_png(draw({"": table}, last_step=self._total, flags={"": self._flags}, words=False))
        self._show("chart", {"text/plain": "the run's chart", "image/png": picture})

    def _show_flags(self) -> None:
        """Under the chart from the start, so that it stands there and not below the completions."""
        lines = [f"{n}. Red flag: {flag}" for n, flag in enumerate(self._flags, 1)] or ["No red flag so far."]
        page = "".join(
            f'<div style="color:{RED if self._flags else "inherit"}">{escape(line)}</div>' for line in lines
        )
        self._show("flags", {"text/plain": "\n".join(lines), "text/html": page})

    def _show(self, name: str, bundle: dict) -> None:
        from IPython.display import display

        metadata = {"image/png": {"width": 960}} if "image/png" in bundle else {}
        if name in self._handles:
            self._handles[name].update(bundle, raw=True, metadata=metadata)
        else:
            self._handles[name] = display(bundle, raw=True, metadata=metadata, display_id=True)


def _load_matplotlib() -> None:
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def _line_names(row: Mapping) -> list[tuple[str, str]]:
    parts = [(name, name.removeprefix("reward/")) for name in row if name.startswith("reward/")]
    after = [("completion_length", "length"), ("completion_cut_off", "cut off"), ("entropy", "entropy")]
    return [("reward", "reward"), *parts, *after]
