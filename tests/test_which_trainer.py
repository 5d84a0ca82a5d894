"""Which trainer made a number is said once, in docs/results.md: every section with older runs stands in its table."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = (ROOT / "docs" / "results.md").read_text()
HEADING = "Which trainer made a number"
OLDER_DAY = re.compile(r"2026-11-2[1-5]")  # the loop trains since the 26th
# Measured on weights as they are, or on functions.
TRAINED_NOTHING = {
    "What real Qwens can do before any training",
    "Verdicts beside a teacher's",
    "How often an untrained model succeeds",
}


def sections():
    """Heading -> text, up to the next heading of any level."""
    parts = re.split(r"^##+ (.*)$", RESULTS, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def headings_with_older_runs():
    """Sections that name a day on which the trainer before the loop was still there."""
    return [
        heading
        for heading, text in sections().items()
        if OLDER_DAY.search(text)
        and heading not in TRAINED_NOTHING | {HEADING, "The notebooks: minutes and memory"}
    ]


@pytest.mark.parametrize("heading", headings_with_older_runs())
def test_a_section_with_older_runs_stands_in_the_table(heading):
    assert f"[{heading}](#" in sections()[HEADING].replace("[a hint", "[A hint").replace(
        "[a step", "[A step"
    )


def test_it_is_said_on_that_page_alone():
    pages = subprocess.check_output(
        ["git", "ls-files", "*.md", "notebooks/*.ipynb"], cwd=ROOT, text=True
    ).split()
    telling = [
        page
        for page in pages
        if page != "CHANGELOG.md"
        and "former trainer" in (ROOT / page).read_text(encoding="utf-8")
    ]
    assert set(telling) <= {
        "docs/results.md",
        "benchmarks/oracle/README.md",
        "notebooks/16_on_your_card.ipynb",
    }
