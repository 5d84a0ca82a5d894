"""Shared parts of pictures and notebook pages: colours, figures, harmless HTML, progress lines, intervals of rates.

Longer than 300 lines because whatever is drawn or shown takes its colours, its figure and its escaping from one place.
"""

from __future__ import annotations

import html
import math
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from io import BytesIO
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_kit._support.argument_checks import check_whole
from grpo_kit._support.kernel import in_notebook

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

# Okabe and Ito's colours, distinct for any colour vision: jfly.uni-koeln.de/color
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#767676")
# In pictures without a ground: a contrast of 4.5 on white, and of 4.2 on JupyterLab's dark #111111.
GREY = "#767676"
RED = "#D93A4A"
# Highlights for a page of any theme: text on a coloured ground; the rest in the page's own colour. (No
# text colour has a contrast of 4.5 on both white and JupyterLab's dark #111111.)
BADGE = "background:#B00020;color:#ffffff;padding:0 6px;border-radius:3px"
# Each thing has one colour in every picture: the model (or arm) to compare with, the trained model, and the best
# answer given without reading the question.
BASE = "#9aa5b1"
TUNED = COLOURS[0]
CONSTANT = "#c44e52"


def colours_of(names: Sequence[str], *, base: str | None = None) -> dict[str, str]:
    """The colour of each name in every picture: BASE for the one to compare with, then COLOURS in order.

    base: the name to compare with; None means any of the names base, before, untrained or control.

    >>> colours_of(["before", "after"]) == {"before": BASE, "after": TUNED}
    True
    """
    first = {base} if base is not None else {"base", "before", "untrained", "control"}
    others = [name for name in names if name not in first]
    of_others = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(others)}
    return {name: of_others.get(name, BASE) for name in names}


def new_figure(width: float, height: float, *, dpi: int = 110, layout: str | None = "constrained") -> Figure:
    """An empty figure of width x height inches, which a notebook shows once, as a small PNG without a ground.

    Made without pyplot, which would show the figure a second time and keep it in memory.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    figure._repr_png_ = lambda: to_png(figure, transparent=True)
    return figure


def diagram(
    boxes: Mapping[str, tuple[float, float, float, float, str, str]],
    arrows: Sequence[tuple[str, str, str]] = (),
    *,
    height: float = 2.4,
) -> Figure:
    """Boxes and arrows, 800 pixels wide, on a transparent ground: light and dark pages show them alike.

    boxes: name -> (x, y, width, height, text, colour): centre and sizes in percent of the width, y from 0 at the foot.
    arrows: (from box, to box, words on it). height: of the figure, in inches of 100 pixels, each 12.5 percent.

    >>> boxes = {"a": (20, 15, 20, 10, "prompt", BASE), "b": (80, 15, 20, 10, "reward", TUNED)}
    >>> diagram(boxes, [("a", "b", "")]).savefig("reward.png")  # doctest: +SKIP
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patches import FancyBboxPatch

    figure = new_figure(8, height, dpi=100, layout=None)
    figure.set_facecolor("none")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 100), ylim=(0, 12.5 * height))
    axes.axis("off")
    drawn, how = {}, {"ha": "center", "va": "center", "color": "#111111", "parse_math": False}
    for name, (x, y, wide, high, text, colour) in boxes.items():
        corner, pale = (x - wide / 2, y - high / 2), [1 - 0.25 * (1 - part) for part in to_rgb(colour)]
        box = FancyBboxPatch(
            corner, wide, high, "round,pad=0,rounding_size=1", fc=pale, ec=colour, lw=1.5, zorder=2
        )
        drawn[name] = axes.add_patch(box)
        axes.text(x, y, text, fontsize=10.5, linespacing=1.3, zorder=3, **how)
    for start, end, words in arrows:
        (x, y, *size), (to_x, to_y, *to_size) = boxes[start][:4], boxes[end][:4]
        line = {
            "arrowstyle": "-|>",
            "color": "#808080",
            "lw": 2,
            "mutation_scale": 16,
            "shrinkA": 2,
            "shrinkB": 2,
        }
        axes.annotate(
            "", (to_x, to_y), (x, y), arrowprops={**line, "patchA": drawn[start], "patchB": drawn[end]}
        )
        if words:  # between the sides that face each other
            ends = zip((x, y), (to_x, to_y), size, to_size, strict=True)
            place = [
                (a + b + (float(b > a) - float(b < a)) * (one - other) / 2) / 2 for a, b, one, other in ends
            ]
            ground = {"boxstyle": "round,pad=0.25", "fc": "#eeeeee", "ec": "none"}
            axes.text(*place, words, fontsize=9.5, bbox=ground, zorder=3, **how)
    return figure


