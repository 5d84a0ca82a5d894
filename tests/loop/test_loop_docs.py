"""docs/loop.md: its code runs as it stands, top to bottom, and says what the files say."""

import re
from pathlib import Path

import grpo_kit
from grpo_kit.record.files import read_changes, read_metrics

PAGE = Path(grpo_kit.__file__).parents[1] / "docs/loop.md"


def test_the_pages_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    space = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), space)
    assert "group_size=16 cannot be changed while a run goes on" in capsys.readouterr().out
    assert [len(read_metrics(f"runs/{name}")) for name in ("loop", "loop-fast")] == [2, 4]
    (change,) = read_changes("runs/loop-fast")
    assert change["step"] == 3 and change["change"] == {
        "learning_rate": 5e-6,
        "steps": 4,
        "temperature": 0.9,
    }


def test_the_page_names_every_file_of_the_room():
    named = set(re.findall(r"`(\w+\.py)`", PAGE.read_text()))
    files = {path.name for path in (PAGE.parents[1] / "grpo_kit/loop").glob("*.py")} - {
        "__init__.py"
    }
    assert files <= named
