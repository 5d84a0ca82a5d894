"""Shared parts of pictures and notebook pages: colours, figures, harmless HTML, progress lines, intervals of rates.

Longer than 300 lines because whatever is drawn or shown takes its colours, its figure and its escaping from one place.
"""

from __future__ import annotations

import html
import itertools
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
    bases = {base} if base is not None else {"base", "before", "untrained", "control"}
    colours = itertools.cycle(COLOURS)
    return {name: BASE if name in bases else next(colours) for name in dict.fromkeys(names)}


def new_figure(
    width: float, height: float, *, dpi: int = 110, layout: str | None = "constrained"
) -> Figure:
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
    patches = {}
    text_style = {
        "ha": "center",
        "va": "center",
        "color": "#111111",
        "parse_math": False,
        "zorder": 3,
    }
    for name, (x, y, box_width, box_height, text, colour) in boxes.items():
        corner = x - box_width / 2, y - box_height / 2
        pale = [1 - 0.25 * (1 - channel) for channel in to_rgb(colour)]
        style = {
            "boxstyle": "round,pad=0,rounding_size=1",
            "fc": pale,
            "ec": colour,
            "lw": 1.5,
            "zorder": 2,
        }
        patches[name] = axes.add_patch(FancyBboxPatch(corner, box_width, box_height, **style))
        axes.text(x, y, text, fontsize=10.5, linespacing=1.3, **text_style)
    line = {
        "arrowstyle": "-|>",
        "color": "#808080",
        "lw": 2,
        "mutation_scale": 16,
        "shrinkA": 2,
        "shrinkB": 2,
    }
    for start, end, words in arrows:
        ends = {"patchA": patches[start], "patchB": patches[end]}
        axes.annotate("", boxes[end][:2], boxes[start][:2], arrowprops={**line, **ends})
        if words:
            ground = {"boxstyle": "round,pad=0.25", "fc": "#eeeeee", "ec": "none"}
            place = _between(boxes[start], boxes[end])
            axes.text(*place, words, fontsize=9.5, bbox=ground, **text_style)
    return figure


def _between(start: Sequence[Any], end: Sequence[Any]) -> list[float]:
    """The middle, (x, y), between the sides of two of diagram's boxes that face each other."""
    middle = []
    for axis in (0, 1):
        low, high = sorted((start, end), key=lambda box: box[axis])
        sides = low[axis], high[axis]
        if low[axis] < high[axis]:
            sides = low[axis] + low[axis + 2] / 2, high[axis] - high[axis + 2] / 2
        middle.append(sum(sides) / 2)
    return middle


def to_png(figure: Figure, *, transparent: bool = False) -> bytes:
    """The figure as a PNG. transparent: without its white grounds; what is black in a grey for light and dark pages."""
    from matplotlib.colors import to_rgba_array
    from PIL import Image

    figure.canvas.draw()  # makes the ticks
    if transparent:
        for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
            patch.set_facecolor("none")
        for artist in figure.findobj():
            for name in ("color", "edgecolor", "markeredgecolor", "markerfacecolor"):
                with suppress(ValueError, TypeError):  # something else under that name
                    colours = to_rgba_array(getattr(artist, f"get_{name}", lambda: ())())
                    if len(colours) and (colours == (0, 0, 0, 1)).all():
                        getattr(artist, f"set_{name}")(GREY)
        figure.canvas.draw()
    return small_png(
        Image.fromarray(np.asarray(figure.canvas.buffer_rgba())), transparent=transparent
    )


def small_png(picture: Image, *, transparent: bool = False) -> bytes:
    """A picture as a PNG of 128 colours: a third of the size in a saved notebook."""
    from PIL.Image import Dither

    buffer = BytesIO()
    picture = picture.convert("RGBA" if transparent else "RGB")
    picture.quantize(128, dither=Dither.NONE).save(buffer, format="png")
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
    marimo = sys.modules.get("marimo")
    return marimo if marimo is not None and marimo.running_in_notebook() else None