def to_png(figure: Figure, *, transparent: bool = False) -> bytes:
    """The figure as a PNG. transparent: without its white grounds; what is black in a grey for light and dark pages."""
    from matplotlib.colors import to_rgba_array
    from PIL import Image

    figure.canvas.draw()  # makes the ticks
    if transparent:
        for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
            patch.set_facecolor("none")
        for artist in figure.findobj():
            for what in ("color", "edgecolor", "markeredgecolor", "markerfacecolor"):
                with suppress(ValueError, TypeError):  # something else under that name
                    colours = to_rgba_array(getattr(artist, f"get_{what}", lambda: ())())
                    if len(colours) and (colours == (0, 0, 0, 1)).all():
                        getattr(artist, f"set_{what}")(GREY)
        figure.canvas.draw()
    return small_png(Image.fromarray(np.asarray(figure.canvas.buffer_rgba())), transparent=transparent)


def small_png(picture: Image, *, transparent: bool = False) -> bytes:
    """A picture as a PNG of 128 colours: a third of the size in a saved notebook."""
    from PIL.Image import Dither

    buffer = BytesIO()
    picture.convert("RGBA" if transparent else "RGB").quantize(128, dither=Dither.NONE).save(
        buffer, format="png"
    )
    return buffer.getvalue()


def widget_bundle(widget: Any, **options: Any) -> dict[str, Any]:
    """A widget's display data, for ipywidgets 8 or 7. Hosted notebooks have 7, which lacks the method for it.

    options: include and exclude, as passed on by IPython.
    """
    if hasattr(widget, "_repr_mimebundle_"):
        return widget._repr_mimebundle_(**options)
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"text/plain": repr(widget), "application/vnd.jupyter.widget-view+json": view}


