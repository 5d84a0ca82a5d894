"""The drawing of a run as SVG text: reward, accuracy, parts, six or eight small panels, red flags and changes.

A pure function of what the runs have shown, without matplotlib, quick enough to be drawn at every step, and at most
about 25 KB for a run of any length. Lengths are half pixels: whole numbers, hence short, and fine enough for a smooth
line. It has no ground. In a page that is drawn anew (full=False) its words have the page's colour; as a file or PNG a
grey that can be read on white and on dark.

Longer than 300 lines because all panels are drawn by the same measures and helpers.
"""

import html
import string
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_kit._support.display import COLOURS, GREY, RED, cut
from grpo_kit.watch._red_flag import ACCURACY, Flag, range_of_rows, scale_columns
from grpo_kit.watch._run_state import RunState
from grpo_kit.watch._svg_axes import (
    AXIS,
    HELD_OUT,
    INK,
    LETTER,
    ROW,
    SIZE,
    TITLE,
    Axes,
    Columns,
    Marks,
    dashes,
    no_better_rows,
    window_of,
)

# half pixels: of one run without a name and with one line of words below
WIDTH, HEIGHT = 1920, 1004
_LEFT, _GAP, _RIGHT = 104, 114, 16
# Heights: of the runs' names, of the row of main panels, of a row of small ones, of a line below.
_NAMES, _MAIN, _SMALL, _LINE = 52, 490, 228, 44
_WITH_ACCURACY = 700, 264, 608  # widths of reward, held-out accuracy and parts
_LETTERS = int((WIDTH - _LEFT - _RIGHT) / LETTER)  # of a line
_POINTS, _FEW = 600, 60  # in all lines of the main panels together; in a line of a small one
_MARKS = 20  # most changes of a run that are marked, the last ones
_SHARES = ["completion_cut_off", "frac_reward_zero_std"]
_EPISODES = {
    "episodes/success": "success",
    "episodes/invalid": "invalid actions",
    "episodes/unfinished": "not ended",
}
_WORDS = {
    "completion_length": "completion length, tokens",
    "completion_cut_off": "cut off",
    "frac_reward_zero_std": "groups without a signal",
    "entropy": "entropy, nats a token",
    "kl": "KL to the reference",
    "grad_norm": "gradient norm",
    "temperature": "temperature",
    "learning_rate": "learning rate",
}


Runs = Mapping[str, RunState]  # by their names


@dataclass
class _Panel:
    """The measures of a panel, its title, its width, and its legend with the number of its rows."""

    measures: list[str]
    title: str
    width: int
    legend: str = ""
    legend_rows: int = 0


def draw_svg(runs: Runs, *, last_step: int = 0, full: bool = True) -> str:
    """The drawing of runs by their names, 960 pixels wide; a single run may have the name "".

    x reaches `last_step`, or further if a run does. Up to 20 steps a line goes through the values. From 21 steps on
    pale dots are values, the highest and lowest among them, and the line is their moving mean. Points with bars are
    held-out accuracy with its 95 % interval, on an axis of its own, pale where it is no better than the best constant
    strategy's. Red flags are numbered lines at their first step, changes dotted lines with a letter.
    full: every flag and change has a line below. Otherwise one line of fixed height has the last changes.

    >>> draw_svg({"": RunState({1: {"step": 1, "reward": 0.5}})}, last_step=2).startswith("<svg")
    True
    """
    parts = part_names(
        name for run in runs.values() for row in run.rows.values() for name in row
    )
    tables = {label: _columns(run, parts) for label, run in runs.items()}
    end = max([last_step, 1, *(run.step for run in runs.values())])
    page = _Page(tables, end, _marks(runs))
    measures = [name for name in parts if page.is_measured(name)]
    main = page.main_panels(measures, parts)
    small = page.small_panels()
    middle = len(small) // 2
    head = TITLE + ROW * max(panel.legend_rows for panel in main) + 30
    points = max(20, _POINTS // (len(runs) * (4 + 2 * len(measures))))

    elements = []
    y = 0
    if any(runs):
        elements.append(_run_names(runs))
        y = _NAMES
    elements += page.row(main, y, _MAIN, head, points)
    elements += page.row(small[:middle], y + _MAIN, _SMALL, TITLE, _FEW)
    elements += page.row(small[middle:], y + _MAIN + _SMALL, _SMALL, TITLE, _FEW)
    bottom = y + _MAIN + 2 * _SMALL
    lines = _lines_below(runs) if full else [(_last_changes(runs), INK)]
    for number, (line, colour) in enumerate(lines, 1):
        y = bottom + _LINE * number
        elements.append(f'<text x="{_LEFT}" y="{y}" fill="{colour}">{html.escape(line)}</text>')
    height = bottom + _LINE * max(1, len(lines)) + 14
    ink = f' color="{GREY}"' if full else ""
    # JupyterLab shows it as an <img> of its own width: in pixels, it would be cut off where the page is narrower.
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" '
        f'style="display:block;max-width:{WIDTH // 2}px;height:auto" '
        f'font-family="sans-serif" font-size="{SIZE}" fill="{INK}"{ink}>{"".join(elements)}</svg>'
    )


