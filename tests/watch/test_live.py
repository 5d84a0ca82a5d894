"""The live chart: in place in every notebook runner, within its time, and never in training's way."""

import base64
import io
import math
import subprocess
import sys
import time
import warnings
from pathlib import Path

import matplotlib.image
import nbclient
import nbformat
import numpy as np
import pandas as pd
import pytest

from grpo_kit.record.files import RunFolderError
from grpo_kit.record.folder import RunFolder
from grpo_kit.watch import live
from grpo_kit.watch.chart import plot_run
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.live import LiveChart

ROOT = Path(__file__).parents[2]


def rows(n: int, *, kl: bool = False) -> list[dict]:
    """Metrics as a run on an easy task gives them."""
    noise = np.random.default_rng(0)
    out = []
    for step in range(1, n + 1):
        done = step / n
        exact = float(np.clip(0.15 + 0.65 * done + noise.normal(0, 0.07), 0, 1))
        out.append(
            {
                "step": step,
                "temperature": 1.2 - 0.4 * done,
                "learning_rate": 2e-4,
                "grad_norm": float(abs(noise.normal(0.8, 0.3))),
                "reward": 0.75 * exact + 0.25,
                "reward_std": 0.3 - 0.2 * done,
                "reward/exact": exact,
                "reward/format": 1.0,
                "frac_reward_zero_std": 0.25,
                "entropy": 0.8 * math.exp(-3 * done),
                "kl": 0.02 * done if kl else None,
                "completion_length": 6 + 3 * math.exp(-5 * done),
                "completion_cut_off": 0.02,
            }
        )
    return out


def completions(step: int) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "step": [step] * 4,
            "prompt": ["Which is the largest? <answer>"] * 4,
            "prefill": ["<answer>"] * 4,
            "completion": ["82</answer>", "<script>alert(1)</script>", f"$x$ {step}", "d"],
            "reward": [1.0, 0.0, 0.25, 0.5],
            "reward/exact": [1.0, 0.0, 0.0, 0.0],
            "group": [0] * 4,
        }
    )


def run_folder(path: Path, n: int, **options) -> Path:
    run = RunFolder.open(path, config={"reward_parts": ["exact", "format"]})
    for row in rows(n, **options):
        run.write_step(row)
    return path


TRAIN = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.watch.test_live import completions, rows
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.live import LiveChart
past = [0.0]  # ten seconds a step go by on this clock
chart = LiveChart(clock=lambda: time.perf_counter() + past[0])
pictures, show = [], chart._show_chart
chart._show_chart = lambda: (pictures.append(1), show())
chart.start(40, None)
begun, spent = chart._clock(), 0.0
for row in rows(30):
    past[0] += 10
    t = chart._clock()
    chart.update([row], completions(row["step"]))
    if row["step"] == 5:
        chart.flag(Flag("cut off", 3, "90 % <b>", "why", "first"))
    spent += chart._clock() - t
share = spent / (chart._clock() - begun)
during = len(pictures)
chart.finish()
"""
CELLS = [
    TRAIN,
    "print(during, len(pictures), share)",
    "from grpo_kit import browse, plot_run\n"
    "from tests.watch.test_live import run_folder\n"
    "import tempfile, pathlib\n"
    "folder = run_folder(pathlib.Path(tempfile.mkdtemp()) / 'run', 25)\n"
    "plot_run(folder)",
    "browse(folder)",
    "print('matplotlib.pyplot' in sys.modules)",
]


def execute(runner: str, folder: Path) -> list[list]:
    """Outputs of CELLS in the file that `runner` saves."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS], metadata={"kernelspec": kernel}
    )
    saved = folder / "saved.ipynb"
    if runner == "nbclient":
        nbformat.write(nbclient.NotebookClient(notebook, timeout=120).execute(), saved)
    else:
        import papermill

        nbformat.write(notebook, folder / "source.ipynb")
        papermill.execute_notebook(folder / "source.ipynb", saved, progress_bar=False)
    cells = nbformat.read(saved, as_version=4).cells
    return [cell.outputs for cell in cells if "injected-parameters" not in cell.metadata.get("tags", [])]


