"""The live chart: drawn at every step, in place in every notebook runner, in its time, never in training's way."""

import base64
import io
import json
import math
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import nbclient
import nbformat
import pytest

from grpo_kit.watch import _live as live
from grpo_kit.watch._flags import Flag
from grpo_kit.watch._live import LiveChart
from grpo_kit.watch._run_state import RunState
from grpo_kit.watch.chart import RunChart
from tests.made_metrics import completions, rows, run_folder
from tests.support.test_display import contrast

ROOT = Path(__file__).parents[2]
FLAG = Flag("cut off", 3, "90 % <b>", "why", "first")

TRAIN = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.made_metrics import completions, rows
from grpo_kit.watch._flags import Flag
from grpo_kit.watch._live import LiveChart
past = [0.0]  # ten seconds a step go by on this clock
chart = LiveChart(clock=lambda: time.perf_counter() + past[0])
drawn, show = [], chart._show_chart
chart._show_chart = lambda: (drawn.append(chart._run.step), show())
chart.start(40, None)
"""
STEPS = """
begun, spent = chart._clock(), 0.0
for row in rows(30):
    past[0] += 10
    t = chart._clock()
    chart.update([row], completions(row["step"]))
    if row["step"] == 5:
        chart.flag(Flag("cut off", 3, "90 % <b>", "why", "first"))
        chart.change(6, "beta 0 → 0.04")
    spent += chart._clock() - t
share = spent / (chart._clock() - begun)
during = "matplotlib" in sys.modules
"""
CELLS = [
    TRAIN + STEPS + "chart.finish()",
    "print(sorted(set(drawn)) == list(range(31)), during, share)",
    "from grpo_kit import browse, plot_run\n"
    "from tests.made_metrics import run_folder\n"
    "import tempfile, pathlib\n"
    "folder = run_folder(pathlib.Path(tempfile.mkdtemp()) / 'run', 25)\n"
    "plot_run(folder)",
    "browse(folder)",
    "print('matplotlib.pyplot' in sys.modules)",
    TRAIN + STEPS + "raise KeyboardInterrupt",  # finish() is never reached
]


def execute(runner: str, folder: Path, cells: list[str] = CELLS) -> list[list]:
    """Outputs of the cells in the file that `runner` saves."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook = nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel})
    saved = folder / "saved.ipynb"
    if runner == "nbclient":
        client = nbclient.NotebookClient(notebook, timeout=120, allow_errors=True)
        nbformat.write(client.execute(), saved)
    else:
        import papermill

        nbformat.write(notebook, folder / "source.ipynb")
        papermill.execute_notebook(folder / "source.ipynb", saved, progress_bar=False)
    cells = nbformat.read(saved, as_version=4).cells
    return [
        cell.outputs
        for cell in cells
        if "injected-parameters" not in cell.metadata.get("tags", [])
    ]


@pytest.mark.parametrize("runner", ["nbclient", "papermill"])
def test_a_saved_notebook_keeps_one_picture_and_the_time_is_kept(runner, tmp_path):
    import matplotlib.image

    cells = CELLS if runner == "nbclient" else CELLS[:-1]
    train, numbers, plot, table, pyplot, *killed = execute(runner, tmp_path, cells)
    assert [output.output_type for output in train] == ["display_data"] * 4, train
    progress, chart, flags, three = (output.data for output in train)
    assert flags["text/plain"].startswith("1. Red flag: cut off since step 3: 90 %"), (
        "under the chart"
    )

    picture = matplotlib.image.imread(io.BytesIO(base64.b64decode(chart["image/png"])))
    assert picture.shape[1] == 1440 and picture[..., :3].std() > 0.05
    assert "text/html" not in chart and chart["image/svg+xml"].count("<svg") == 1, (
        "one drawing stays"
    )
    assert "1  cut off since step 3" in chart["image/svg+xml"]
    assert (
        "stopped after 5 min" in progress["text/plain"]
        and 'value="30" max="40"' in progress["text/html"]
    )
    assert "red flag: cut off since step 3" in progress["text/plain"], (
        "the first one is in the line"
    )
    assert "<script>" not in three["text/html"] and "&lt;script&gt;" in three["text/html"]
    # the last step's, not the first's
    assert "<span>$</span>x<span>$</span> 30" in three["text/html"]

    every_step, matplotlib_during, share = numbers[0].text.split()
    assert every_step == "True" and matplotlib_during == "False"
    assert float(share) <= 0.02

    assert [output.output_type for output in plot] == ["execute_result"]
    assert {"image/svg+xml", "image/png"} < set(plot[0].data)
    assert (
        "application/vnd.jupyter.widget-view+json" in table[0].data
        and "text/html" in table[0].data
    )
    assert pyplot[0].text == "False\n"
    if killed:
        drawing = killed[0][1].data["text/html"]
        assert "<svg" in drawing and "beta 0 → 0.04" in drawing, (
            "a run that was killed leaves its last drawing"
        )