def cut(text: str, most: int) -> str:
    """At most `most` characters.

    >>> cut("learning", 6)
    'learn…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def escape(text: object, limit: int = 400, *, end: bool = False) -> str:
    """Text as harmless HTML, at most `limit` characters of its start (or its end)."""
    text = "" if text is None or text != text else str(text)
    if len(text) > limit:
        text = f"… {text[-limit:]}" if end else f"{text[:limit]} …"
    safe = html.escape(text)
    # A tag between the delimiters keeps MathJax from typesetting the model's text.
    return safe.replace("$", "<span>$</span>").replace("\\", "<span>\\</span>")


def marimo_notebook() -> Any | None:
    """The module marimo in one of its notebooks; None elsewhere."""
    found = sys.modules.get("marimo")
    return found if found is not None and found.running_in_notebook() else None


class ProgressLine:
    """One line with the progress of a piece of work and the time left. Made by progress_line."""

    OFTEN = 0.1  # seconds between two updates of the line

    def __init__(self, what: str, outer: ProgressLine | None) -> None:
        self.what = what
        self._outer = outer
        self._where, self._share, self._end, self._inside = "", 0.0, "", ""
        self._began = time.monotonic()
        self._base = self._began, 0.0  # time and share at the work's real start
        self._lock = threading.Lock()  # the first line comes from a thread
        self._handle: Any = None
        self._told = self._over = False
        self._written = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Show the progress: `done` of `total`."""
        self.say(f"{done} of {total}", done / max(total, 1), end=str(total))

    def say(self, where: str, share: float, *, end: str = "") -> None:
        """Show the progress, in words and as a share; `end` is part of the line that stays at the end."""
        now = time.monotonic()
        if now - self._base[0] < 0.1:  # so fast: it was cached
            self._base = now, share
        self._where, self._share, self._end = where, share, end
        self.show()

    def print(self, text: str) -> None:
        """Print a separate line that stays."""
        self._in_terminal("")
        print(text, flush=True)

    def text(self) -> str:
        """The line's present text."""
        since, base = self._base
        left = ""
        if self._share > base:
            seconds = (time.monotonic() - since) / (self._share - base) * (1 - self._share)
            left = f", {duration(seconds)} left"
        inside = f" ({self._inside})" if self._inside else ""
        return f"{self.what}: {self._where}{left}{inside}" if self._where else self.what

    def show(self, *, begin: bool = False) -> None:
        """Update the line if it is shown; begin: show it from now on."""
        if self._outer is not None:
            self._outer._inside = self.text()
            self._outer.show()
            return
        now = time.monotonic()
        with self._lock:
            self._told |= begin
            if self._told and not self._over and (begin or now - self._written >= self.OFTEN):
                self._written = now
                self._in_notebook(self.text()) if in_notebook() else self._in_terminal(self.text())

    def close(self, *, whole: bool) -> None:
        """End the line: a terminal erases it, a notebook replaces it by a summary of the work."""
        if self._outer is not None:
            self._outer._inside = ""
            return
        with self._lock:
            took = duration(time.monotonic() - self._began)
            if self._handle is not None:
                end = f": {self._end}" if self._end else ""
                self._in_notebook(
                    f"{self.what}{end} in {took}" if whole else f"{self.text()}, stopped after {took}",
                    bar=False,
                )
            elif self._told:
                self._in_terminal("")
            self._over = True

    def _in_notebook(self, text: str, *, bar: bool = True) -> None:
        from IPython.display import display

        drawn = f'<progress value="{self._share:.3f}" max="1" style="width:12em"></progress> ' * bar
        bundle = {"text/plain": text, "text/html": f'<div style="height:1.6em">{drawn}{escape(text)}</div>'}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _in_terminal(self, text: str) -> None:
        if self._told and not in_notebook() and sys.stderr.isatty():
            wide = shutil.get_terminal_size().columns - 2
            print(f"\r{text[:wide]:<{wide}}", end="" if text else "\r", file=sys.stderr, flush=True)


_AROUND: ContextVar[ProgressLine | None] = ContextVar(
    "_AROUND", default=None
)  # the line of the surrounding work


@contextmanager
def progress_line(what: str, *, after: float = 1.0) -> Iterator[ProgressLine]:
    """Yields f(done, total), which shows "what: 64 of 256, 12 s left" in one place.

    after: seconds before the line appears, whether or not f was called by then; shorter work shows nothing. In a
    notebook the line is an updated display, and ends as "what: 256 in 14 s". In a terminal the line is overwritten,
    and erased at the end. If the output goes to a file nothing is shown. Inside the work of another line, that line
    shows this one.

    >>> with progress_line("samples") as progress:
    ...     progress(1, 2)
    """
    line = ProgressLine(what, _AROUND.get())
    timer = threading.Timer(max(after, 0.0), lambda: line.show(begin=True))
    timer.daemon = True
    token = _AROUND.set(line)
    whole = False
    try:
        if line._outer is None:
            timer.start() if after > 0 else line.show(begin=True)
        yield line
        whole = True
    finally:
        timer.cancel()
        _AROUND.reset(token)
        line.close(whole=whole)


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(3725), duration(59.6)
    ('1 h 2 min', '1 min 0 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def wilson_interval(successes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The score interval of a rate, (low, high) in [0, 1].

    successes: 0 to n. Near 0 and 1, and for small n, it holds where mean +- 1.96 standard errors does not.
    Raises ValueError for n < 1, successes outside 0..n or a confidence outside (0, 1).
    Source: Wilson (1927); Newcombe (1998), Statistics in Medicine 17:857, method 3.

    >>> tuple(round(x, 4) for x in wilson_interval(81, 263))
    (0.2553, 0.3662)
    """
    check_whole("n", n, hint="; without rows there is no rate")
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes!r} must lie in 0..n={n}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must lie between 0 and 1, such as 0.95")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate = successes / n
    middle = rate + z * z / (2 * n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else max((middle - half) / scale, 0.0)
    high = 1.0 if successes == n else min((middle + half) / scale, 1.0)
    return low, high
