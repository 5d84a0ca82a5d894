"""What every picture and every notebook page is made with: colours, figures, harmless HTML."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with any colour vision: jfly.uni-koeln.de/color
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY, RED = "#555555", "#B00020"
# What draws the eye on a page of any theme: text on a ground of its own, what follows in the page's own colour. (No
# colour of text has a contrast of 4.5 on white and on JupyterLab's dark #111111 both.)
BADGE = "background:#B00020;color:#ffffff;padding:0 6px;border-radius:3px"
# The same thing has the same colour in every picture: the model (or arm) to compare with, the trained one, and the best
# answer that is given without reading the question.
BASE, TUNED, CONSTANT = "#9aa5b1", COLOURS[0], "#c44e52"


def new_figure(width: float, height: float, *, dpi: int = 110, layout: str | None = "constrained") -> Figure:
    """An empty white figure of width x height inches that a notebook shows, once, as a small PNG.

    Made without pyplot, which would show it a second time and keep it in memory.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    figure._repr_png_ = lambda: to_png(figure)
    return figure


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG of 1430 pixels width, with 128 colours: a third of the size in a saved notebook."""
    from PIL import Image

    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    buffer = BytesIO()
    picture.quantize(128, dither=Image.Dither.NONE).save(buffer, format="png")
    return buffer.getvalue()


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: Lab, VS Code, Colab, nbclient, papermill; not terminal IPython."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module else None
    return getattr(shell, "kernel", None) is not None


def escape(text: object, limit: int = 400, *, end: bool = False) -> str:
    """Text as harmless HTML, at most `limit` characters of its start (or its end)."""
    text = "" if text is None or text != text else str(text)
    if len(text) > limit:
        text = f"… {text[-limit:]}" if end else f"{text[:limit]} …"
    safe = html.escape(text)
    # A tag between the delimiters keeps MathJax from typesetting what the model wrote.
    return safe.replace("$", "<span>$</span>").replace("\\", "<span>\\</span>")


@contextmanager
def progress_line(what: str, *, after: float = 3.0) -> Iterator[Callable[[int, int], None]]:
    """Yields f(done, total), which shows "what: 64 of 256, 12 s left" in one place, gone at the end.

    after: seconds before the first line. In a notebook a display that is updated, in a terminal a line that is written
    over; nothing where the output goes to a file.

    >>> with progress_line("samples") as progress:
    ...     progress(1, 2)
    """
    began, shown = time.monotonic(), []

    def show(text: str) -> None:
        if in_notebook():
            from IPython.display import display

            bundle = {"text/plain": text}
            shown[0].update(bundle, raw=True) if shown else shown.append(
                display(bundle, raw=True, display_id=True)
            )
        elif sys.stderr.isatty():
            shown.append(True)
            print(f"\r{text:<78}", end="" if text else "\r", file=sys.stderr, flush=True)

    def progress(done: int, total: int) -> None:
        spent = time.monotonic() - began
        if spent > after and done:
            show(f"{what}: {done} of {total}, {duration(spent / done * (total - done))} left")

    try:
        yield progress
    finally:
        if shown:
            show("")


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> duration(3725), duration(59.6)
    ('1 h 2 min', '1 min 0 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
