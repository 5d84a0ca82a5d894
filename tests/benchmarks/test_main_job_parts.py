"""Where the main job's seconds went: the clock of an executed notebook, and that notebook 05 has every part."""

import json
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from benchmarks.main_job_parts import CELLS, PARTS, part_of, seconds_by_part, seconds_of_run

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "05_train_full.ipynb"


def executed():
    """Ten cells of 1, 2, 4, ... seconds in the main job's order; 2000 seconds in all."""
    sources = [
        "import grpo_kit as kit",
        "task = cfg.make_task()",
        "kit.load_policy(cfg.model)",
        "data = 1",
    ]
    sources += [
        "before = kit.evaluate(m)",
        "trainer = kit.GRPOTrainer(m)",
        "trainer.train()",
        "plot()",
    ]
    sources += ["after = kit.evaluate(m)", "kit.model_card(f)"]
    cells = [
        new_code_cell(source, metadata={"papermill": {"duration": 2.0**i}})
        for i, source in enumerate(sources)
    ]
    notebook = new_notebook(
        cells=[new_markdown_cell("trainer.train()"), *cells, new_code_cell("never run")]
    )
    notebook.metadata["papermill"] = {"duration": 2000.0}
    return notebook


def test_every_second_is_in_one_part():
    found = seconds_by_part(executed(), step_seconds=24.0)
    assert found == {
        "kernel": 2000 - 1023, "imports": 1, "data": 2 + 8, "loading": 4, "first evaluation": 16, "trainer": 32,
        "to the first step": 64 - 24, "training": 24, "last evaluation": 256, "rest": 128 + 512, "all": 2000,
    }  # fmt: skip
    assert set(found) == {*PARTS, "all"}


def test_without_steps_and_without_papermills_whole_time():
    notebook = executed()
    del notebook.metadata["papermill"]
    found = seconds_by_part(notebook)
    assert (
        found["training"] == 64
        and found["to the first step"] == found["kernel"] == 0
        and found["all"] == 1023
    )


def test_the_first_step_ends_where_metrics_has_its_row(tmp_path):
    rows = [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, "seconds": 30.5},
        {"step": 2, "seconds": 40.0},
    ]
    lines = map(json.dumps, [*rows, {"step": 3, "seconds": 50.5}])
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    nbformat.write(executed(), tmp_path / "run.ipynb")
    found = seconds_of_run(tmp_path, tmp_path / "run.ipynb")
    assert found["training"] == pytest.approx(20) and found[
        "to the first step"
    ] == pytest.approx(44)


def test_notebook_05_has_one_cell_of_each():
    cells = [
        cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"
    ]
    assert sorted(filter(None, (part_of(cell.source) for cell in cells))) == sorted(CELLS)