def test_plain_python_prints_a_line_a_step_without_matplotlib():
    code = """
import sys
from grpo_kit.watch._flags import Flag
from grpo_kit.watch._live import LiveChart
chart = LiveChart()
chart.start(2, None)
chart.update([{"step": 1, "reward": 0.25, "reward_std": 0.5, "reward/exact": 0.125, "seconds": 65.0}])
chart.flag(Flag("cut off", 1, "90 %", "Why.", "first"))
chart.change(2, "beta 0 → 0.04")
chart.say("Paused after step 1.")
chart.update([{"step": 2, "reward": None, "completion_length": 11.4, "completion_cut_off": 0.02, "seconds": 130.0}])
chart.finish()
assert "matplotlib" not in sys.modules and "IPython" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.splitlines() == [
        "step 1/2  reward 0.25 ± 0.50  exact 0.12  1 min 5 s left",
        "Red flag: cut off since step 1: 90 %. Why. First try: first",
        "From step 2: beta 0 → 0.04",
        "Paused after step 1.",
        "step 2/2  length 11  cut off 2%  2 min 10 s in all",
    ]


class Fake:
    """A notebook without a kernel: keeps what is displayed, by the place on the page where it is."""

    def __init__(self, monkeypatch) -> None:
        self.places: list[list[dict]] = []
        monkeypatch.setattr(live, "in_notebook", lambda: True)
        monkeypatch.setattr("IPython.display.display", self.display)

    def display(self, bundle, **options):
        self.places.append(shown := [bundle])

        class Handle:
            def update(self, bundle, **options):
                shown.append(bundle)

        return Handle()

    @property
    def now(self) -> list[dict]:
        """progress, chart, flags, completions"""
        return [shown[-1] for shown in self.places]


@pytest.fixture
def notebook(monkeypatch):
    return Fake(monkeypatch)


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def chart(notebook, clock):
    return LiveChart(clock=lambda: clock[0])


def test_all_of_it_has_its_place_and_its_height_before_the_first_step(notebook, chart):
    chart.start(40, None)
    assert len(notebook.places) == 4
    first = [bundle["text/html"] for bundle in notebook.now]
    for row in rows(30):
        chart.update([row], completions(row["step"]))
        if row["step"] in (5, 9, 20):
            chart.flag(Flag(f"flag {row['step']}", row["step"], "saw", "w" * 200, "f"))
            chart.change(row["step"], "learning_rate 2e-05 → 1e-05")
            chart.say("Paused.")
    last = [bundle["text/html"] for bundle in notebook.now]
    assert len(notebook.places) == 4

    def heights(page):  # of the outermost element, and of the lines of the first place
        return re.findall(
            r"aspect-ratio:[\d/]+|min-height:[\d.]+em|(?<!-)height:[\d.]+em;(?:overflow:auto)?|(?<=auto;)height:[^;\"]+",
            page,
        )[:3]

    assert [heights(page) for page in first] == [heights(page) for page in last] and all(
        map(heights, first)
    )
    for page in first[2:] + last[2:]:
        assert "overflow:auto" in page.split(">")[0], (
            "what is longer than its room scrolls in it"
        )
    assert heights(first[0]) == ["min-height:1.5em", "min-height:3em"]


def test_each_flag_has_its_line_in_the_box_and_opens_to_its_remedy(notebook, chart):
    chart.start(40, None)
    chart.update(rows(1))
    for n in range(3):
        chart.flag(Flag(f"flag {n}", 1, f"saw {n}", "w" * 200, f"try {n}"))
    page = notebook.now[2]["text/html"]
    lines = re.findall(
        r"<details><summary[^>]*><span[^>]*>(.*?)</summary>(.*?)</details>", page
    )
    assert [line.partition("</span> ")[2] for line, _ in lines] == [
        f"flag {n} since step 1: saw {n}" for n in (2, 1, 0)
    ]
    assert [more.partition("First try: ")[2] for _, more in lines] == [
        "try 2",
        "try 1",
        "try 0",
    ]
    height = float(re.search(r"height:([\d.]+)em", page)[1])
    assert height >= 3 * float(re.search(r"line-height:([\d.]+)", page)[1]), (
        "three lines are seen"
    )
    chart.finish()
    assert notebook.now[2]["text/html"].count("<details open>") == 3, (
        "a saved notebook has all of it"
    )


def test_words_have_a_contrast_of_at_least_4_5_or_the_colour_of_the_page(notebook, chart):
    chart.start(5, None)
    chart.update(rows(1), completions(1))
    chart.flag(FLAG)
    pages = [bundle["text/html"] for bundle in (notebook.now[0], notebook.now[2])]
    assert all("red flag" in page for page in pages)
    for page in pages:
        for style in re.findall(r'style="([^"]*)"', page):
            found = dict(item.split(":", 1) for item in style.split(";") if item)
            if "color" in found:
                assert contrast(found["color"], found["background"]) >= 4.5


def test_every_step_is_drawn_where_steps_are_not_very_short(
    notebook, chart, clock, monkeypatch
):
    draw = live.draw_svg
    monkeypatch.setattr(
        live,
        "draw_svg",
        lambda *a, **k: (clock.__setitem__(0, clock[0] + 0.01), draw(*a, **k))[1],
    )
    chart.start(30, None)
    for row in rows(30):
        clock[0] += 2
        chart.update([row])
        assert f"step {row['step']}/30" in notebook.now[0]["text/plain"]
    assert len(notebook.places[1]) == 31  # the empty one too


def test_very_short_steps_leave_drawings_out_and_none_gets_old(
    notebook, chart, clock, monkeypatch
):
    """A drawing takes 20 ms and a step 0.1 s: 2 % allow one in 10 steps."""
    draw = live.draw_svg
    monkeypatch.setattr(
        live,
        "draw_svg",
        lambda *a, **k: (clock.__setitem__(0, clock[0] + 0.02), draw(*a, **k))[1],
    )
    chart.start(600, None)
    spent, shown_at = 0.0, []
    for row in rows(600):
        clock[0] += 0.1
        begun = clock[0]
        chart.update([row])
        spent += (clock[0] - begun) * (row["step"] >= 3)
        if clock[0] > begun:
            shown_at.append((row["step"], begun))
    assert [step for step, _ in shown_at[:2]] == [1, 2]
    assert spent / (clock[0] - shown_at[1][1]) <= 0.02
    gaps = [
        after - before for (_, before), (_, after) in zip(shown_at, shown_at[1:], strict=False)
    ]
    assert max(gaps) <= 5 and len(shown_at) > 20


def test_what_a_person_did_and_what_is_wrong_is_shown_at_once(notebook, chart, clock):
    chart.start(40, None)
    for row in rows(8):
        clock[0] += 1
        chart.update([row])
    chart.say("Paused after step 8.")
    assert "Paused after step 8." in notebook.now[0]["text/html"]
    chart.change(9, "beta 0 → 0.04")
    chart.change(9, "beta 0 → 0.04")  # said twice is one
    assert notebook.now[1]["text/html"].count("a from step 9: beta 0 → 0.04") == 1
    chart.flag(FLAG)
    assert "</span> cut off since step 3</div>" in notebook.now[0]["text/html"]
    assert (
        "cut off since step 3: 90 % &lt;b&gt;</summary>why First try: first"
        in notebook.now[2]["text/html"]
    )
    chart.flag(Flag("second", 7, "saw", "w", "f"))
    assert "(and 1 more, below)" in notebook.now[0]["text/html"]
    assert notebook.now[2]["text/html"].index("second") < notebook.now[2]["text/html"].index(
        "cut off"
    )
    clock[0] += 1
    chart.update(rows(9)[8:])
    assert (
        "Paused" not in notebook.now[0]["text/html"]
        and "cut off" in notebook.now[0]["text/html"]
    )


def test_an_evaluation_reaches_line_and_drawing(notebook, chart, clock):
    chart.start(40, None)
    for row in rows(2):
        clock[0] += 30
        chart.update([row])
    clock[0] += 30
    chart.update([rows(2)[1] | {"eval/accuracy": 0.34}])
    assert "held-out accuracy 34% (step 2)" in notebook.now[0]["text/plain"]
    assert "held-out accuracy" in notebook.now[1]["text/html"]
    clock[0] += 30
    chart.update(rows(3)[2:])
    assert "held-out accuracy 34% (step 2)" in notebook.now[0]["text/plain"], (
        "the last one stays"
    )


def test_trouble_in_drawing_warns_once_and_training_goes_on(
    notebook, chart, clock, monkeypatch, capsys
):
    chart.start(5, None)

    def broken(*_, **__):
        raise OSError("no fonts")

    monkeypatch.setattr(live, "draw_svg", broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for row in rows(5):
            clock[0] += 100
            chart.update([row], completions(row["step"]))
        chart.finish()
    assert [str(c.message) for c in caught] == [
        "The live chart stops (OSError: no fonts). Training goes on: a line a step."
    ]
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_the_last_drawing_stays_where_it_cannot_be_made_a_png(notebook, chart, monkeypatch):
    chart.start(5, None)
    chart.update(rows(1))
    monkeypatch.setattr("grpo_kit.watch.chart.svg_to_png", lambda *_: 1 / 0)
    with pytest.warns(RuntimeWarning, match="division"):
        chart.finish()
    assert (
        "<svg" in notebook.now[1]["text/html"]
        and "stopped after" in notebook.now[0]["text/plain"]
    )


def test_the_stop_button_passes_through(notebook, chart, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    chart.start(5, None)
    monkeypatch.setattr(live, "draw_svg", stopped)
    with pytest.raises(KeyboardInterrupt):
        chart.update(rows(1))


def test_time_and_rows_go_on_from_an_earlier_session(tmp_path, notebook, chart, clock):
    """Four steps of 10 s before, two of 30 s now: 40 + 60 s, and a mean step for each of the 4 that are left."""
    folder = run_folder(tmp_path / "run", 4)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, "changes": {"beta": [0, 0.04]}}) + "\n")
    chart.start(10, folder)
    assert "waiting for the next step" in notebook.now[0]["text/plain"]
    assert "a from step 3: beta 0 → 0.04" in notebook.now[1]["text/html"]
    assert "$</span> 4" in notebook.now[5]["text/html"], (
        "the completions of the last step so far"
    )
    for step in (5, 6):
        clock[0] += 30
        chart.update([{"step": step, "reward": 0.5, "seconds": 30.0 * step - 80}])
    assert chart.line() == "step 6/10  reward 0.50  1 min 7 s left"
    assert sorted(chart._run.rows) == [1, 2, 3, 4, 5, 6]
    chart.finish()
    assert notebook.now[0]["text/plain"].endswith("stopped after 1 min 40 s")


def test_a_run_that_is_done_is_shown_again_as_plot_run_shows_it(
    tmp_path, notebook, chart, clock
):
    folder = run_folder(tmp_path / "run", 25)
    chart.start(25, folder)
    clock[0] += 3
    chart.finish()
    assert (
        notebook.now[1]["image/svg+xml"] == RunChart({"": RunState.read(folder)})._repr_svg_()
    )
    assert notebook.now[0]["text/plain"].endswith("done in 4 min 10 s"), (
        "looking at it takes no time of its own"
    )


def test_a_pause_does_not_count_as_a_step(chart, notebook, clock):
    chart.start(100, None)
    for row in rows(10):
        chart.update([row | {"seconds": 4.0 * row["step"] + 3596 * (row["step"] >= 7)}])
    assert chart.line().endswith("6 min 0 s left")


def test_what_comes_before_start_or_after_the_end_does_no_harm(notebook, chart, capsys):
    chart.say("Loading.")
    chart.change(1, "beta 0 → 0.04")
    assert (
        capsys.readouterr().out == "Loading.\nFrom step 1: beta 0 → 0.04\n"
        and not notebook.places
    )
    chart.start(2, None)
    chart.update(rows(1))
    chart.finish()
    chart.say("Saved.")
    assert "Saved." in notebook.now[0]["text/plain"] and "image/png" in notebook.now[1]
    assert "stopped after" in notebook.now[0]["text/plain"]


def test_a_run_that_fails_before_its_first_step_says_so(notebook, chart):
    chart.start(3, None)
    chart.finish()
    assert notebook.now[0]["text/plain"].startswith("step 0/3  stopped after 0 s")
    assert "image/png" in notebook.now[1]


def test_a_picture_of_rows_with_holes(notebook, chart, recwarn):
    chart.start(3, None)
    chart.update([{"step": 1, "reward": None, "reward_std": None, "grad_norm": math.inf}])
    chart.update(
        [{"step": 2, "reward": 0.5, "reward_std": None, "reward/late": 0.5, "kl": math.nan}]
    )
    chart.finish()
    assert not recwarn.list and "image/png" in notebook.now[1]


def test_a_step_costs_some_milliseconds(notebook):
    """On any machine that runs this: 2 % of a step of 2 s are 40 ms of processor time."""
    chart = LiveChart()
    chart.start(300, None)
    chart.update(rows(290), completions(1))
    begun = time.process_time()
    for row in rows(300)[290:]:
        chart._costs.clear()  # each is drawn
        chart.update([row], completions(row["step"]))
    assert (time.process_time() - begun) / 10 < 0.04
