"""What `make lowest` and `make newest` found: counts of their tests, and the main job in smoke on the same versions.

    make newest PYTHON=/path/to/python3.14 && python -m benchmarks.sets newest
    make lowest PYTHON=/path/to/python3.11 && python -m benchmarks.sets lowest

The targets leave pytest's own report, tests.xml, in the set's environment; that is read, with those of tests that were
run again alone (again.xml, by --junitxml). The environment is asked for its versions, and
`python -m grpo_kit train largest --preset smoke` runs there. Adds to benchmarks/results/sets.json, of which a row of
docs/systems.md is made.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.result import RESULTS, ROOT, command_line, read_result, write_result
from grpo_kit.models._model_facts import hardware

SETS = ("lowest", "newest")
RESULT = RESULTS / "sets.json"
_PACKAGES = ("torch", "transformers", "peft", "datasets", "numpy", "pandas", "pyarrow", "trl")
_VERSIONS = (
    "import json, platform, sys; from importlib.metadata import version; "
    "print(json.dumps({'Python': platform.python_version()} | {n: version(n) for n in sys.argv[1:]}))"
)


def counted(*reports: Path) -> dict[str, Any]:
    """Of pytest's JUnit reports: date, seconds, counts, names of tests that failed, and skips by reason.

    A test that passed and then failed in its teardown is one that failed. Of a test in several reports the last one
    counts; what failed in an earlier one is named.
    """
    outcomes, reasons, seconds, date, failed = {}, {}, 0.0, "", set()
    for report in reports:
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
        here = {}
        for case in suite.iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            tags = {child.tag for child in case}
            how = (
                "failed"
                if tags & {"error", "failure"}
                else "skipped"
                if "skipped" in tags
                else "passed"
            )
            here[name] = "failed" if here.get(name) == "failed" else how
            if how == "skipped":
                reasons[name] = " ".join((case.find("skipped").get("message") or "").split())
        outcomes |= here
        failed |= {name for name, how in here.items() if how == "failed"}
        seconds, date = seconds + float(suite.get("time", 0)), suite.get("timestamp", "")[:10]
    counts = Counter(outcomes.values())
    still = {name for name, how in outcomes.items() if how == "failed"}
    return {
        "date": date,
        "seconds": round(seconds),
        **{how: counts[how] for how in ("passed", "failed", "skipped")},
        "failed tests": sorted(still),
        "failed at first, passed since": sorted(failed - still),
        "skipped because": dict(
            Counter(
                why for name, why in reasons.items() if outcomes[name] == "skipped"
            ).most_common()
        ),
    }


def main_job(python: Path) -> dict[str, Any]:
    """The main job in smoke by that interpreter: seconds, and the last line that it printed, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), "-m", "grpo_kit", "train", "largest", "--preset", "smoke"]
        start = time.monotonic()
        ran = subprocess.run(
            [*command, "--folder", f"{folder}/run"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        said = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().splitlines()
    ended = {"ended with": ran.returncode, "seconds": round(time.monotonic() - start)}
    return ended | ({} if ran.returncode == 0 else {"said": said[-1:]})


def cells(found: dict[str, Any]) -> str:
    """Of a set's row in docs/systems.md: versions, tests, main job, date."""
    versions = ", ".join(
        found["versions"][name] for name in ("Python", "torch", "transformers")
    )
    counts = f"{found['passed']:,} passed, {found['failed']} failed, {found['skipped']} skipped"
    job = "runs" if found["main job, smoke"]["ended with"] == 0 else "fails"
    return f"{versions} | {counts}, {found['seconds'] / 60:.0f} min, {found['date']} | {job}"


def main() -> None:
    """The sets that are asked for, added to the result."""
    parser = command_line(__doc__)
    parser.add_argument("sets", nargs="+", choices=SETS)
    asked = parser.parse_args()
    saved = read_result(RESULT, command="", sets={})
    for name in asked.sets:
        folder = ROOT / f".venv-{name}"
        python = folder / "bin" / "python"
        versions = subprocess.run(
            [python, "-c", _VERSIONS, *_PACKAGES], capture_output=True, check=True
        )
        saved["sets"][name] = {
            "hardware": hardware(),
            "versions": json.loads(versions.stdout),
            **counted(folder / "tests.xml", *sorted(folder.glob("again*.xml"))),
            "main job, smoke": main_job(python),
        }
        print(cells(saved["sets"][name]))
    saved["command"] = f"python -m benchmarks.sets {' '.join(saved['sets'])}"
    write_result(RESULT, saved)


if __name__ == "__main__":
    main()
