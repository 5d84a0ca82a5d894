"""The control panel without a page: tests/browser presses its buttons."""

import json
import re
import warnings

import nbclient
import nbformat
import pytest

from grpo_kit.watch import panel
from grpo_kit.watch.panel import Panel

CELL = """
from grpo_kit.watch.panel import Panel
panel = Panel("runs/a<b'c")
panel.show()
panel.say("Paused after step 3. <b>")
{end}
"""


def _outputs(tmp_path, end):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.format(end=end))])
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    return notebook.cells[0].outputs


def test_shows_what_to_type_and_says_what_was_done(tmp_path):
    row, status = _outputs(tmp_path, "")
    page, text = row.data["text/html"], status.data["text/html"]
    assert (tmp_path / "runs/a<b'c/control").is_dir(), "the server makes no folders"
    seen = page.split("<script>")[0]
    assert "kit.control(&quot;" in seen and "/runs/a&lt;b&#x27;c&quot;).pause()" in seen
    assert "a<b" not in page.split("</script>")[0].replace("\\u003c", ""), "a folder's name is no HTML"
    assert "Paused after step 3. &lt;b&gt;" in text and "= 'Go on'" in text
    name = re.search('data-kit-panel="(\\w+)"', page)[1]
    assert f'data-kit-status="{name}"' in text
    folders = json.loads(re.search(r"\[name, folders\] = (\[.*?\]);", page)[1])[1]
    assert folders[0] == f"{tmp_path}/runs/a<b'c/control"


def test_nothing_of_it_is_left_at_the_end(tmp_path):
    outputs = _outputs(tmp_path, "panel.end(); panel.say('too late')")
    assert [out.data for out in outputs] == [{}, {}]


def test_outside_a_notebook_and_without_a_folder_it_does_nothing(tmp_path, capsys, monkeypatch):
    for made in (Panel(tmp_path / "run"), Panel(None)):
        made.show()
        made.say("Paused after step 3.")
        made.end()
    monkeypatch.setattr(panel, "in_notebook", lambda: True)
    Panel(None).show()
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_trouble_is_said_once_and_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(panel, "in_notebook", lambda: True)
    (tmp_path / "run").write_text("a file where the run's folder should be")
    made = Panel(tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="control panel fails .*Training goes on.*kit.control"):
        made.show()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.show()
        made.say("Paused after step 3.")
        made.end()
