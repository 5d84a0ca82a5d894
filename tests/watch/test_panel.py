"""The control panel without a page: tests/browser presses its buttons."""

import json
import re

import nbclient
import nbformat

from grpo_kit.watch.live import LiveChart

CELL = """
from grpo_kit.watch.live import LiveChart
chart = LiveChart()
chart.start(4{folder})
chart.say("Paused after step 3. <b>")
{end}
"""


def _outputs(tmp_path, end, folder=', "runs/a<b\'c"', places=slice(2, 4)):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(CELL.format(end=end, folder=folder))]
    )
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    return notebook.cells[0].outputs[places]  # 2 to 4: behind progress line and chart


def test_shows_what_to_type_and_says_what_was_done(tmp_path):
    row, status = _outputs(tmp_path, "")
    page, text = row.data["text/html"], status.data["text/html"]
    seen = page.split("<script>")[0]
    assert "kit.control(&quot;" in seen and "/runs/a&lt;b&#x27;c&quot;).pause()" in seen
    assert "a<b" not in page.split("</script>")[0].replace("\\u003c", ""), "a folder's name is no HTML"
    assert "Paused after step 3. &lt;b&gt;" in text
    name = re.search('data-kit-panel="(\\w+)"', page)[1]
    assert f'data-kit-status="{name}"' in text
    folders = json.loads(re.search(r"\[name, folders, kernel, run\] = (\[.*\]);", page)[1])[1]
    assert folders[0] == f"{tmp_path}/runs/a<b'c/control"


def test_the_fields_show_what_the_run_has_now(tmp_path):
    row = '[{"step": 1, "reward": 0.5, "learning_rate": 2.5e-6, "temperature": 0.95}]'

    def line(end):
        return _outputs(tmp_path, f"chart.update({row}); {end}", places=slice(0, 1))[0].data["text/html"]

    values = '"]?.({"learning_rate": "2.5e-06", "temperature": "0.95"}, '
    assert values + "true)</script>" in line(""), "it was paused, and the button reads Go on"
    assert values + "false)</script>" in line("chart.say('Going on after step 3.')")
    assert "script" not in line("chart.finish()"), "a saved notebook keeps none"


def test_nothing_of_it_is_left_at_the_end(tmp_path):
    outputs = _outputs(tmp_path, "chart.finish(); chart.say('too late')")
    assert [out.data for out in outputs] == [{}, {}]


def test_outside_a_notebook_and_without_a_folder_there_are_no_buttons(tmp_path):
    chart = LiveChart()
    chart.start(4, tmp_path / "run")
    assert chart._handles == {}, "no notebook"
    assert not any("kit-panel" in str(out) or "Paused" in str(out) for out in _outputs(tmp_path, "", ""))