def part_names(columns: Iterable[str]) -> list[str]:
    """The second panel's measures: the parts of the reward; for episodes, whose reward has one, their outcomes.

    >>> part_names(["step", "reward", "reward/exact", "reward/format"])
    ['reward/exact', 'reward/format']
    >>> part_names(["reward/episode_return", "episodes/success", "episodes/turns"])
    ['episodes/success']
    """
    names = list(dict.fromkeys(map(str, columns)))
    outcomes = [name for name in _EPISODES if name in names]
    return outcomes or [name for name in names if name.startswith("reward/")]


def _columns(run: RunState, parts: Sequence[str]) -> Columns:
    """A run's measures by name, NaN where there is none."""
    rows = [run.rows[step] for step in sorted(run.rows)]
    names = ["step", "reward_std", *HELD_OUT, *_WORDS]
    for measure in ("reward", *parts):
        names += [measure, *scale_columns(measure)]
    # None becomes NaN.
    return {name: np.array([row.get(name) for row in rows], dtype=float) for name in names}


def _width(columns: int) -> int:
    return (WIDTH - _LEFT - _RIGHT - _GAP * (columns - 1)) // columns


class _Page:
    """The runs on their common scale of steps, and what is marked on it."""

    def __init__(self, tables: Mapping[str, Columns], end: int, marks: list[Marks]) -> None:
        self.tables = tables
        self.end = end
        self.marks = marks
        self.is_alone = len(tables) == 1

    def main_panels(self, measures: list[str], parts: list[str]) -> list[_Panel]:
        """Reward, held-out accuracy if it was measured, and parts."""
        title = "reward parts" if _EPISODES.keys().isdisjoint(parts) else "episodes"
        without = _width(2), 0, _width(2)
        reward, accuracy, last = _WITH_ACCURACY if self.is_measured(ACCURACY) else without
        is_pale = any(no_better_rows(table).any() for table in self.tables.values())
        words = [("", "pale: no better"), ("", "than a constant")] if is_pale else []
        panels = [
            _Panel(["reward"], "reward", reward, *_legend(self._reward_words(), reward)),
            _Panel([ACCURACY], "held-out accuracy", accuracy, *_legend(words, accuracy)),
            _Panel(measures, title, last, *self._legend(measures, last)),
        ]
        return [panel for panel in panels if panel.width]

    def small_panels(self) -> list[_Panel]:
        """The other measures: six panels, or eight if a run has a KL."""
        if self.is_measured("kl"):
            return [_Panel([name], title, _width(4)) for name, title in _WORDS.items()]
        names = ["completion_length", "entropy", "grad_norm", "temperature", "learning_rate"]
        panels = [_Panel([name], _WORDS[name], _width(3)) for name in names]
        # The legend stands in the title's place.
        panels.insert(1, _Panel(_SHARES, "", _width(3), *self._legend(_SHARES, WIDTH)))
        return panels

    def row(
        self, panels: list[_Panel], y: int, height: int, head: int, points: int
    ) -> list[str]:
        """Panels side by side. head: the height of the words over the lines. points: the most in a line."""
        elements = []
        x = _LEFT
        for panel in panels:
            axes = Axes(
                x,
                y,
                head,
                panel.width,
                height - head - AXIS,
                self.end,
                self._scale(panel.measures),
            )
            elements.append(self._panel(panel, axes, points))
            x += panel.width + _GAP
        return elements

    def _panel(self, panel: _Panel, axes: Axes, points: int) -> str:
        """A panel's frame, marks and lines."""
        elements = [axes.frame(panel.title, panel.legend)]
        for marks in self.marks:
            if marks.places:
                elements.append(axes.marks(marks, named=panel.measures == ["reward"]))
        for run, table in enumerate(self.tables.values()):
            if panel.measures == [ACCURACY]:
                elements.append(axes.accuracy(table, INK if self.is_alone else _colour(run)))
                continue
            for place, name in enumerate(panel.measures):
                elements.append(axes.line(table, name, self._colour(run, place), place, points))
        return f"<g>{''.join(elements)}</g>"

    def _colour(self, run: int, place: int) -> str:
        """Of a run's measure in this place of a panel: among several runs a colour is a run's."""
        return _colour(place if self.is_alone else run)

    def is_measured(self, name: str) -> bool:
        return any(np.isfinite(table[name]).any() for table in self.tables.values())

    def _legend(self, names: list[str], width: int) -> tuple[str, int]:
        """Lines and names of several measures in one panel; among several runs a colour is a run's."""
        words = _EPISODES | _WORDS
        keys = []
        for place, name in enumerate(names):
            colour = _colour(place) if self.is_alone else INK
            keys.append((_key(colour, place), words.get(name, name.removeprefix("reward/"))))
        return _legend(keys, width)

    def _scale(self, names: Sequence[str]) -> tuple[float, float]:
        """Lowest and highest value: of rewards and shares their range, of other measures from 0 to the highest."""
        if names == [ACCURACY]:
            return 0.0, 1.0
        if not names or names[0].startswith(("reward", "episodes/")) or names[0] in _SHARES:
            return range_of_rows(names, *self.tables.values())
        values = np.concatenate(
            [table[name] for table in self.tables.values() for name in names]
        )
        values = values[np.isfinite(values)]
        return float(values.min(initial=0.0)), float(values.max(initial=0.0)) or 1.0

    def _reward_words(self) -> list[tuple[str, str]]:
        """A legend that explains the band, and the lines if they are moving means."""
        rewards = [table["reward"] for table in self.tables.values()]
        window = max((window_of(values[np.isfinite(values)]) for values in rewards), default=1)
        words = [("", "band: ± reward_std")]
        if window > 1:
            words.append(("", f"lines: means of {window} steps"))
        return words


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _key(colour: str, dash: int = 0) -> str:
    return f'<path stroke="{colour}" stroke-width="4"{dashes(dash)} d="M0-7h36"/>'


