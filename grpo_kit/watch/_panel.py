"""What stands around the live chart: progress line, red flags, and buttons that send requests to a running trainer.

The buttons pause, stop, save, or set a new rate or temperature. They are buttons of the page, not widgets. Each writes
a request into the run's folder through the Jupyter server, like kit.control from a terminal, without the kernel. The
page asks the server whether that kernel is still busy. A page that was opened again, which the kernel's output does not
reach, reads the chart from that folder. So all of it works while the kernel is busy, after a reload, and with any
ipykernel. The run must lie below the folder in which the server was started.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_kit._support.display import BADGE, escape
from grpo_kit._support.kernel import in_notebook
from grpo_kit.record._run_folder import path_of
from grpo_kit.record.files import CONTROL
from grpo_kit.watch._completions import box
from grpo_kit.watch._red_flag import Flag
from grpo_kit.watch._svg import WIDTH

# in the run's control folder, while it trains: chart and progress line for a page opened again
LIVE = "live.txt"
# Shown if no script runs, or no Jupyter server is behind the page: VS Code, Colab, a notebook not trusted.
_INSTEAD = (
    "To steer this run, in another notebook or a terminal's Python: "
    "<code>import grpo_kit as kit; kit.control({folder}).pause()</code>, <code>.go_on()</code>, "
    "<code>.stop()</code>, <code>.save()</code>, <code>.change(learning_rate=5e-6, temperature=0.9)</code>"
)
_SCRIPT = Path(__file__).with_name("panel.js")


def panel_row(folder: str | Path, name: str, values: Mapping[str, str]) -> dict[str, str]:
    """The row of buttons as a notebook's display data: Pause / Go on, Stop, Save now, learning rate and temperature.

    name: of this panel in the page, one word. values: what the empty fields show, by panel_values. A click writes a
    file into the run's folder control/, which the trainer reads between two steps. If no button is possible the row
    shows the code to type instead.
    """
    control = path_of(folder) / CONTROL
    run = repr(control.parent.absolute().as_posix())
    paths = [path.as_posix() for path in dict.fromkeys([control.absolute(), control.resolve()])]
    arguments = json.dumps([name, paths, _kernel_id(), str(folder), values]).replace(
        "<", "\\u003c"
    )
    script = (
        _SCRIPT.read_text(encoding="utf-8")
        .replace("LIVE", LIVE)
        .replace("ARGUMENTS", arguments)
    )
    instead = _INSTEAD.format(folder=escape(run, len(run)))
    page = f'<div data-kit-panel="{name}" style="line-height:1.5">{instead}</div><script>{script}</script>'
    return {"text/plain": f"kit.control({run}) steers this run", "text/html": page}


def panel_status(text: str, name: str) -> dict[str, str]:
    """The line under the buttons: how the trainer handled a request."""
    page = f'<div data-kit-status="{name}" role="status" style="min-height:1.5em">{escape(text)}</div>'
    return {"text/plain": text, "text/html": page}


def panel_values(row: Mapping[str, Any]) -> dict[str, str]:
    """What the empty fields show: a step's learning rate and temperature."""
    return {
        key: f"{row[key]:.3g}"
        for key in ("learning_rate", "temperature")
        if row.get(key) is not None
    }


def panel_update(values: Mapping[str, str], paused: bool, name: str) -> str:
    """A script that shows these values in the empty fields and "Go on" on the first button while the run is paused, and
    tells the page that the kernel's output reaches it.
    """
    return f'<script>window.kitPanels?.["{name}"]?.({json.dumps(values)}, {json.dumps(paused)})</script>'


def _kernel_id() -> str | None:
    """The name of this kernel at its Jupyter server; None outside a notebook and where no server began it."""
    if not in_notebook():
        return None
    kernel = sys.modules["IPython"].get_ipython().kernel
    file = getattr(getattr(kernel, "parent", None), "connection_file", "") or ""
    match = re.search(r"kernel-([0-9a-f-]{36})\.json$", file)
    return match[1] if match else None


def progress_page(
    step: int, total: int, words: Sequence[str], flag: str, measures: Sequence[str]
) -> str:
    """A bar and two lines: the step and present work, with a red flag if there is one, and the last step's measures.

    The second has room for two lines of a page, so that the chart below stays where it is.
    """
    first_line = [escape(word) for word in words]
    if flag:
        first_line.append(_badge("red flag") + escape(flag))
    bar = f'<progress value="{step}" max="{total}" style="width:100%;height:1em"></progress>'
    return (
        f'<div style="line-height:1.5;max-width:{WIDTH // 2}px">{bar}'
        f'<div style="min-height:1.5em">{" · ".join(first_line)}</div>'
        f'<div style="min-height:3em">{escape(" · ".join(measures))}</div></div>'
    )


def flags_page(flags: Sequence[Flag], *, scrolls: bool) -> str:
    """Each flag in a line that opens to its reason and remedy: the newest on top of three lines that scroll; or, in the
    end, all of them in order and open.
    """
    is_open = "" if scrolls else " open"
    lines = []
    for number, flag in enumerate(flags, 1):
        line = _badge(f"red flag {number}") + escape(flag.brief, 600)
        remedy = escape(f"{flag.why} First try: {flag.first}", 600)
        lines.append(
            f'<details{is_open}><summary style="cursor:pointer">{line}</summary>{remedy}</details>'
        )
    if scrolls:
        lines.reverse()
    return box(
        "".join(lines) or "No red flag.", "4.3em", scrolls=scrolls, look="line-height:1.4;"
    )


def _badge(text: str) -> str:
    """Highlighted text in front of a sentence, as HTML."""
    return f'<span style="{BADGE}">{escape(text)}</span> '
