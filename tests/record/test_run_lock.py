"""One notion of a run that goes on, asked at any moment."""

import subprocess
import sys
import time
from pathlib import Path

import grpo_kit
from grpo_kit.record._run_folder import GOING, MARK, is_locked

TRAINS = """
import sys, time
from pathlib import Path
from grpo_kit.record._run_folder import alone
end = time.monotonic() + 4
while time.monotonic() < end:
    with alone(Path(sys.argv[1])):
        pass
"""


def test_a_run_that_ends_while_somebody_looks_was_not_killed(tmp_path):
    """Between a file that comes or goes and its lock there is a moment, and whoever looks makes a file himself."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINS, str(tmp_path)], cwd=Path(grpo_kit.__file__).parents[1]
    )
    found = {True: 0, False: 0, None: 0}
    while process.poll() is None:
        found[is_locked(tmp_path)] += 1
    assert process.returncode == 0
    assert found[False] == 0 and found[True] and found[None], found
    assert is_locked(tmp_path) is None


def test_a_killed_run_was_killed(tmp_path):
    waits = (
        f"{TRAINS.partition('end =')[0]}\nwith alone(Path(sys.argv[1])):\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", waits, str(tmp_path)], cwd=Path(grpo_kit.__file__).parents[1]
    )
    while is_locked(tmp_path) is None or (tmp_path / GOING).read_bytes() != MARK:
        time.sleep(0.02)
    assert is_locked(tmp_path) is True
    process.kill()
    process.wait()
    assert is_locked(tmp_path) is False and is_locked(tmp_path) is False, (
        "asking changes nothing"
    )