class ProgressLine:
    """One line with the progress of a piece of work and the time left. Made by progress_line."""

    OFTEN = 0.1  # seconds between two updates of the line

    def __init__(self, what: str, outer: ProgressLine | None) -> None:
        self.what = what
        self._outer = outer
        self._place, self._share, self._end, self._inner_text = "", 0.0, "", ""
        self._began = time.monotonic()
        self._base = self._began, 0.0  # time and share at the work's real start
        self._lock = threading.Lock()  # the first line comes from a thread
        self._handle: Any = None
        self._is_shown = self._is_closed = False
        self._written = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Show the progress: `done` of `total`."""
        self.say(f"{done} of {total}", done / max(total, 1), end=str(total))

    def say(self, place: str, share: float, *, end: str = "") -> None:
        """Show the progress, in words and as a share; `end` is part of the line that stays at the end."""
        seconds = time.monotonic()
        if seconds - self._base[0] < 0.1:  # so fast: it was cached
            self._base = seconds, share
        self._place, self._share, self._end = place, share, end
        self.show()

    def print(self, text: str) -> None:
        """Print a separate line that stays."""
        self._in_terminal("")
        print(text, flush=True)

    def text(self) -> str:
        """The line's present text."""
        if not self._place:
            return self.what
        text = f"{self.what}: {self._place}"
        since, base = self._base
        if self._share > base:
            seconds = (time.monotonic() - since) / (self._share - base) * (1 - self._share)
            text += f", {duration(seconds)} left"
        return f"{text} ({self._inner_text})" if self._inner_text else text

    def show(self, *, begin: bool = False) -> None:
        """Update the line if it is shown; begin: show it from now on."""
        if self._outer is not None:
            self._outer._inner_text = self.text()
            self._outer.show()
            return
        seconds = time.monotonic()
        with self._lock:
            self._is_shown |= begin
            is_due = begin or seconds - self._written >= self.OFTEN
            if self._is_shown and not self._is_closed and is_due:
                self._written = seconds
                if in_notebook():
                    self._in_notebook(self.text())
                else:
                    self._in_terminal(self.text())

    def close(self, *, finished: bool) -> None:
        """End the line: a terminal erases it, a notebook replaces it by a summary of the work."""
        if self._outer is not None:
            self._outer._inner_text = ""
            return
        with self._lock:
            seconds = duration(time.monotonic() - self._began)
            if self._handle is None:
                self._in_terminal("")
            elif finished:
                end = f": {self._end}" if self._end else ""
                self._in_notebook(f"{self.what}{end} in {seconds}", bar=False)
            else:
                self._in_notebook(f"{self.text()}, stopped after {seconds}", bar=False)
            self._is_closed = True

    def _in_notebook(self, text: str, *, bar: bool = True) -> None:
        from IPython.display import display

        content = escape(text)
        if bar:
            content = f'<progress value="{self._share:.3f}" max="1" style="width:12em"></progress> {content}'
        bundle = {"text/plain": text, "text/html": f'<div style="height:1.6em">{content}</div>'}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _in_terminal(self, text: str) -> None:
        if self._is_shown and not in_notebook() and sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 2
            print(
                f"\r{text[:width]:<{width}}",
                end="" if text else "\r",
                file=sys.stderr,
                flush=True,
            )


# The line of the surrounding work.
_OUTER: ContextVar[ProgressLine | None] = ContextVar("_OUTER", default=None)


class Interrupted(KeyboardInterrupt):
    """The stop button ended work that leaves nothing half done: IPython shows the message alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@contextmanager
def progress_line(what: str, *, after: float = 1.0) -> Iterator[ProgressLine]:
    """Yields f(done, total), which shows "what: 64 of 256, 12 s left" in one place.

    after: seconds before the line appears, whether or not f was called by then; shorter work shows nothing. In a
    notebook the line is an updated display, and ends as "what: 256 in 14 s". In a terminal the line is overwritten,
    and erased at the end. If the output goes to a file nothing is shown. Inside the work of another line, that line
    shows this one. The stop button raises Interrupted, which says how far the work was.

    >>> with progress_line("samples") as progress:
    ...     progress(1, 2)
    """
    line = ProgressLine(what, _OUTER.get())
    timer = threading.Timer(max(after, 0.0), lambda: line.show(begin=True))
    timer.daemon = True
    token = _OUTER.set(line)
    finished = False
    try:
        if line._outer is None:
            if after > 0:
                timer.start()
            else:
                line.show(begin=True)
        yield line
        finished = True
    except KeyboardInterrupt as stop:
        if line._outer is None and type(stop) is KeyboardInterrupt:
            place = f"after {line._place}" if line._place else "at the start"
            raise Interrupted(f"Interrupted {place} ({what}); run the cell again.") from None
        raise
    finally:
        timer.cancel()
        _OUTER.reset(token)
        line.close(finished=finished)


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(3725), duration(59.6)
    ('1 h 2 min', '1 min 0 s')
    """
    minutes, seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


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
