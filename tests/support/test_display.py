"""The progress line: in one place, only where somebody can see it, and nothing empty left of it."""

import io
import json
import sys
import types

import nbclient
import nbformat
import numpy as np
import pandas as pd
import pytest
from made_metrics import Recorded
from PIL import Image

from grpo_kit.__main__ import main
from grpo_kit._support import display
from grpo_kit._support.display import (
    BADGE,
    BASE,
    COLOURS,
    CONSTANT,
    TUNED,
    Interrupted,
    ProgressLine,
    colours_of,
    diagram,
    duration,
    new_figure,
    progress_line,
)
from grpo_kit._support.kernel import visible
from grpo_kit.evaluation._shown import ShownTable, with_page
from grpo_kit.loop.processes import Stopped
from grpo_kit.more.episodes._conversations import conversation
from grpo_kit.more.export.chat import Chat
from grpo_kit.record.files import read_completions
from grpo_kit.rewards.scoring import RewardError, score
from grpo_kit.watch._completions import pages_of
from grpo_kit.watch.browse import browse
from grpo_kit.watch.terminal import follow


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when the test says so."""
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


def lines(screen):
    return [line.strip() for line in screen.getvalue().split("\r") if line.strip()]


def test_in_a_terminal_it_is_written_over_and_gone_at_the_end(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with progress_line("largest, completions", after=0) as progress:
        clock[0] += 0.2
        progress(0, 4)
        clock[0] += 9.8
        progress(1, 4)
        clock[0] += 30
        progress(4, 4)
    assert lines(screen) == [
        "largest, completions",
        "largest, completions: 0 of 4",
        "largest, completions: 1 of 4, 30 s left",
        "largest, completions: 4 of 4, 0 s left",
    ]
    ends = screen.getvalue().split("\r")
    assert len({len(line) for line in ends if line}) == 1  # each covers the one before
    assert ends[-2].isspace() and ends[-1] == ""


def test_what_was_there_before_does_not_count_as_quick_work(monkeypatch, clock):
    """6 of 10 files are read back at once; the seventh takes 5 s, so three more take 15 s."""
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with progress_line("x", after=0) as progress:
        for done in range(7):
            clock[0] += 0.05
            progress(done, 10)
        clock[0] += 5
        progress(7, 10)
        progress(8, 10)  # too soon to be written
    assert lines(screen)[-1] == "x: 7 of 10, 15 s left"


def test_a_line_inside_another_is_told_in_that_one(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setattr(ProgressLine, "OFTEN", 0)
    with progress_line("laboratory", after=0) as outer:
        outer.say("run 2 of 9", 1 / 9)
        with progress_line("largest", after=0) as inner:
            inner(64, 256)
        outer.say("run 3 of 9", 2 / 9)
    assert lines(screen) == [
        "laboratory",
        "laboratory: run 2 of 9",
        "laboratory: run 2 of 9 (largest: 64 of 256)",
        "laboratory: run 3 of 9",
    ]


def test_a_printed_line_does_not_run_into_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with progress_line("x", after=0) as progress:
        progress(1, 2)
        progress.print("run 1: 90 %")
        # nothing is left of the line when the text comes
        assert screen.getvalue().endswith(" \r")
    assert capsys.readouterr().out == "run 1: 90 %\n"


def test_no_notebook_while_another_thread_imports_ipython(monkeypatch):
    """A line that begins late comes from a thread, and meets the module before it is whole."""
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    assert not display.in_notebook()


def test_nothing_where_it_is_quick_or_goes_to_a_file(monkeypatch):
    for screen, after in ((Terminal(), 60), (io.StringIO(), 0)):
        monkeypatch.setattr(sys, "stderr", screen)
        with progress_line("x", after=after) as progress:
            progress(1, 2)
        assert screen.getvalue() == ""


def outputs(*cells):
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(made, timeout=120, allow_errors=True)
    return [cell.outputs for cell in client.execute().cells]


def test_in_a_notebook_one_line_is_left_that_says_what_was_done():
    _, quick, slow, stopped = outputs(
        "import time\nfrom grpo_kit._support.display import progress_line",
        "with progress_line('x') as progress:\n    progress(1, 2)",
        # Nothing is told before the work is done: the line comes all the same, from a thread.
        "with progress_line('largest', after=0.2) as progress:\n"
        "    time.sleep(1)\n    shown = progress._handle is not None\n    progress(256, 256)\nprint(shown)",
        "with progress_line('largest', after=0) as progress:\n    progress(64, 256)\n    1 / 0",
    )
    assert quick == []
    line, shown = slow
    assert shown["text"] == "True\n"
    assert (
        line["data"]["text/plain"] == "largest: 256 in 1 s"
        and "<progress" not in line["data"]["text/html"]
    )
    assert stopped[0]["data"]["text/plain"] == "largest: 64 of 256, stopped after 0 s"


def luminance(colour):
    """Of WCAG 2: relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, two):
    low, high = sorted([luminance(one), luminance(two)])
    return (high + 0.05) / (low + 0.05)


