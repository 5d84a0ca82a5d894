"""From the first cell to the first picture: CPU seconds that a notebook takes until its training shows a chart.

    python -m benchmarks.first_picture --runs 5
    python -m benchmarks.first_picture --runs 5 --before ../an_older_checkout

Executes notebook 05 in a fresh kernel, cell by cell, until a cell has shown a picture, and asks the kernel's clock of
CPU time after each cell and at the picture. Before that, `import grpo_kit` alone in fresh interpreters. CPU time counts
all threads of the process, and what other programs do on the machine hardly changes it. --before measures another
checkout of the kit in turn with this one. Writes results/first_picture.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

from benchmarks.result import RESULTS, ROOT, command_line, origin, save, spread

IMPORT = "import time; import grpo_kit; print(time.process_time())"
# The hook sees every message with a display, on its way out.
PRELUDE = """
import json as _json, time as _time
_began = _time.process_time(), _time.perf_counter()
_clock = lambda: [_time.process_time() - _began[0], _time.perf_counter() - _began[1]]
_seen, _ends = [], []
def _look(message):
    data = message["content"].get("data", {}) if isinstance(message, dict) else {}
    if not _seen and any(kind.startswith("image/") for kind in data):
        _seen.extend(_clock())
    return message
get_ipython().display_pub.register_hook(_look)
get_ipython().events.register("post_run_cell", lambda result: _ends.append(_clock()))
_began = _time.process_time(), _time.perf_counter()
"""
REPORT = "print(_json.dumps({'picture': _seen, 'cells': _ends}))"


def seconds_of_import(kit: Path) -> float:
    """CPU seconds of an interpreter that imports the kit of this checkout and nothing else."""
    # With -c the folder that it runs in comes before PYTHONPATH.
    how = {"cwd": kit, "env": _environment(kit), "capture_output": True, "text": True, "check": True}
    return float(subprocess.run([sys.executable, "-c", IMPORT], **how).stdout)


def first_picture(kit: Path, profile: str) -> dict[str, float]:
    """CPU and wall seconds of one kernel: until the cell of imports ended, and until the first picture."""
    notebook = nbformat.read(kit / "notebooks" / "05_train_full.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells.insert(0, nbformat.v4.new_code_cell(PRELUDE))
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(kit) | {"KIT_PROFILE": profile, "KIT_RUNS": folder}
        client = nbclient.NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": folder}})
        with client.setup_kernel(env=environment):
            for place, cell in enumerate(notebook.cells):
                client.execute_cell(cell, place)
                if any(kind.startswith("image/") for out in cell.outputs for kind in out.get("data", {})):
                    break
            # One cell more, behind those of the notebook, which are not all run.
            report = nbformat.v4.new_code_cell(REPORT)
            notebook.cells.append(report)
            client.execute_cell(report, len(notebook.cells) - 1)
    said = json.loads(report.outputs[0].text)
    return {
        "first cell": said["cells"][1][0],
        "first picture": said["picture"][0],
        "first picture, wall": said["picture"][1],
    }


def _environment(kit: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(kit), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def main() -> None:
    """Measure in turn, save, print."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profiles", nargs="+", default=["smoke"])
    parser.add_argument("--before", type=Path, help="another checkout of the kit, measured in turn")
    options = parser.parse_args()
    kits = {"before": options.before.resolve()} if options.before else {}
    kits["now"] = ROOT
    found: dict[str, dict[str, list[float]]] = {who: {} for who in kits}
    for _ in range(options.runs):
        for who, kit in kits.items():
            found[who].setdefault("import grpo_kit", []).append(seconds_of_import(kit))
            for profile in options.profiles:
                for what, seconds in first_picture(kit, profile).items():
                    found[who].setdefault(f"{profile}: {what}", []).append(seconds)
    command = f"python -m benchmarks.first_picture --runs {options.runs}"
    command += f" --profiles {' '.join(options.profiles)}" + " --before <a checkout>" * bool(options.before)
    result: dict[str, Any] = origin(command, "torch", "transformers", "peft")
    result |= {"n": options.runs, "unit": "CPU seconds, all threads; wall where it says so"}
    result |= {
        who: {what: spread(v) | {"all": v} for what, v in names.items()} for who, names in found.items()
    }
    print(save(RESULTS, "first_picture", result))
    for who, names in found.items():
        for what, values in names.items():
            print(f"{who:7} {what:32} {spread(values)['median']:6.2f}")


if __name__ == "__main__":
    main()
