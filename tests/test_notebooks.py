"""Every notebook: its anatomy, and a run from top to bottom in the smoke profile."""

import os
import re
import subprocess
import sys
from pathlib import Path

import few_words
import nbclient
import nbformat
import pandas as pd
import pytest
import torch
from forked_kernel import ForkedKernel
from ipykernel.ipkernel import IPythonKernel

from grpo_kit import objectives
from grpo_kit.more.code.sandbox import isolation

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Behind the cell `parameters`, as papermill puts what it is given. Two seeds take every path that three take; each arm
# of notebook 03 is a process that loads everything (tests/benchmarks measures the other arms).
FEWER = {
    "03_where_the_time_goes": {"ARMS": "trl-hf-tuned,kit"},
    "07_warm_start": {"SEEDS": [0, 1]},
    "10_preferences_then_grpo": {"SEEDS": [0, 1]},
    "11_ppo_and_reward_models": {"SEEDS": [0, 1]},
    "17_agents_over_turns": {"STEPS": 2},
    # Exports and proofs, each token by token: fewer tokens.
    "19_keep_it_and_use_it": {"MODEL": str(few_words.folder())},
}
# All but these train a model of 2,051 words where the profile has one of 49,152: a step costs a tenth. 19 has its own,
# 20 compares with runs of other processes.
WITH_ALL_WORDS = ("00_", "05_", "19_", "20_")
FEWER_WORDS = f"""\
import grpo_kit.trainer.presets as presets
presets.TABLE[:] = [
    (*row[:2], {str(few_words.folder())!r}, row[3]) if row[2] == "tiny-random" else row for row in presets.TABLE
]"""
# Those that read of TRL, compare with it or call its trainers; all others run without it, as an installed core does.
WITH_TRL = ("01_", "03_", "07_", "10_", "11_", "18_", "21_")


# The path of a first reader. A longer one is the order of the numbers.
FIRST_COURSE = ("00", "01", "02", "04", "05", "12", "14")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_anatomy(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# "), (
        "the first cell is the title"
    )
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1 and tagged[0].cell_type == "code", "one cell tagged `parameters`"
    prose = sum(cell.cell_type == "markdown" for cell in notebook.cells)
    assert prose >= len(_code(notebook)), "at least as many cells of prose as of code"
    failed = [
        out.ename
        for cell in _code(notebook)
        for out in cell.outputs
        if out.output_type == "error"
    ]
    assert not failed, f"committed with errors: {failed}"
    assert path.stat().st_size < 2_000_000, "outputs stay small"


def test_the_head_says_how_long_what_to_look_at_and_what_comes_next(path):
    """The next notebook of the first course where this one is in it, and the next by number."""
    head = nbformat.read(path, as_version=4).cells[0].source
    parts = re.search(
        r"\*\*Needs:\*\* .+ \*\*On server cores:\*\* .*minutes?\b.*\*\*Look at:\*\* .+ \*\*Next:\*\* (.+)",
        head,
    )
    assert parts, head
    number = path.stem.split("_")[0]
    later = NOTEBOOKS[NOTEBOOKS.index(path) + 1 :]
    expected = [later[0].name] if later else []
    if number in FIRST_COURSE[:-1]:
        following = FIRST_COURSE[FIRST_COURSE.index(number) + 1]
        expected.insert(
            0, next(other.name for other in NOTEBOOKS if other.name.startswith(f"{following}_"))
        )
    assert re.findall(r"\((\w+\.ipynb)\)", parts[1]) == list(dict.fromkeys(expected))


def test_is_committed_as_jupyterlab_writes_it(path):
    """Else opening one makes it dirty, and saving it changes lines that nobody touched.

    The one difference that is left: the version of Python, which Lab takes from the kernel that is there.
    """
    notebook = nbformat.read(path, as_version=4)
    assert set(notebook.metadata) - {"grpo_kit"} == {"kernelspec", "language_info"}, (
        "nothing else, but for where the outputs come from; widget state least of all"
    )
    assert notebook.metadata.kernelspec == {
        "display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3",
    }  # fmt: skip
    version = notebook.metadata.language_info.version
    assert re.fullmatch(r"3\.1[1-3]\.\d+", version)
    assert notebook.metadata.language_info == {
        **IPythonKernel.language_info,
        "version": version,
    }
    assert path.read_text(encoding="utf-8") == f"{nbformat.writes(notebook)}\n", (
        "order, indent, last newline"
    )
    assert all("id" in cell for cell in notebook.cells)


def test_code_that_only_draws_is_folded(path):
    """A diagram's boxes and arrows teach nothing by their code: Lab and the site show it on a click."""
    notebook = nbformat.read(path, as_version=4)
    shown = [
        cell.id
        for cell in _code(notebook)
        if re.search(r"^(\w+ = )?diagram\(", cell.source, re.MULTILINE)
        and not cell.metadata.get("jupyter", {}).get("source_hidden")
    ]
    assert not shown


def exercises(notebook):
    """The code of a notebook's exercises and solutions: blocks of Python in the prose behind the heading.

    One that begins with "py" needs more than a model of smoke can do.
    """
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.findall(
        r"^```python\n(.*?)^```$",
        prose.partition("\n## Exercises")[2],
        re.MULTILINE | re.DOTALL,
    )


def _give(notebook, values):
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    unknown = [
        name for name in values if not re.search(rf"^{name} = ", cell.source, re.MULTILINE)
    ]
    assert not unknown, f"no such parameter: {unknown}"
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())