def test_the_badge_can_be_read_on_every_theme():
    assert (
        contrast("#000000", "#ffffff") == pytest.approx(21)
        and contrast("#B00020", "#111111") < 3
    )
    style = dict(item.split(":") for item in BADGE.split(";"))
    assert contrast(style["color"], style["background"]) >= 4.5
    # Why it has a ground of its own: no grey, and so no colour, is far enough from both pages.
    greys = [f"#{level:02x}{level:02x}{level:02x}" for level in range(256)]
    assert max(min(contrast(g, "#ffffff"), contrast(g, "#111111")) for g in greys) < 4.5


def test_what_is_compared_with_has_one_colour_everywhere():
    assert colours_of(["after", "before"]) == {"after": TUNED, "before": BASE}
    assert colours_of(["a", "b", "c"], base="b") == {
        "a": COLOURS[0],
        "b": BASE,
        "c": COLOURS[1],
    }
    assert colours_of(["control", "x"], base="x") == {"control": COLOURS[0], "x": BASE}, (
        "it is named"
    )
    assert BASE not in COLOURS and CONSTANT not in COLOURS


def test_durations():
    assert [duration(s) for s in (0.4, 59.6, 125, 3725)] == [
        "0 s",
        "1 min 0 s",
        "2 min 5 s",
        "1 h 2 min",
    ]


def test_a_diagram_is_read_on_light_and_dark_pages():
    boxes = {
        "a": (20, 15, 20, 10, "cost $1 and $2", BASE),
        "b": (80, 15, 20, 10, "reward", TUNED),
    }
    picture = Image.open(
        io.BytesIO(diagram(boxes, [("a", "b", "score")], height=2)._repr_png_())
    ).convert("RGBA")
    assert picture.size == (800, 200), "pixels"
    assert picture.getpixel((2, 2))[3] == 0, "no ground of its own"
    at = picture.getpixel((100, 60))  # inside the first box, above its text
    assert at[3] > 250 and contrast("#{:02x}{:02x}{:02x}".format(*at[:3]), "#000000") > 7
    line = picture.getpixel((300, 80))  # on the arrow: seen on both
    assert (
        line[3] > 250
        and min(
            contrast("#{:02x}{:02x}{:02x}".format(*line[:3]), page)
            for page in ("#ffffff", "#111111")
        )
        > 3
    )


def test_a_figure_has_no_ground_and_its_words_are_read_on_light_and_dark_pages(tmp_path):
    figure = new_figure(5, 3)
    axes = figure.add_subplot()
    axes.bar([1, 2], [3, 4], yerr=[1, 1], color=[BASE, TUNED])
    axes.set_title("a title")
    axes.axhline(2, color="black")
    pixels = np.asarray(Image.open(io.BytesIO(figure._repr_png_())).convert("RGBA")).reshape(
        -1, 4
    )
    assert pixels[0, 3] == 0 and (pixels[:, 3] == 0).mean() > 0.4
    drawn = pixels[pixels[:, 3] == 255][:, :3]
    assert drawn.max(axis=1).min() > 60 and drawn.min(axis=1).max() < 240, (
        "nothing is black, nothing is white"
    )
    figure.savefig(tmp_path / "saved.png", facecolor="white")
    assert Image.open(tmp_path / "saved.png").getpixel((2, 2))[:3] == (255, 255, 255)


STEERING = {
    "the window's title": "\x1b]0;owned\x07",
    "the clipboard": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "the cursor, up and back": "\x1b[2A\x1b[1G",
    "a C1 control": "\x9b31m",
    "a carriage return": "right\rwrong",
    "a backspace": "4\x084",
    "a bell and a NUL": "\x07\x00",
    "bidi override": "\u202e24\u202c",
    "bidi isolate": "\u2067x\u2069",
    "a line separator": "a\u2028b",
    "hidden tags": "a\U000e0041\U000e007f",
    "half a surrogate pair": "\ud83d",
    "a mark without width": "a\u200bb\ufeff",
}
STAYS = [
    "plain, 4 < 5",
    "two\nlines\tand a tab",
    "नमस्ते \u200d \u200c فارسی",
    "👩\u200d🔬 e\u0301 你好",
    "שלום",
]


