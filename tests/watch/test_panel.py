"""The control panel without a page: tests/browser presses its buttons."""

import json
import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest
from forked_kernel import ForkedKernel

from grpo_kit.watch._live import LiveChart
from grpo_kit.watch._panel import panel_row, panel_values

FOLDER = "runs/a<b'c"
CELL = """
from grpo_kit.watch._live import LiveChart
chart = LiveChart()
chart.start(4, {folder!r})
chart.say("Paused after step 3. <b>")
{end}
"""
ROW = '[{"step": 1, "reward": 0.5, "learning_rate": 2.5e-6, "temperature": 0.95}]'
ENDS = {  # what a cell ends with
    "paused": "",
    "updated": f"chart.update({ROW})",
    "going on": f"chart.update({ROW}); chart.say('Going on after step 3.')",
    "finished": f"chart.update({ROW}); chart.finish()",
    "too late": "chart.finish(); chart.say('too late')",
}


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return tmp_path_factory.mktemp("panel")


@pytest.fixture(scope="module")
def outputs(where):
    """What each of ENDS leaves in its cell, and a chart without a folder: progress line, chart, buttons and status."""
    cells = [CELL.format(folder=FOLDER, end=end) for end in ENDS.values()]
    cells.append(CELL.format(folder=None, end=""))
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells]
    )
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", kernel_manager_class=ForkedKernel,
        resources={"metadata": {"path": str(where)}},
    )  # fmt: skip
    path = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        client.execute()
    return dict(
        zip([*ENDS, "no folder"], [cell.outputs for cell in notebook.cells], strict=True)
    )


def test_shows_what_to_type_and_says_what_was_done(outputs, where):
    row, status = outputs["paused"][2:4]
    page, text = row.data["text/html"], status.data["text/html"]
    seen = page.split("<script>")[0]
    assert "kit.control(&quot;" in seen and "/runs/a&lt;b&#x27;c&quot;).pause()" in seen
    assert "a<b" not in page.split("</script>")[0].replace("\\u003c", ""), (
        "a folder's name is no HTML"
    )
    assert "Paused after step 3. &lt;b&gt;" in text
    name = re.search('data-kit-panel="(\\w+)"', page)[1]
    assert f'data-kit-status="{name}"' in text
    folders = json.loads(
        re.search(r"\[name, folders, kernel, run, values\] = (\[.*\]);", page)[1]
    )[1]
    assert folders[0] == f"{where}/{FOLDER}/control"


def test_the_fields_show_what_the_run_has_now(outputs):
    def line(end):
        return outputs[end][0].data["text/html"]

    values = '"]?.({"learning_rate": "2.5e-06", "temperature": "0.95"}, '
    assert values + "true)</script>" in line("updated"), (
        "it was paused, and the button reads Go on"
    )
    assert values + "false)</script>" in line("going on")
    assert "script" not in line("finished"), "a saved notebook keeps none"


def test_the_fields_show_the_first_steps_numbers_from_the_start(tmp_path):
    values = panel_values({"learning_rate": 3e-4, "temperature": 0.85, "beta": 0.1})
    page = panel_row(tmp_path / "run", "x", values)["text/html"]
    arguments = json.loads(re.search(r"run, values\] = (\[.*\]);", page)[1])
    assert arguments[-1] == {"learning_rate": "0.0003", "temperature": "0.85"}


def test_nothing_of_it_is_left_at_the_end(outputs):
    assert [out.data for out in outputs["too late"][2:4]] == [{}, {}]


def test_outside_a_notebook_and_without_a_folder_there_are_no_buttons(outputs, tmp_path):
    chart = LiveChart()
    chart.start(4, tmp_path / "run")
    assert chart._handles == {}, "no notebook"
    assert not any(
        "kit-panel" in str(out) or "Paused" in str(out) for out in outputs["no folder"][2:4]
    )