@pytest.mark.parametrize("runner", ["nbclient", "papermill"])
def test_a_saved_notebook_keeps_one_picture_and_the_time_is_kept(runner, tmp_path):
    train, numbers, plot, table, pyplot = execute(runner, tmp_path)
    assert [output.output_type for output in train] == ["display_data"] * 4, train
    progress, chart, flags, three = (output.data for output in train)
    assert flags["text/plain"].startswith("1. Red flag: cut off since step 3: 90 %"), "under the chart"

    picture = matplotlib.image.imread(io.BytesIO(base64.b64decode(chart["image/png"])))
    assert picture.shape[:2] == (858, 1430) and picture[..., :3].std() > 0.05
    assert "stopped after 5 min" in progress["text/plain"] and 'value="30" max="40"' in progress["text/html"]
    assert "<script>" not in three["text/html"] and "&lt;script&gt;" in three["text/html"]
    assert "<span>$</span>x<span>$</span> 30" in three["text/html"]  # the last step's, not the first's

    during, in_all, share = numbers[0].text.split()
    assert int(during) >= 1 and int(in_all) == int(during) + 1
    assert float(share) <= 0.02

    assert [output.output_type for output in plot] == ["execute_result"] and "image/png" in plot[0].data
    assert "application/vnd.jupyter.widget-view+json" in table[0].data and "text/html" in table[0].data
    assert pyplot[0].text == "False\n"