def _run_names(runs: Runs) -> str:
    """The names of the runs, in one line above the panels; of several runs with their colours."""
    keys = []
    for number, label in enumerate(runs):
        name = label if len(label) <= 60 else f"…{label[-59:]}"  # a path differs at its end
        key = _key(_colour(number)) if len(runs) > 1 else ""
        keys.append((key, name))
    return f'<g transform="translate({_LEFT} 10)">{_legend(keys, WIDTH - _LEFT, 60)[0]}</g>'


def _legend(entries: Sequence[tuple[str, str]], width: int, most: int = 30) -> tuple[str, int]:
    """Keys with their names of at most so many letters, in as many rows as needed, at most 3; the number of rows."""
    elements = []
    x = 0.0
    row = 1
    for place, (key, name) in enumerate(entries):
        name = cut(name, most)
        entry_width = 46 + LETTER * len(name) + 20
        room = width
        if place < len(entries) - 1:  # for the number of those left out
            room -= 215
        if row < 3 and x and x + entry_width > width + 20:
            x = 0.0
            row += 1
        if row == 3 and x + entry_width > room:
            elements.append(_entry("", f"and {len(entries) - place} more", x - 46, row))
            break
        elements.append(_entry(key, name, x if key else x - 46, row))
        x += entry_width
    return "".join(elements), row if entries else 0


def _entry(key: str, name: str, x: float, row: int) -> str:
    place = f"translate({x:.0f} {ROW * row - 8})"
    return f'<g transform="{place}">{key}<text x="46">{html.escape(name)}</text></g>'


def _flags(runs: Runs) -> list[tuple[str, str, Flag]]:
    """(number, run, flag) of each red flag."""
    flags = [(label, flag) for label, run in runs.items() for flag in run.flags]
    return [(str(number), *entry) for number, entry in enumerate(flags, 1)]


def _changes(runs: Runs) -> list[tuple[str, str, int, str]]:
    """(letter, run, first step, text) of each change."""
    changes = [(label, *change) for label, run in runs.items() for change in run.changes]
    return [(_letter(number), *entry) for number, entry in enumerate(changes)]


def _marks(runs: Runs) -> list[Marks]:
    """Changes by letter and flags by number."""
    letters = [(step, letter) for letter, _, step, _ in _changes(runs)][-_MARKS:]
    numbers = [(flag.step, number) for number, _, flag in _flags(runs)]
    return [Marks(letters, GREY, "2 6", on_top=False), Marks(numbers, RED, "8 8", on_top=True)]


def _lines_below(runs: Runs) -> list[tuple[str, str]]:
    """Lines with their colours: at most three for each flag, each change, and each run that was killed."""
    lines = []

    def add(text: str, colour: str) -> None:
        for line in textwrap.wrap(text, _LETTERS, max_lines=3, placeholder=" …"):
            lines.append((line, colour))

    names = {label: f" ({label})" if len(runs) > 1 else "" for label in runs}
    for run in runs.values():
        add(run.stopped, RED)
    for number, label, flag in _flags(runs):
        add(f"{number}  {flag.name}{names[label]} since step {flag.step}: {flag.saw}", RED)
    for letter, label, step, text in _changes(runs):
        add(f"{letter}  from step {step}{names[label]}: {text}", INK)
    return lines


def _last_changes(runs: Runs) -> str:
    """The last changes that fit in one line, oldest first."""
    texts = []
    room = _LETTERS
    for letter, _, step, text in reversed(_changes(runs)):
        words = f"{letter} from step {step}: {text}"
        if texts and len(words) + 3 > room:
            break
        texts.insert(0, cut(words, room))
        room -= len(texts[0]) + 3
    return " · ".join(texts)


def _letter(number: int) -> str:
    """The name of a change in the chart: a, b, ..., z, a2, b2, ...

    >>> _letter(0), _letter(27)
    ('a', 'b2')
    """
    letter = string.ascii_lowercase[number % 26]
    return letter if number < 26 else f"{letter}{number // 26 + 1}"
