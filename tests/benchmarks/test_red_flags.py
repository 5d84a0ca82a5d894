"""Misses and false alarms over all recorded runs: the committed table is the command's, and it gets no worse."""

import re

import pytest

from benchmarks import foreign_logs
from benchmarks.red_flags import fixtures, laboratory, markdown, put_in
from benchmarks.result import RESULTS, ROOT


@pytest.fixture(scope="module")
def tables():
    return fixtures(), laboratory(), put_in()


def test_the_committed_table_is_that_of_the_command(tables):
    assert (RESULTS / "red_flags.md").read_text() == markdown(*tables)


def test_fixtures_are_told_apart(tables):
    runs = tables[0]
    missed = [r.run for r in runs.itertuples() if not set(r.expected) <= set(r.flags)]
    alarms = [r.run for r in runs[runs["kind"] == "healthy"].itertuples() if r.flags or r.blind]
    assert (missed, alarms) == ([], [])


def test_failures_that_no_recorded_run_had_are_named(tables):
    failures = tables[2]
    assert len(failures) >= 12
    assert failures["named"].tolist() == failures["runs"].tolist()
    before = (RESULTS / "red_flags_before.md").read_text()
    found = [line.split(" | ") for line in before.splitlines() if " | 23 | " in line]
    assert len(found) == len(failures) and sum(int(line[-1].strip(" |")) for line in found) == 2


def test_arms_that_fall_behind_by_old_rollouts_are_seen(tables):
    arms = tables[1].set_index("arm")
    seen = arms.loc[
        ["sync 20", "sync 10", "sync 10, no weights", "oldest first", "4 iterations"], "flagged"
    ]
    assert seen.tolist() == [5, 5, 5, 3, 5]
    assert arms["worse"].sum() == 7 and arms.loc[~arms["worse"], "flagged"].sum() == 1


def test_recorded_runs_name_no_folder_of_a_machine():
    files = [*(ROOT / "tests" / "fixtures" / "flags").rglob("*.*"), *RESULTS.rglob("*.*")]
    texts = {
        path: path.read_text()
        for path in files
        if path.suffix in (".json", ".csv", ".md", ".jsonl")
    }
    assert len(texts) > 100
    named = [
        str(path)
        for path, text in texts.items()
        if re.search(r"/(root|home|Users|tmp)/|\.cache/", text)
    ]
    assert not named


def test_what_is_said_of_published_runs_is_the_committed_table(tmp_path, monkeypatch):
    committed = (RESULTS / "foreign_logs.json").read_text()
    monkeypatch.setattr(foreign_logs, "RESULTS", tmp_path)
    foreign_logs.main()
    assert (tmp_path / "foreign_logs.json").read_text() == committed
    assert (tmp_path / "foreign_logs.md").read_text() == (
        RESULTS / "foreign_logs.md"
    ).read_text()
