"""Notebook 05 in marimo, skipped where it is not installed: `marimo convert`, without the cell that installs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("marimo")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each cell shows, by kind, and what it printed: [{kind: text}, printed]."""
    folder = tmp_path_factory.mktemp("marimo")
    source, app = ROOT / "notebooks/05_train_full.ipynb", folder / "app.py"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "KIT_PROFILE": "smoke",
        "KIT_RUNS": str(folder / "runs"),
        "PYTHONPATH": paths,
    }

    def marimo(*words):
        command = [sys.executable, "-m", "marimo", *map(str, words)]
        subprocess.run(
            command, cwd=folder, env=environment, check=True, capture_output=True, timeout=600
        )

    marimo("convert", source, "-o", app)
    code = app.read_text()
    first, rest = (
        code.index("app._unparsable_cell("),
        code.index("@app.cell", code.index("%pip")),
    )
    app.write_text(code[:first] + code[rest:])
    marimo("export", "html", app, "-o", folder / "app.html")
    (session,) = folder.glob("__marimo__/session/*.json")
    return [
        (
            {
                kind: str(value)
                for out in cell["outputs"]
                for kind, value in out.get("data", {}).items()
            },
            "".join(str(out.get("text", out.get("data", ""))) for out in cell["console"]),
        )
        for cell in json.loads(session.read_text())["cells"]
    ]


def test_it_runs_to_its_end_and_shows_chart_tables_and_completions(outputs):
    assert not any("Traceback" in printed for _, printed in outputs)
    pages = [shown.get("text/html", "") for shown, _ in outputs]
    (chart,) = [page for page in pages if "step 2/2 · done in" in page]
    assert chart.count("<svg") == 1 and "reward parts" in chart, (
        "the live chart, in the cell's one output"
    )
    assert "red flag" in chart and "Which number is the largest" in chart
    assert not any("step 2/2" in printed for _, printed in outputs), "no line a step beside it"
    assert any("% right, n = 8" in page for page in pages), (
        "a table's own page, with its sentence"
    )
    assert any("image/svg+xml" in shown for shown, _ in outputs), "plot_run"