def steers(text):
    return [
        letter
        for letter in text
        if not letter.isprintable() and letter not in "\n\t\u200c\u200d"
    ]


@pytest.mark.parametrize("what", STEERING)
def test_a_terminal_prints_what_would_steer_it(what):
    text = STEERING[what]
    assert steers(text) and not steers(visible(text)) and "\\" in visible(text)
    assert visible(text).encode()  # of any text there is something to write


@pytest.mark.parametrize("text", STAYS)
def test_harmless_text_stays_as_it_is(text):
    assert visible(text) == text


def printed_by_chat(text, tmp_path, capsys):
    class Talks:
        def respond(self, question, **how):
            if "?" not in question:
                raise ValueError(text)
            return text

    talk = Chat({"base": Talks(), "tuned": Talks()}, temperature=0, tokens=4, seed=0)
    talk.say("What?")
    return capsys.readouterr().out


def printed_by_browse(text, tmp_path, capsys):
    run = Recorded(tmp_path / "run")
    rows = {
        "step": [1] * 3,
        "group": [0] * 3,
        "prompt": ["?"] * 3,
        "completion": [text] * 3,
        "prefill": [""] * 3,
        "reward": [1.0, 0.5, 0.0],
    }
    run.write_completions(rows)
    table, recorded = browse(run.path), read_completions(run.path)
    picked, _ = pages_of(recorded).picks(recorded)
    return "\n".join(
        [table.to_string(), str(table["completion"]), table["response"].iloc[0], picked]
    )


def printed_by_an_episode(text, tmp_path, capsys):
    turn = {
        "group": 0,
        "episode": 0,
        "turn": 1,
        "reward": 1.0,
        "turn_reward": 0.0,
        "invalid": 0,
        "done": 1,
    }
    return conversation(
        [turn | dict.fromkeys(("prompt", "observation", "completion", "result"), text)]
    )


def printed_by_examples(text, tmp_path, capsys):
    words = pd.DataFrame({"completion": [text]}, dtype=object)
    return f"{with_page(words, '', text)!r}\n{ShownTable(words)!r}"


def printed_by_a_reward(text, tmp_path, capsys):
    def judge(completions, **columns):
        raise ValueError(f"cannot read {completions[0]}")

    with pytest.raises(RewardError) as raised:
        score(judge, [text])
    return "\n".join([str(raised.value), *raised.value._render_traceback_()])


def printed_by_watch(text, tmp_path, capsys):
    run = Recorded(tmp_path / "run")
    run.write_step({"step": 1, "reward": 0.5, "seconds": 1.0})
    flag = {"name": "hacking", "step": 1, "saw": text, "why": "w.", "first": "f"}
    (tmp_path / "run" / "flags.jsonl").write_text(json.dumps(flag) + "\n")
    follow(tmp_path / "run", once=True)
    return capsys.readouterr().out


def printed_by_a_command(text, tmp_path, capsys):
    assert main(["diagnose", str(tmp_path / text.replace("\0", "").replace("/", ""))]) == 2
    return capsys.readouterr().err


DOORS = [
    printed_by_chat, printed_by_browse, printed_by_an_episode, printed_by_examples, printed_by_a_reward,
    printed_by_watch, printed_by_a_command,
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_no_door_prints_it_raw(door, tmp_path, capsys):
    for number, (what, text) in enumerate(STEERING.items()):
        if what == "half a surrogate pair" and door in (
            printed_by_browse,
            printed_by_watch,
            printed_by_a_command,
        ):
            continue  # no file can hold one
        shown = door(text, tmp_path / str(number), capsys)
        assert not steers(shown), what
        assert any(mark in shown for mark in ("\\x", "\\u", "\\U", "\\r")), what


def test_an_interrupt_says_how_far_the_work_was_in_one_line():
    """In a notebook the message stands in place of the traceback; an inner line leaves it to the outer one."""
    with pytest.raises(
        Interrupted, match=r"^Interrupted after 128 of 256 \(samples\); run the cell again\.$"
    ) as told:
        with progress_line("samples") as outer, progress_line("rewards") as inner:
            outer(128, 256)
            inner(1, 2)
            raise KeyboardInterrupt
    assert told.value._render_traceback_() == [str(told.value)]
    with pytest.raises(Interrupted, match="at the start .samples."), progress_line("samples"):
        raise KeyboardInterrupt


def test_a_stop_that_has_words_of_its_own_keeps_them():
    with pytest.raises(Stopped, match="^saved$"), progress_line("runs"):
        raise Stopped("saved")