def test_plain_python_prints_a_line_a_step_without_matplotlib():
    code = """
import sys
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.live import LiveChart
chart = LiveChart()
chart.start(2, None)
chart.update([{"step": 1, "reward": 0.25, "reward_std": 0.5, "reward/exact": 0.125, "step_seconds": 65.0}])
chart.flag(Flag("cut off", 1, "90 %", "Why.", "first"))
chart.update([{"step": 2, "reward": None, "completion_length": 11.4, "completion_cut_off": 0.02}])
chart.finish()
assert "matplotlib" not in sys.modules and "IPython" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.splitlines() == [
        "step 1/2  reward 0.25 ± 0.50  exact 0.12  1 min 5 s left",
        "Red flag: cut off since step 1: 90 %. Why. First try: first",
        "step 2/2  length 11  cut off 2%  0 s left",
    ]


class Fake:
    """A notebook without a kernel: keeps what is displayed."""

    def __init__(self, monkeypatch) -> None:
        self.shown: list[dict] = []
        monkeypatch.setattr(live, "in_notebook", lambda: True)
        monkeypatch.setattr("IPython.display.display", self.display)

    def display(self, bundle, **options):
        self.shown.append(bundle)
        return self

    def update(self, bundle, **options):
        self.shown.append(bundle)


def test_flags_are_marked_where_they_began_and_told_under_the_panels():
    table = pd.DataFrame(rows(20))
    flags = [
        Flag("cut off", 3, "90 %", "w", "f"),
        Flag("KL spike", 3, "2.9", "w", "f"),
        Flag("x", 9, "y" * 300, "w", "f"),
    ]
    bare, marked = live.draw({"run": table}), live.draw({"run": table}, flags={"run": flags})
    steps = {
        line.get_xdata()[0] for axes in marked.axes for line in axes.lines if len(set(line.get_xdata())) == 1
    }
    assert steps == {3, 9}
    assert [text.get_text().strip() for text in marked.axes[0].texts] == ["1,2", "3"]
    words = [text.get_text() for text in marked.texts]
    assert words[:2] == ["1  cut off since step 3: 90 %", "2  KL spike since step 3: 2.9"]
    assert words[2].endswith("…") and len(words[2]) <= 170
    grown = marked.get_figheight() - bare.get_figheight()
    assert grown == pytest.approx(0.6)
    panels = [
        axes.get_position().height * figure.get_figheight()
        for figure in (bare, marked)
        for axes in figure.axes[:1]
    ]
    assert panels[0] == pytest.approx(panels[1]), "the panels keep their size"
    assert not live.draw({"run": table}, flags={"run": flags}, words=False).texts


def test_trouble_in_drawing_warns_once_and_training_goes_on(monkeypatch, capsys):
    Fake(monkeypatch)

    def broken(*_, **__):
        raise OSError("no fonts")

    monkeypatch.setattr(live, "draw", broken)
    now = [0.0]
    chart = LiveChart(clock=lambda: now[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chart.start(5, None)
        for row in rows(5):
            now[0] += 100
            chart.update([row], completions(row["step"]))
        chart.finish()
    assert [str(c.message) for c in caught] == [
        "The live chart stops (OSError: no fonts). Training goes on: a line a step."
    ]
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_the_stop_button_passes_through(monkeypatch):
    Fake(monkeypatch)

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(live, "draw", stopped)
    now = [0.0]
    chart = LiveChart(clock=lambda: now[0])
    chart.start(5, None)
    now[0] = 100.0
    with pytest.raises(KeyboardInterrupt):
        chart.update(rows(1))


def test_drawing_waits_until_it_fits(monkeypatch):
    """Each picture costs 0.6 s of an 80 s run of 0.5 s steps: two fit in 2 %, not one a step."""
    notebook = Fake(monkeypatch)
    now, drawn = [0.0], []

    def draw(*_, **__):
        now[0] += 0.6
        drawn.append(now[0])

    monkeypatch.setattr(live, "draw", draw)
    monkeypatch.setattr(live, "to_png", lambda figure: b"png")
    chart = LiveChart(clock=lambda: now[0])
    chart.start(160, None)
    for row in rows(160):
        now[0] += 0.5
        chart.update([row])
    assert len(drawn) == 2 and drawn[0] == pytest.approx(40.6, abs=0.6)
    assert sum("image/png" in bundle for bundle in notebook.shown) == 2
    chart.finish()
    assert len(drawn) == 3


def test_time_left_and_resumed_rows(tmp_path, monkeypatch, capsys):
    run_folder(tmp_path / "run", 4)
    now = [0.0]
    chart = LiveChart(clock=lambda: now[0])
    chart.start(10, tmp_path / "run")
    for step in (5, 6):
        now[0] += 30
        chart.update([{"step": step, "reward": 0.5}])
    assert capsys.readouterr().out.splitlines()[-1] == "step 6/10  reward 0.50  2 min 0 s left"
    assert sorted(chart._rows) == [1, 2, 3, 4, 5, 6]
    assert chart.line(done=True).endswith("stopped after 1 min 0 s")


def panels(figure) -> dict[str, object]:
    found = {}
    for axes in figure.axes:
        legend = axes.get_legend()
        words = [text.get_text() for text in legend.get_texts()] if legend else []
        found[axes.get_title(loc="left") or ", ".join(words)] = axes
    return found


def test_plot_run_draws_what_was_measured(tmp_path):
    few = panels(plot_run(run_folder(tmp_path / "few", 7)))
    assert list(few) == [
        "reward (band: ± reward_std)",
        "reward parts",
        "completion length, tokens",
        "share cut off, groups without a signal",
        "entropy, nats a token",
        "gradient norm",
        "temperature",
        "learning rate",
    ]
    drawn = few["reward (band: ± reward_std)"].lines[0]
    assert drawn.get_ydata().tolist() == [row["reward"] for row in rows(7)]
    assert len(few["reward parts"].lines) == 2

    many = panels(plot_run(run_folder(tmp_path / "many", 60, kl=True)))
    assert "KL to the reference" in many and len(many) == 10
    points, mean = many["gradient norm"].lines
    norms = [row["grad_norm"] for row in rows(60, kl=True)]
    assert points.get_ydata().tolist() == norms
    assert mean.get_ydata()[30] == pytest.approx(np.mean(norms[28:33]))


def test_plot_run_beside_others_and_while_it_is_written(tmp_path):
    one, two = run_folder(tmp_path / "one", 5), run_folder(tmp_path / "two", 30)
    with open(two / "metrics.csv", "ab") as file:
        file.write(b"31,0.9,1")
    figure = plot_run(one, compare=two)
    reward = figure.axes[0]
    assert [text.get_text() for text in reward.get_legend().get_texts()] == ["one", "two"]
    assert len({line.get_color() for line in reward.lines}) == 2
    assert max(reward.lines[-1].get_xdata()) == 30
    assert figure._repr_png_()[:4] == b"\x89PNG"


def test_a_picture_of_rows_with_holes(monkeypatch, recwarn):
    notebook = Fake(monkeypatch)
    chart = LiveChart()
    chart.start(3, None)
    chart.update([{"step": 1, "reward": None, "reward_std": None, "grad_norm": math.inf}])
    chart.update([{"step": 2, "reward": 0.5, "reward_std": None, "reward/late": 0.5, "kl": math.nan}])
    chart.finish()
    assert not recwarn.list and "image/png" in notebook.shown[-1]


def test_plot_run_of_a_run_without_rows_and_of_none(tmp_path):
    RunFolder.open(tmp_path / "new", config={})
    assert plot_run(tmp_path / "new")._repr_png_()
    with pytest.raises(RunFolderError, match="does not exist"):
        plot_run(tmp_path / "nowhere")


def test_one_picture_takes_less_than_two_seconds(tmp_path):
    figure = plot_run(run_folder(tmp_path / "run", 300))
    begun = time.process_time()
    figure._repr_png_()
    assert time.process_time() - begun < 2
