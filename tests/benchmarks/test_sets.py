"""Counts of the sets of versions: read from pytest's report, and the page has what the result says."""

from pathlib import Path

import pytest

from benchmarks.result import read_result
from benchmarks.sets import RESULT, cells, counted, main_job

ROOT = Path(__file__).parents[2]
REPORT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" errors="1" failures="1" skipped="2" tests="6"
time="61.4" timestamp="2026-11-27T13:10:00.1+00:00">
<testcase classname="a" name="good" time="1" />
<testcase classname="a" name="bad"><failure message="no">x</failure></testcase>
<testcase classname="a" name="one"><skipped message="no  card" /></testcase>
<testcase classname="b" name="one"><skipped message="no card" /></testcase>
<testcase classname="b" name="late" /><testcase classname="b" name="late"><error message="teardown">x</error></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted(tmp_path):
    (tmp_path / "tests.xml").write_text(REPORT)
    assert counted(tmp_path / "tests.xml") == {
        "date": "2026-11-27",
        "seconds": 61,
        "passed": 1,
        "failed": 2,
        "skipped": 2,
        "failed tests": ["a::bad", "b::late"],
        "failed at first, passed since": [],
        "skipped because": {"no card": 2},
    }


def test_the_last_report_counts(tmp_path):
    (tmp_path / "tests.xml").write_text(REPORT)
    again = '<testsuite time="2" timestamp="2026-11-28T01"><testcase classname="a" name="bad" /></testsuite>'
    (tmp_path / "again.xml").write_text(again)
    found = counted(tmp_path / "tests.xml", tmp_path / "again.xml")
    assert (found["passed"], found["failed"], found["seconds"], found["date"]) == (
        2,
        1,
        63,
        "2026-11-28",
    )
    assert found["failed at first, passed since"] == ["a::bad"] and found["failed tests"] == [
        "b::late"
    ]


def test_an_interpreter_without_the_kit_fails_the_main_job(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named torch' >&2\nexit 1\n")
    python.chmod(0o755)
    found = main_job(python)
    assert (found["ended with"], found["said"]) == (1, ["No module named torch"])


@pytest.mark.parametrize("name", read_result(RESULT)["sets"])
def test_the_page_says_what_the_result_says(name):
    found = read_result(RESULT)["sets"][name]
    page = (ROOT / "docs/systems.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {name}"))
    assert cells(found) in row
    assert found["passed"] > 3000
