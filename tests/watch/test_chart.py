"""plot_run: the drawing of a run folder, alone or beside others, shown and saved."""

import json
import time
import xml.etree.ElementTree as ET
from io import BytesIO

import pytest
from PIL import Image

from grpo_kit.record.files import RunFolderError
from grpo_kit.watch._run_state import RunState
from grpo_kit.watch.chart import RunChart, plot_run
from tests.made_metrics import Recorded, rows, run_folder
from tests.watch.test_svg import line, panels, points, words


def page_of(chart):
    return ET.fromstring(chart._repr_svg_())


def test_a_folder_is_drawn_beside_others_and_while_it_is_written(tmp_path):
    one, two = run_folder(tmp_path / "one", 5), run_folder(tmp_path / "two", 30)
    with open(two / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 31, "rew')
    page = page_of(plot_run(one, compare=two))
    assert words(page)[:2] == ["one", "two"]
    panel = next(iter(panels(page).values()))
    short, long = (points(line(panel, colour)[0])[:, 0] for colour in ("#0072B2", "#D55E00"))
    assert len(short) == 5 and max(long) > 5 * max(short) - 400, "both on one scale of steps"
    same = run_folder(tmp_path / "more" / "one", 3)
    names = words(page_of(plot_run(one, compare=[same])))[:2]
    assert names == [f"…{str(folder)[-59:]}" for folder in (one, same)], (
        "told apart by the ends of their paths"
    )


def test_a_folder_without_rows_and_none(tmp_path):
    Recorded(tmp_path / "new")
    assert plot_run(tmp_path / "new")._repr_png_()[0][:4] == b"\x89PNG"
    with pytest.raises(RunFolderError, match="does not exist"):
        plot_run(tmp_path / "nowhere")


def test_changes_of_a_folder_are_marked_and_told(tmp_path):
    folder = run_folder(tmp_path / "run", 20)
    lines = [
        {"step": 6, "changes": {"learning_rate": [2e-05, 1e-05]}},
        {"step": 9, "refused": {"change": {"beta": -1}, "why": "no"}},
        {"step": 12, "changes": {"beta": [0.0, 0.04], "temperature": [1.0, 0.8]}},
    ]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1')
    assert words(page_of(plot_run(folder)))[-2:] == [
        "a  from step 6: learning_rate 2e-05 → 1e-05",
        "b  from step 12: beta 0.0 → 0.04, temperature 1.0 → 0.8",
    ]


def test_it_is_saved_as_svg_and_as_a_png_of_the_same_picture(tmp_path):
    chart = plot_run(run_folder(tmp_path / "run", 300))
    begun = time.process_time()
    assert chart.save(tmp_path / "chart.png") == tmp_path / "chart.png"
    assert time.process_time() - begun < 2
    svg = chart.save(str(tmp_path / "chart.svg")).read_text()
    assert svg == chart._repr_svg_()
    picture = Image.open(tmp_path / "chart.png")
    wide, high = map(int, ET.fromstring(svg).get("viewBox").split()[2:])
    assert picture.size == (1440, round(high * 1440 / wide))
    assert (tmp_path / "chart.png").stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"'chart.pdf' must end in .svg or .png"):
        chart.save("chart.pdf")


def test_its_words_are_in_the_png_on_a_machine_without_fonts(monkeypatch):
    """What is drawn in the place of a title is the same with and without the fonts of the machine."""
    import resvg_py

    run = RunState()
    run.add(rows(5))
    with_fonts, _ = RunChart({"run": run})._repr_png_()
    draw = resvg_py.svg_to_bytes
    monkeypatch.setattr(
        resvg_py, "svg_to_bytes", lambda **options: draw(**options, skip_system_fonts=True)
    )
    without, _ = RunChart({"run": run})._repr_png_()
    assert with_fonts == without
    title = Image.open(BytesIO(without)).convert("L").crop((50, 30, 400, 60))
    assert title.getextrema()[0] < 80


def test_a_notebook_gets_it_as_svg_and_as_png(tmp_path):
    from IPython.core.formatters import DisplayFormatter

    chart = plot_run(run_folder(tmp_path / "run", 3))
    bundle, metadata = DisplayFormatter().format(chart)
    assert set(bundle) == {"text/plain", "image/svg+xml", "image/png"}
    assert metadata["image/png"] == {"width": 960} and "0x" not in bundle["text/plain"]
