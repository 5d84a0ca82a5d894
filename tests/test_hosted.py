"""How a notebook opens that is opened alone: the cells of .ci/hosted.py, and what they do where the kit is there."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

from grpo_kit.record import files

ROOT = Path(__file__).parent.parent
HOSTED = runpy.run_path(str(ROOT / ".ci" / "hosted.py"))
NOTEBOOKS = HOSTED["NOTEBOOKS"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_opens_as_the_rule_says(path):
    notebook = nbformat.read(path, as_version=4)
    opened = HOSTED["opened"](
        nbformat.read(path, as_version=4), path.name, HOSTED["repository"]()
    )
    assert notebook == opened, "run `python .ci/hosted.py`"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code[0].source == HOSTED["install_cell"](path.name), "it is the first cell of code"
    uses_trl = any(re.search(r"^(from|import) trl\b", cell.source, re.M) for cell in code)
    assert ("rewards,trl]" in code[0].source) >= uses_trl, "TRL is an extra: add it to HAVE_TRL"
    links = re.findall(r"https://(?:colab|kaggle|studiolab)[^)]*ipynb", json.dumps(notebook))
    assert bool(links) == bool(HOSTED["badges"](path.name, HOSTED["repository"]()))


def test_badges_lead_to_notebooks_that_are_there_and_need_an_address():
    have = [path for path in NOTEBOOKS if HOSTED["badges"](path.name, "someone/kit")]
    assert [path.name[:2] for path in have] == ["00", "05", "06", "16"]
    for path in have:
        line = HOSTED["badges"](path.name, "someone/kit")
        places = re.findall(r"someone/kit/blob/main/([^)\s]+)", line)
        assert len(places) == 3 and all((ROOT / place).is_file() for place in places)
        notebook = HOSTED["opened"](nbformat.read(path, as_version=4), path.name, "someone/kit")
        assert notebook.cells[1].source == line
        again = HOSTED["opened"](notebook, path.name, "")
        assert again == HOSTED["opened"](nbformat.read(path, as_version=4), path.name, ""), (
            "and goes again"
        )
        assert HOSTED["badges"](path.name, "") == ""


def test_the_two_lines_in_the_docs_are_where_the_badges_lead():
    text = (ROOT / "docs" / "systems.md").read_text()
    lines = re.findall(r"^    https://(\S+OWNER/NAME\S+)$", text, re.M)
    badges = HOSTED["badges"]("00_start_here.ipynb", "OWNER/NAME")
    assert lines == re.findall(r"\]\(https://(\S+?)\)", badges)[1::2][:2]
    for name in ("00_start_here", "05_train_full"):
        assert (ROOT / "notebooks" / f"{name}.ipynb").is_file() and name in text


def test_the_address_is_on_github_and_named_alike():
    named = HOSTED["named"]
    assert (
        named("https://github.com/someone/kit")
        == named("https://github.com/someone/kit.git")
        == "someone/kit"
    )
    for wrong in (
        "https://example.org/someone/kit",
        "https://github.com/someone",
        "someone/kit",
    ):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            named(wrong)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text()).get("repository-code", "")
    assert named(cited) == HOSTED["repository"](), "CITATION.cff and pyproject.toml"


def test_the_cell_does_nothing_where_the_kit_is_there(tmp_path):
    code = f"import sys; before = list(sys.path)\n{HOSTED['INSTALL']}\nassert sys.path == before, sys.path"
    (tmp_path / "cell.ipy").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1"}
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "cell.ipy"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_files_of_the_repository_are_found_or_said_to_lie_there(tmp_path, monkeypatch):
    results = "benchmarks/results/advice"
    assert files.in_repository(results) == ROOT / results
    # An installed copy of the kit, as the working folder sees it.
    monkeypatch.setattr(files, "_AROUND_THE_KIT", tmp_path / "site-packages")
    monkeypatch.chdir(ROOT / "notebooks")
    assert files.in_repository(results) == ROOT / results
    (tmp_path / "benchmarks" / "results" / "advice").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="clone it and open this notebook there"):
        files.in_repository(results)
