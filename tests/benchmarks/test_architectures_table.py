"""The table of docs/models.md is the committed result, and nothing in it differs or failed."""

import json
from pathlib import Path

from benchmarks.architectures import FAMILIES, row, table

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/architectures.json").read_text())


def test_the_page_has_the_committed_table():
    page = (ROOT / "docs/models.md").read_text()
    assert table(RESULT) in page and RESULT["command"] in page and RESULT["date"] in page
    assert [*RESULT["families"]] == [*FAMILIES]
    said = " ".join(
        str(cell) for found in RESULT["families"].values() for cell in found.values()
    )
    assert not any(bad in said for bad in ("DIFFERS", "FAILED", "NO,"))


def test_a_row_says_today_what_the_result_says():
    """One family through all columns: words, not digits."""
    from grpo_kit import load_policy

    found, kept = (
        row("olmo2", load_policy("tiny-random", quiet=True)[1]),
        RESULT["families"]["olmo2"],
    )
    assert {
        name: str(cell).split(", off")[0] for name, cell in found.items() if name != "seconds"
    } == {
        name: str(cell).split(", off")[0]
        for name, cell in kept.items()
        if name not in ("seconds", "GGUF")
    }
