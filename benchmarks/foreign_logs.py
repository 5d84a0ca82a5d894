"""What kit.diagnose says of runs that others published, beside a reading by hand.

python -m benchmarks.foreign_logs extract FOLDER_OF_NOTEBOOKS    numbers of stored outputs -> results/foreign_logs/*.csv
python -m benchmarks.foreign_logs                                diagnose them -> results/foreign_logs.json and .md

The notebooks are those of github.com/unslothai/notebooks (folder nb/); a run that stands in several is taken once. The
reading by hand (foreign_logs/by_hand.json) was made from the numbers before their diagnosis was seen.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from benchmarks.result import RESULTS, command_line
from grpo_kit.more.bridges.diagnose import LogError, diagnose

LOGS = RESULTS / "foreign_logs"
BY_HAND = LOGS / "by_hand.json"


def extract(notebooks: Path) -> None:
    """The logged numbers of each notebook as a CSV; runs with the same numbers once, under the first name."""
    LOGS.mkdir(exist_ok=True)
    known: set[str] = set()
    for path in sorted(notebooks.glob("*.ipynb")):
        try:
            table = diagnose(path).metrics
        except LogError:
            print(f"{path.name}: no stored run")
            continue
        text = table.to_csv(index=False, float_format="%.6g")
        if text not in known:
            known.add(text)
            (LOGS / f"{path.stem}.csv").write_text(text)


def main() -> None:
    """Diagnose every log; count flags that the reading has too, that it has not, and that are missing."""
    hand = json.loads(BY_HAND.read_text()) if BY_HAND.is_file() else {}
    rows = []
    for path in sorted(LOGS.glob("*.csv")):
        found = diagnose(path)
        flags = {flag.name: flag.step for flag in found.flags}
        read = hand.get(path.stem, {})
        rows.append({
            "run": path.stem, "steps": len(found.metrics), "said": found.sentence, "flags": flags, "by hand": read,
            "both": sorted({*flags} & {*read}), "false alarms": sorted({*flags} - {*read}),
            "missed": sorted({*read} - {*flags}), "cannot be told": sorted(found.untold),
        })  # fmt: skip
    counts = {
        name: sum(len(row[name]) for row in rows) for name in ("both", "false alarms", "missed")
    }
    data = {"command": "python -m benchmarks.foreign_logs", "runs": rows, "counts": counts}
    (RESULTS / "foreign_logs.json").write_text(json.dumps(data, indent=1) + "\n")
    table = pd.DataFrame(rows)[["run", "steps", "both", "false alarms", "missed"]]
    table = table.map(lambda cell: ", ".join(cell) if isinstance(cell, list) else str(cell))
    lines = [
        "| " + " | ".join(row) + " |"
        for row in [list(table), ["---"] * 5, *table.to_numpy().tolist()]
    ]
    said, read = counts["both"] + counts["false alarms"], counts["both"] + counts["missed"]
    head = (
        f"`kit.diagnose` on {len(rows)} published runs, from the outputs stored in the notebooks of "
        f"github.com/unslothai/notebooks (commit bdda2ef): {counts['both']} of its {said} flags stand in a reading by "
        f"hand too, and {counts['both']} of the {read} flags of that reading were raised. The reading was made from "
        "the numbers alone, before any diagnosis was seen; no log has entropy or gradient norms. KL drift is a later "
        "flag, which the reading could not have: all of them count as false alarms here. "
        "`python -m benchmarks.foreign_logs`"
    )
    (RESULTS / "foreign_logs.md").write_text("\n".join([head, "", *lines]) + "\n")
    print(counts)


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("what", nargs="?", choices=("extract",), help="read notebooks first")
    parser.add_argument("folder", nargs="?", type=Path, help="of the notebooks")
    asked = parser.parse_args()
    extract(asked.folder) if asked.what else main()
