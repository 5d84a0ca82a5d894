"""The chart of a run: reward, its parts and what else a step measured; drawn live or from the run folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from grpo_kit.display import COLOURS, GREY, RED, in_notebook, new_figure
from grpo_kit.record.files import read_metrics
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.monitor import read_flags

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from grpo_kit.watch.follow import FollowedChart

_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_SHARES = ("completion_cut_off", "frac_reward_zero_std")
_WORDS = {
    "reward": "reward (band: ± reward_std)",
    "completion_length": "completion length, tokens",
    "completion_cut_off": "share cut off",
    "frac_reward_zero_std": "groups without a signal",
    "entropy": "entropy, nats a token",
    "kl": "KL to the reference",
    "grad_norm": "gradient norm",
    "temperature": "temperature",
    "learning_rate": "learning rate",
}


def plot_run(
    folder: str | Path, *, compare: str | Path | Sequence[str | Path] | None = None, follow: bool = False
) -> "Figure | FollowedChart":
    """The live chart drawn again from metrics.csv, also while the run writes it.

    compare: one or more other run folders, drawn into the same panels in their own colours.
    follow: in a notebook the picture is drawn again as the run goes on, while this kernel is free, until the run has
    ended: for a second notebook beside the one that trains.
    Points are steps; from 21 steps on a line shows their centred moving mean. Red flags are numbered lines where they
    began, with the words under the chart.
    Raises RunFolderError (a ValueError) if a folder does not exist.

    >>> plot_run("runs/full", compare="runs/lora").savefig("both.png")
    """
    if follow and in_notebook():
        from grpo_kit.watch.follow import FollowedChart

        return FollowedChart(folder, lambda: plot_run(folder, compare=compare))
    others = [] if compare is None else [compare] if isinstance(compare, (str, Path)) else list(compare)
    folders = [Path(name) for name in (folder, *others)]
    names = [path.name for path in folders]
    labels = names if len(set(names)) == len(names) else [str(path) for path in folders]
    runs = {label: read_metrics(path) for label, path in zip(labels, folders, strict=True)}
    figure = draw(runs, flags={label: read_flags(path) for label, path in zip(labels, folders, strict=True)})
    return figure


def draw(
    runs: Mapping[str, pd.DataFrame],
    *,
    last_step: int | None = None,
    flags: Mapping[str, Sequence[Flag]] | None = None,
    words: bool = True,
) -> "Figure":
    """The chart of tables as `read_metrics` gives them, by label; x reaches `last_step` if given.

    Reward and its parts on top, below them 6 small panels, or 8 where a run has a KL. flags: red flags by label, each
    a numbered line where it began; words: what each of them saw, under the panels.
    """
    kl = any("kl" in table and table["kl"].notna().any() for table in runs.values())
    shares = [(name,) for name in _SHARES] if kl else [_SHARES]
    small = [("completion_length",), *shares, ("entropy",), *([("kl",)] * kl), ("grad_norm",)]
    small += [("temperature",), ("learning_rate",)]
    parts = list(dict.fromkeys(n for table in runs.values() for n in table if str(n).startswith("reward/")))
    marks = [(label, flag) for label, found in (flags or {}).items() for flag in found if label in runs]
    below = 0.2 * len(marks) * words  # inches for the words
    height = 6.6 + below
    up = lambda y: (6.6 * y + below) / height  # noqa: E731
    figure = new_figure(11, height, dpi=130, layout=None)
    columns = len(small) // 2
    sides = {"left": 0.045, "right": 0.99, "wspace": 0.06 * columns}
    top = figure.add_gridspec(1, 2, top=up(0.945), bottom=up(0.63), **(sides | {"wspace": 0.1}))
    rest = figure.add_gridspec(2, columns, top=up(0.545), bottom=up(0.07), hspace=0.42, **sides)
    end = max([last_step or 0, 1, *(table["step"].max() for table in runs.values() if len(table))])
    for number, (place, names) in enumerate(zip([*top, *rest], [("reward",), parts, *small], strict=True)):
        axes = figure.add_subplot(place)
        _panel(axes, names, runs)
        axes.set_xlim(0, end * 1.01)
        if number >= 2 + columns:
            axes.set_xlabel("step", fontsize=8, color=GREY, labelpad=2)
        _mark(axes, marks, numbers=number == 0)
    for n, (label, flag) in enumerate(marks if words else [], 1):
        run = f" ({label})" if len(runs) > 1 else ""
        line = f"{n}  {flag.name}{run} since step {flag.step}: {flag.saw}"
        figure.text(0.045, (below - 0.2 * n + 0.04) / height, _cut(line), fontsize=8.5, color=RED)
    return figure


def _mark(axes: "Axes", marks: Sequence[tuple[str, Flag]], *, numbers: bool) -> None:
    """A line where each flag began; in one panel with its number, side by side where several began together."""
    taken: dict[int, list[str]] = {}
    for n, (_, flag) in enumerate(marks, 1):
        taken.setdefault(flag.step, []).append(str(n))
    for step, names in taken.items():
        axes.axvline(step, color=RED, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        if numbers:
            place = axes.get_xaxis_transform()
            axes.text(step, 0.98, " " + ",".join(names), color=RED, fontsize=8.5, transform=place, va="top")


def _cut(line: str) -> str:
    return line if len(line) <= 170 else line[:169] + "…"


def _panel(axes: "Axes", names: Sequence[str], runs: Mapping[str, pd.DataFrame]) -> None:
    from matplotlib.lines import Line2D

    alone = len(runs) == 1
    highest = 1.0
    for r, table in enumerate(runs.values()):
        for n, name in enumerate(names):
            if name in table and table[name].notna().any():
                _line(
                    axes, table, name, COLOURS[(n if alone else r) % len(COLOURS)], _STYLES[n % len(_STYLES)]
                )
                highest = max(highest, table[name].max())
    keys: list[Line2D] = []
    if len(names) > 1:
        for n, name in enumerate(names):
            look = {
                "color": COLOURS[n % len(COLOURS)] if alone else GREY,
                "linestyle": _STYLES[n % len(_STYLES)],
            }
            keys.append(Line2D([], [], label=_WORDS.get(name, name.removeprefix("reward/")), **look))
    elif names and names[0] == "reward" and not alone:
        keys = [Line2D([], [], label=label, color=COLOURS[r % len(COLOURS)]) for r, label in enumerate(runs)]
    parts = bool(names) and names[0].startswith("reward/")
    title = "reward parts" if parts or not names else _WORDS.get(names[0], names[0])
    titled = len(names) < 2 or parts  # two shares: their legend is the title
    if titled:
        axes.set_title(title, loc="left", fontsize=9.5, color="#111111", pad=5)
    if keys:
        side = ("lower right", (1.0, 0.99)) if titled else ("lower left", (-0.03, 0.99))
        axes.legend(
            handles=keys, loc=side[0], bbox_to_anchor=side[1], ncols=4, frameon=False, fontsize=8.5,
            borderaxespad=0, handlelength=1.8, columnspacing=1.2,
        )  # fmt: skip
    if not names or names[0].startswith("reward") or names[0] in _SHARES:
        axes.set_ylim(-0.03, highest * 1.03)  # rewards and shares lie in [0, 1]
    elif axes.lines and axes.dataLim.ymin >= 0:
        axes.set_ylim(0, axes.dataLim.ymax * 1.08 or 1)
    axes.yaxis.set_major_formatter(_short)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(labelsize=8, color="#999999", labelcolor=GREY, length=3)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def _short(value: float, _place: int | None = None) -> str:
    """0.25, 1.5e-4"""
    if value and abs(value) < 1e-3:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits}e{int(power)}"
    return f"{value:g}"


def _line(axes: "Axes", table: pd.DataFrame, name: str, colour: str, style: object) -> None:
    """Up to 20 steps the values themselves; from there on pale points under their centred moving mean."""
    table = table[table[name].notna()]
    steps, values = table["step"].to_numpy(), table[name].astype(float)
    spread = (
        table["reward_std"].astype(float).fillna(0) if name == "reward" and "reward_std" in table else None
    )
    if len(table) > 20 and values.nunique() > 1 and name not in ("temperature", "learning_rate"):
        axes.plot(steps, values, ".", color=colour, alpha=0.4, markersize=4, markeredgewidth=0)
        window = max(5, len(table) // 12) | 1
        values = values.rolling(window, center=True, min_periods=1).mean()
        spread = spread if spread is None else spread.rolling(window, center=True, min_periods=1).mean()
        marker = ""
    else:
        marker = "o" if len(table) <= 20 else ""
    axes.plot(steps, values, color=colour, linestyle=style, linewidth=1.8, marker=marker, markersize=3)
    if spread is not None:
        low, high = (values - spread).clip(lower=0), (values + spread).clip(upper=max(1.0, values.max()))
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