@pytest.fixture(scope="module")
def without_trl(tmp_path_factory):
    """A folder for PYTHONPATH: every Python that finds it finds no TRL."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "sitecustomize.py").write_text('import sys\nsys.modules["trl"] = None\n')
    return str(folder)


def _run(path, tmp_path, monkeypatch, without=None):
    """The notebook, executed in the smoke profile. without: a folder that hides packages."""
    monkeypatch.setenv("KIT_PROFILE", "smoke")
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("KIT_RUN_FOLDER", raising=False)
    places = [without, str(ROOT), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    # The kernel works in an empty folder: what a notebook needs it must import or make.
    work = tmp_path / "work"
    work.mkdir()
    notebook = nbformat.read(path, as_version=4)
    _give(notebook, FEWER.get(path.stem, {}))
    for source in exercises(notebook):  # as a reader does after Run all: each in a new cell
        notebook.cells.append(nbformat.v4.new_code_cell(source))
    if not path.name.startswith(WITH_ALL_WORDS):
        notebook.cells.insert(0, nbformat.v4.new_code_cell(FEWER_WORDS))
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", kernel_manager_class=ForkedKernel, timeout=600,
        resources={"metadata": {"path": str(work)}},
    )  # fmt: skip
    client.execute()
    return notebook


def test_runs_from_top_to_bottom_in_the_smoke_profile(path, tmp_path, monkeypatch, without_trl):
    if "code" in path.stem and isolation() is None:
        pytest.skip("nothing here isolates programs")
    before = {p for p in (ROOT / "notebooks").iterdir()}
    without = None if path.name.startswith(WITH_TRL) else without_trl
    notebook = _run(path, tmp_path, monkeypatch, without)
    unrun = [
        n
        for n, cell in enumerate(notebook.cells)
        if cell.cell_type == "code" and not cell.execution_count
    ]
    assert not [n for n in unrun if notebook.cells[n].source.strip()], (
        "every code cell was executed"
    )
    assert {p for p in (ROOT / "notebooks").iterdir()} == before, (
        "nothing is written beside the notebooks"
    )
    if "trainer.train()" in "".join(cell.source for cell in notebook.cells):
        assert list((tmp_path / "runs").glob("*/metrics.jsonl")), (
            "a training notebook leaves a run folder"
        )


def test_what_notebook_01_shows_of_trl_is_left_out_where_it_is_missing(
    tmp_path, monkeypatch, without_trl
):
    (path,) = (path for path in NOTEBOOKS if path.name.startswith("01_"))
    notebook = _run(path, tmp_path, monkeypatch, without_trl)
    said = "".join(out.get("text", "") for cell in _code(notebook) for out in cell.outputs)
    assert 'pip install "grpo-kit[trl]"' in said and "REFUSED" in said


def test_every_exercise_that_names_a_change_has_its_code(path):
    """Each runs after Run all: test_runs_from_top_to_bottom_in_the_smoke_profile executes it behind the last cell."""
    notebook = nbformat.read(path, as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    asked = prose.partition("\n## Exercises")[2].partition("<details><summary>Solutions")[0]
    numbered = re.split(r"^\d+\. ", asked, flags=re.MULTILINE)[1:]
    assert len(numbered) >= 3 and all("```python" in one for one in numbered), numbered
    assert len(exercises(notebook)) >= len(numbered)


def test_the_command_for_sheets_leaves_out_solutions_and_outputs(tmp_path):
    """That of docs/teaching.md, which goes by a tag; every folded solution of every notebook has it."""
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            is_solution = cell.source.startswith("<details><summary>Solution")
            assert ("solution" in cell.metadata.get("tags", [])) == is_solution, (path, cell.id)
    page = (ROOT / "docs/teaching.md").read_text()
    (command,) = re.findall(r"^```\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    command = command.replace(".venv/bin/python", sys.executable)
    command = command.replace("--output-dir sheets", f"--output-dir {tmp_path}")
    subprocess.run(command, shell=True, cwd=ROOT, check=True, capture_output=True)
    sheets = {path: nbformat.read(path, as_version=4) for path in tmp_path.iterdir()}
    assert {path.name[:2] for path in sheets} == {*FIRST_COURSE} and len(sheets) == 7
    for path, sheet in sheets.items():
        text = "".join(cell.source for cell in sheet.cells)
        assert "## Exercises" in text and "<summary>Solution" not in text, path
        assert not any(cell.outputs for cell in _code(sheet))


def test_the_lines_that_a_reader_of_notebook_04_writes_are_judged(capsys):
    """Each of its three cells says: not written yet, right for the folded solution, and what differs for another."""
    (path,) = (path for path in NOTEBOOKS if path.name.startswith("04_"))
    cells = nbformat.read(path, as_version=4).cells
    source = {cell.id: cell.source for cell in cells}
    names = {"torch": torch, "pd": pd, "objectives": objectives}
    exec(source["check"], names)

    def answer(cell, line):
        exec(re.sub(r"return None.*", line, source[cell], count=1), names)
        return capsys.readouterr().out

    for name in ("advantages", "minimum", "kl"):
        (line,) = re.findall(r"```python\n(.+)\n```", source[f"{name}-solution"])
        cell = f"write-{name}"
        assert answer(cell, "return None").endswith(": not written yet\n")
        assert answer(cell, line).endswith(": right\n")
        assert "differs" in answer(cell, f"{line} * 1.01")
        assert "your shape is ()" in answer(cell, "return 0.0")
