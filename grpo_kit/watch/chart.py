"""The chart of a run or of several: shown in a notebook, saved as SVG or PNG, redrawn while a run continues."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from grpo_kit._support.display import small_png
from grpo_kit._support.kernel import in_notebook
from grpo_kit.record._run_folder import is_locked, path_of
from grpo_kit.record.files import write_where_asked
from grpo_kit.watch._follow import Follower
from grpo_kit.watch._run_state import RunState
from grpo_kit.watch._svg import WIDTH, draw_svg

_TEXT = "the run's chart"
SHOWN = {"image/png": {"width": WIDTH // 2}}  # a notebook's metadata of a chart's bundle


def plot_run(
    folder: str | Path,
    *,
    compare: str | Path | Sequence[str | Path] | None = None,
    follow: bool = False,
) -> RunChart:
    """The live chart redrawn from its folder, also while the run writes it.

    compare: one or more other run folders, drawn into the same panels in their own colours.
    follow: in a notebook the picture is redrawn while the run continues and this kernel is free, until the run has
    ended: for a second notebook beside the one that trains.
    Points are steps; from 21 steps on a line shows their centred moving mean. Points with bars are held-out accuracy
    with its 95 % interval, in a panel of its own, if it was measured during training. Red flags are numbered lines at
    their first step, changes made during training dotted lines with a letter; both are explained under the chart.
    Raises RunFolderError (a ValueError) if a folder does not exist.

    >>> plot_run("runs/full", compare="runs/lora").save("both.png")  # doctest: +SKIP
    """
    if isinstance(compare, str | os.PathLike):
        compare = [compare]
    folders = [path_of(name) for name in (folder, *(compare or ()))]
    labels = [path.name for path in folders]
    if len(set(labels)) < len(labels):
        labels = [str(path) for path in folders]

    def read_runs() -> dict[str, RunState]:
        return {label: RunState.read(path) for label, path in zip(labels, folders, strict=True)}

    if follow and in_notebook():
        return _FollowedChart(folders[0], read_runs)
    return RunChart(read_runs())


class RunChart:
    """The drawing of runs by their names. A notebook shows it, as SVG, or as PNG where it shows no SVG.

    last_step: to which the axis of steps reaches, if the runs do not.

    >>> chart = RunChart({"demo": RunState({1: {"step": 1, "reward": 0.5}})})
    >>> chart.save("demo.svg")  # doctest: +SKIP
    """

    def __init__(self, runs: Mapping[str, RunState], *, last_step: int = 0) -> None:
        self._runs = runs
        self._last_step = last_step

    def save(self, path: str | Path) -> Path:
        """Write the picture into a file that ends in .svg or .png (1,440 pixels wide); returns its path.

        Raises ValueError for another ending.
        """
        ending = path_of(path).suffix
        if ending == ".svg":
            return write_where_asked(path, self._repr_svg_().encode())
        if ending == ".png":
            return write_where_asked(path, svg_to_png(self._repr_svg_()))
        raise ValueError(f"path={str(path)!r} must end in .svg or .png")

    def bundle(self) -> dict[str, Any]:
        """The picture as a notebook stores it, by kind."""
        svg = self._repr_svg_()
        return {"text/plain": _TEXT, "image/svg+xml": svg, "image/png": svg_to_png(svg)}

    def _repr_svg_(self) -> str:
        return draw_svg(self._runs, last_step=self._last_step)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return svg_to_png(self._repr_svg_()), SHOWN["image/png"]

    def __repr__(self) -> str:
        return _TEXT


class _FollowedChart(RunChart):
    """The chart of a running training, redrawn as it grows; made by plot_run(folder, follow=True).

    It shows itself in a notebook, and updates there until the run has ended, the cell is run again, or
    stop(). A saved notebook keeps the last picture.
    """

    def __init__(self, folder: Path, read_runs: Callable[[], Mapping[str, RunState]]) -> None:
        super().__init__(read_runs())
        self._folder = folder
        self._read = read_runs
        self._handle = None
        self._follower = Follower(folder, self._update)

    def stop(self) -> None:
        """Stop updating; the picture stays."""
        self._follower.stop()

    def _update(self) -> None:
        self._runs = self._read()
        self._handle.update(self.bundle(), raw=True, metadata=SHOWN)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        self._handle = display(self.bundle(), raw=True, metadata=SHOWN, display_id=True)
        if is_locked(self._folder):
            self._follower.start("chart")


def svg_to_png(svg: str) -> bytes:
    """A drawing as a PNG of 1,440 pixels width, in the font that matplotlib brings: the same on every machine."""
    import matplotlib
    import resvg_py
    from PIL import Image

    font = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
    png = resvg_py.svg_to_bytes(
        svg_string=svg,
        width=3 * WIDTH // 4,
        font_files=[str(font)],
        sans_serif_family="DejaVu Sans",
    )
    return small_png(Image.open(BytesIO(png)), transparent=True)
