"""The chart of a run: reward, its parts and the other measures of a step; drawn live or from the run folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from grpo_kit.display import COLOURS, GREY, RED, cut, in_notebook, new_figure
from grpo_kit.record.files import read_metrics
from grpo_kit.watch.curves import (
    ACCURACY,
    ACCURACY_HIGH,
    ACCURACY_LOW,
    EPISODES,
    ROUGH,
    Change,
    accuracy_word,
    changes_of,
    labels,
    letter,
    moving_mean,
    part_names,
    part_word,
    parts_title,
    range_of_rows,
    reward_title,
    window_of,
)
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.monitor import read_flags

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from grpo_kit.watch.follow import FollowedChart

_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_SHARES = ("completion_cut_off", "frac_reward_zero_std")
_WORDS = {
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
    """The live chart redrawn from its folder, also while the run writes it.

    compare: one or more other run folders, drawn into the same panels in their own colours.
    follow: in a notebook the picture is redrawn while the run continues and this kernel is free, until the run has
    ended: for a second notebook beside the one that trains.
    Points are steps; from 21 steps on a line shows their centred moving mean. Black points with bars are held-out
    accuracy with its 95 % interval, if it was measured during training. Red flags are numbered lines at their first
    step, changes made during training dotted lines with a letter; both are explained under the chart.
    Raises RunFolderError (a ValueError) if a folder does not exist.

    >>> plot_run("runs/full", compare="runs/lora").savefig("both.png")
    """
    if follow and in_notebook():
        from grpo_kit.watch.follow import FollowedChart

        return FollowedChart(folder, lambda: plot_run(folder, compare=compare))
    others = [] if compare is None else [compare] if isinstance(compare, (str, Path)) else list(compare)
    folders = [Path(name) for name in (folder, *others)]
    names = [path.name for path in folders]
    found = dict(zip(names if len(set(names)) == len(names) else map(str, folders), folders, strict=True))
    runs = {label: read_metrics(path) for label, path in found.items()}
    flags = {label: read_flags(path) for label, path in found.items()}
    return draw(runs, flags=flags, changes={label: changes_of(path) for label, path in found.items()})


def draw(
    runs: Mapping[str, pd.DataFrame],
    *,
    last_step: int | None = None,
    flags: Mapping[str, Sequence[Flag]] | None = None,
    changes: Mapping[str, Sequence[Change]] | None = None,
    words: bool = True,
) -> "Figure":
    """The chart of tables from `read_metrics`, by label; x reaches `last_step` if given.

    Reward and its parts on top, below them 6 small panels, or 8 if a run has a KL. The labels stand above (none for
    a label that is empty). flags: red flags by label, each a numbered line at its first step; changes: (step, text) by
    label, each a dotted line with a letter. Text under the panels lists the changes and the findings of each flag.
    """
    kl = any("kl" in table and table["kl"].notna().any() for table in runs.values())
    shares = [(name,) for name in _SHARES] if kl else [_SHARES]
    small = [("completion_length",), *shares, ("entropy",), *([("kl",)] * kl), ("grad_norm",)]
    small += [("temperature",), ("learning_rate",)]
    parts = part_names(n for table in runs.values() for n in table)
    numbers = [(flag.step, str(n)) for n, (_, flag) in enumerate(_of(flags, runs), 1)]
    letters = [(step, letter(n)) for n, (_, (step, _)) in enumerate(_of(changes, runs))]
    told = _told(runs, flags if words else None, changes)
    rows = max(
        len(_key_rows(_part_keys(parts, len(runs) == 1))), int(any(_measured(t) for t in runs.values()))
    )
    above = 0.19 * max(0, rows - 1) + 0.25 * any(runs)  # inches for legends, and for the runs' names
    below = 0.2 * len(told)
    height = 6.7 + above + below
    up = lambda inches: (inches + below) / height  # noqa: E731
    figure = new_figure(11, height, dpi=130, layout=None)
    columns = len(small) // 2
    sides = {"left": 0.045, "right": 0.99, "wspace": 0.06 * columns}
    top = figure.add_gridspec(1, 2, top=up(6.15), bottom=up(4.16), **(sides | {"wspace": 0.1}))
    rest = figure.add_gridspec(2, columns, top=up(3.6), bottom=up(0.46), hspace=0.42, **sides)
    end = max([last_step or 0, 1, *(table["step"].max() for table in runs.values() if len(table))])
    for number, (place, names) in enumerate(zip([*top, *rest], [("reward",), parts, *small], strict=True)):
        axes = figure.add_subplot(place)
        axes.set_xlim(0, end * 1.01)
        _panel(axes, names, runs, header=rows if number < 2 else 0)
        if number >= 2 + columns:
            axes.set_xlabel("step", fontsize=8, color=GREY, labelpad=2)
        _mark(axes, numbers, RED, (0, (2, 2)), "top", named=number == 0)
        _mark(axes, letters, "#777777", (0, (1, 2)), "bottom", named=number == 0)
    if any(runs):
        keys = [_key(label, COLOURS[r % len(COLOURS)], "-") for r, label in enumerate(runs)]
        figure.legend(
            handles=keys, handlelength=0 if len(runs) == 1 else 1.8, loc="upper left", ncols=4, frameon=False,
            bbox_to_anchor=(0.025 if len(runs) == 1 else 0.035, 1.0), fontsize=9.5,
        )  # fmt: skip
    for n, (line, colour) in enumerate(told, 1):
        figure.text(0.045, (below - 0.2 * n + 0.04) / height, cut(line, 170), fontsize=8.5, color=colour)
    return figure


def _of(
    found: Mapping[str, Sequence] | None, runs: Mapping[str, pd.DataFrame]
) -> list[tuple[str, "Flag | Change"]]:
    """Of the drawn runs: (label, one of the findings)."""
    return [(label, one) for label, several in (found or {}).items() for one in several if label in runs]


def _told(
    runs: Mapping[str, pd.DataFrame],
    flags: Mapping[str, Sequence[Flag]] | None,
    changes: Mapping[str, Sequence[Change]] | None,
) -> list[tuple[str, str]]:
    """The lines under the panels with their colours."""
    run = lambda label: f" ({label})" if len(runs) > 1 else ""  # noqa: E731
    told = [
        (f"{n}  {flag.name}{run(label)} since step {flag.step}: {flag.saw}", RED)
        for n, (label, flag) in enumerate(_of(flags, runs), 1)
    ]
    return told + [
        (f"{letter(n)}  from step {step}{run(label)}: {text}", GREY)
        for n, (label, (step, text)) in enumerate(_of(changes, runs))
    ]


def _mark(
    axes: "Axes", marks: Sequence[tuple[int, str]], colour: str, style: object, side: str, *, named: bool
) -> None:
    """Draws a line at the first step of each flag or change; in one panel with its name."""
    for step in {step for step, _ in marks}:
        axes.axvline(step, color=colour, linewidth=1, linestyle=style, zorder=1)
    for step, names in labels(marks, letter=0.016 * axes.get_xlim()[1]) if named else ():
        place, y = axes.get_xaxis_transform(), {"top": 0.98, "bottom": 0.02}[side]
        axes.text(step, y, f" {names}", color=colour, fontsize=8.5, transform=place, va=side)


def _measured(table: pd.DataFrame) -> bool:
    return ACCURACY in table and bool(table[ACCURACY].notna().any())


def _key(label: str, colour: str, style: object, **look: object) -> "Line2D":
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, color=colour, linestyle=style, **look)


def _part_keys(names: Sequence[str], alone: bool) -> list[tuple[str, str, object]]:
    """Name, colour and line of several measures in one panel."""
    return [
        (
            cut(_WORDS.get(name, part_word(name)), 30),
            COLOURS[n % len(COLOURS)] if alone else GREY,
            _STYLES[n % len(_STYLES)],
        )
        for n, name in enumerate(names)
    ]


def _key_rows(
    keys: Sequence[tuple[str, str, object]], letters: int = 84
) -> list[list[tuple[str, str, object]]]:
    """Rows of a legend that is so many letters wide."""
    rows: list[list[tuple[str, str, object]]] = []
    room = 0
    for key in keys:
        needs = len(key[0]) + 9
        if needs > room:
            rows.append([])
            room = letters
        rows[-1].append(key)
        room -= needs
    return rows


def _panel(axes: "Axes", names: Sequence[str], runs: Mapping[str, pd.DataFrame], *, header: int) -> None:
    """Lines of these measures. header: for the two main panels, rows of legend between title and panel."""
    from matplotlib.ticker import MaxNLocator

    alone = len(runs) == 1
    ends = lowest, highest = range_of_rows(names, *runs.values())
    for r, table in enumerate(runs.values()):
        for n, name in enumerate(names):
            if name in table and table[name].notna().any():
                colour = COLOURS[(n if alone else r) % len(COLOURS)]
                _line(axes, table, name, colour, _STYLES[n % len(_STYLES)], ends)
        if tuple(names) == ("reward",) and _measured(table):
            _accuracy(axes, table, "#000000" if alone else COLOURS[r % len(COLOURS)], ends)
    keys = _part_keys(names, alone) if len(names) > 1 or header > 0 and tuple(names) != ("reward",) else []
    rows = [[_key(*key) for key in row] for row in _key_rows(keys)]
    if tuple(names) == ("reward",) and any(map(_measured, runs.values())):
        look = {"marker": "o", "markersize": 3.5}
        word = accuracy_word(*ends, *runs.values()) if alone else accuracy_word(*ends)
        rows = [[_key(word, "#000000" if alone else GREY, "", **look)]]
    parts = parts_title(names)
    rewards = [table["reward"].to_numpy(float) for table in runs.values() if "reward" in table]
    title = parts or (reward_title(rewards) if names[0] == "reward" else _WORDS.get(names[0], names[0]))
    if len(names) < 2 or parts:  # two shares: their legend is the title
        axes.set_title(title, loc="left", fontsize=9.5, color="#111111", pad=5 + 13.5 * header)
    for n, row in enumerate(rows):
        legend = axes.legend(
            handles=row, loc="lower left", ncols=len(row), frameon=False, fontsize=8.5, borderpad=0,
            bbox_to_anchor=(-0.002, 1.0), bbox_transform=_above(axes, 2 + 13.5 * max(0, header - 1 - n)),
            borderaxespad=0.2, handlelength=1.8, columnspacing=1.4,
        )  # fmt: skip
        if n < len(rows) - 1:
            axes.add_artist(legend)
    if not names or names[0].startswith("reward") or names[0] in (*_SHARES, *EPISODES):
        axes.set_ylim(lowest - 0.03 * (highest - lowest), highest + 0.03 * (highest - lowest))
    elif axes.lines and axes.dataLim.ymin >= 0:
        axes.set_ylim(0, axes.dataLim.ymax * 1.08 or 1)
    axes.yaxis.set_major_formatter(_short)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(labelsize=8, color="#999999", labelcolor=GREY, length=3)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def _above(axes: "Axes", points: float) -> object:
    """The panel's own coordinates, so many points higher."""
    from matplotlib.transforms import ScaledTranslation

    return axes.transAxes + ScaledTranslation(0, points / 72, axes.figure.dpi_scale_trans)


