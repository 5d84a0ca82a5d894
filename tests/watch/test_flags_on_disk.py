"""flags.jsonl: a line cut short stops nobody, and a full disk loses no flag."""

import json
from dataclasses import asdict

import pytest

from grpo_kit.watch.monitor import Flag, Monitor, read_flags
from tests.record.test_run_log import in_python

FLAG = Flag("cut off", 3, "90 %", "why", "first")
LINE = json.dumps(asdict(FLAG)) + "\n"


@pytest.mark.parametrize(
    "cut", [LINE[:20], LINE[:20] + "\n", LINE[:20] + "\xe9", '{"name": "cut off"}\n']
)
def test_a_line_cut_short_is_left_out_and_said(tmp_path, cut):
    (tmp_path / "flags.jsonl").write_bytes((LINE + cut).encode("latin-1"))
    with pytest.warns(RuntimeWarning, match="line 2 is no whole flag"):
        assert read_flags(tmp_path) == [FLAG]
    (tmp_path / "flags.jsonl").write_bytes((cut.rstrip("\n") + "\n" + LINE).encode("latin-1"))
    with pytest.warns(RuntimeWarning, match="line 1 "):
        assert read_flags(tmp_path) == [FLAG], "in the middle too"


def test_a_run_that_goes_on_after_a_cut_line_raises_that_flag_again(tmp_path):
    row = {"step": 1, "eval/one_answer": 1.0, "eval/one_gold": 0.1}
    (tmp_path / "flags.jsonl").write_text(LINE + '{"name": "lost upd')
    monitor = Monitor("warn")
    with pytest.warns(RuntimeWarning, match="line 2"):
        monitor.begin(tmp_path, {}, [row])
    assert [flag.name for flag in monitor.step({"step": 2})] == ["one answer"]
    assert [flag.name for flag in read_flags(tmp_path)] == ["cut off", "one answer"]
    assert (tmp_path / "flags.jsonl").read_text().count("\n") == 2


FULL_DISK = """
import resource, sys, warnings
from pathlib import Path
from grpo_kit.watch.monitor import Monitor, read_flags

folder = Path(sys.argv[1])
got = []
monitor = Monitor(got.append)
monitor.begin(folder, {}, [])
free = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, free[1]))  # room for a part of a line
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    (flag,) = monitor.step({"step": 1, "eval/one_answer": 1.0, "eval/one_gold": 0.1})
    assert flag.name == "one answer"
    assert monitor.step({"step": 2}) == [], "once"
    assert not monitor.flush()
assert [flag.name for flag in got] == ["one answer"], "shown all the same"
assert len(caught) == 1 and "kept in memory" in str(caught[0].message), [str(c.message) for c in caught]
assert (folder / "flags.jsonl").read_bytes() == b"", "no half line"
monitor.begin(folder, {}, [])
assert monitor.step({"step": 3, "eval/one_answer": 1.0, "eval/one_gold": 0.1}) == [], "it waits, so it is known"
resource.setrlimit(resource.RLIMIT_FSIZE, free)
monitor.step({"step": 4})
assert [flag.name for flag in read_flags(folder)] == ["one answer"] and monitor.flush()
"""


def test_a_full_disk_loses_no_flag(tmp_path):
    process = in_python(FULL_DISK, str(tmp_path))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_what_cannot_be_written_is_raised_all_the_same(tmp_path):
    (tmp_path / "flags.jsonl").mkdir()
    monitor = Monitor("warn")
    monitor.begin(tmp_path, {}, [])
    with pytest.warns(RuntimeWarning, match="kept in memory"):
        assert (
            monitor.step({"step": 1, "eval/one_answer": 1.0, "eval/one_gold": 0.1})[0].name
            == "one answer"
        )
    (tmp_path / "flags.jsonl").rmdir()
    monitor.step({"step": 2})
    assert [flag.name for flag in read_flags(tmp_path)] == ["one answer"]