def _short(value: float, _place: int | None = None) -> str:
    """0.25, 1.5e-4"""
    if value and abs(value) < 1e-3:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits}e{int(power)}"
    return f"{value:g}"


def _line(axes: "Axes", table: pd.DataFrame, name: str, colour: str, style: object, ends: tuple) -> None:
    """Up to 20 steps the values themselves; from 21 steps on pale points under their centred moving mean."""
    table = table[np.isfinite(table[name].astype(float))]
    if not len(table):
        return
    steps, values = table["step"].to_numpy(), table[name].to_numpy(float)
    window = 1 if name in ("temperature", "learning_rate") else window_of(values)
    if window > 1:
        axes.plot(steps, values, ".", color=colour, alpha=0.4, markersize=4, markeredgewidth=0)
        values = moving_mean(values, window)
    marker = "o" if len(table) <= ROUGH else ""
    axes.plot(steps, values, color=colour, linestyle=style, linewidth=1.8, marker=marker, markersize=3)
    if name == "reward" and "reward_std" in table:
        spread = moving_mean(table["reward_std"].astype(float).fillna(0).to_numpy(), window)
        low, high = np.maximum(values - spread, ends[0]), np.minimum(values + spread, ends[1])
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _accuracy(axes: "Axes", table: pd.DataFrame, colour: str, ends: tuple) -> None:
    """Held-out accuracy at its steps, with its interval; drawn from one end of the reward's scale to the other."""
    table = table[table[ACCURACY].notna()]
    middle = table[ACCURACY].to_numpy(float)
    shares = [
        (table[name] if name in table else table[ACCURACY]).fillna(table[ACCURACY]).to_numpy(float)
        for name in (ACCURACY_LOW, ACCURACY_HIGH)
    ]
    middle, low, high = (ends[0] + (ends[1] - ends[0]) * share for share in (middle, *shares))
    reach, look = np.abs([middle - low, high - middle]), {"markersize": 3.5, "elinewidth": 1.2, "zorder": 4}
    drawn = axes.errorbar(table["step"], middle, yerr=reach, fmt="o", color=colour, **look)
    for part in drawn.get_children():
        part.set_clip_on(False)  # the point before step 1 lies on the axis
