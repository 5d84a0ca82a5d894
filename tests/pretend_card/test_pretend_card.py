"""The CUDA path without a card: all tests of a card, on a pretend one, in a process of its own.

The pretend card must be loaded before torch. `make card` runs this file where there is no card, and the same tests
directly where there is one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))  # build.py is found by the card's own files as a neighbour

import build  # noqa: E402

ALL = ["../engine/test_cuda.py", "card_tests"]
STEPS = "card_tests/test_beside_the_cpu.py::test_three_steps_are_the_cpus"
RUNS = {  # name: (card, environment, tests)
    "rtx4090": (
        "rtx4090",
        {},
        [*ALL, "--ignore=card_tests/t4", "--ignore=card_tests/without_triton"],
    ),
    "t4": (
        "t4",
        {},
        ["card_tests/t4", *(f"{STEPS}[{kind}]" for kind in ("float16, scaler", "QLoRA"))],
    ),
    "without_triton": ("rtx4090", {"PRETEND_TRITON": "0"}, ["card_tests/without_triton"]),
}


@pytest.fixture(scope="module")
def built():
    if torch.cuda.is_available():
        pytest.skip("this machine has a real card: the tests run on it")
    try:
        return build.library()
    except build.NotHere as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("run", RUNS)
def test_on_a_pretend_card(run, built):
    card, environment, tests = RUNS[run]
    environment = os.environ | {"PRETEND_CARD": card} | environment
    environment.pop("PYTEST_XDIST_WORKER", None)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), str(ROOT), environment.get("PYTHONPATH", "")]
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "card_plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    command += ["--tb=short", "--durations=10", *tests]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    print(done.stdout[-4000:])
    if done.returncode:
        pytest.fail(readable(done.stdout, done.stderr), pytrace=False)


def readable(out, error):
    """What pytest said of what failed, without what passed."""
    found = re.search(r"^=+ (FAILURES|ERRORS) =+$.*", out, re.M | re.S)
    return found[0] if found else f"{out[-3000:]}\n{error[-3000:]}"


def test_a_failure_is_told_whole():
    said = "..F\n===== FAILURES =====\n__ test_x __\nE  assert 1 == 2\n==== short test summary info ===="
    assert readable(said, "").startswith("===== FAILURES")
    assert "no library" in readable("", "ImportError: no library")


def test_a_library_is_not_taken_from_another_environment(tmp_path):
    """It looks for torch where torch lay when it was compiled; the cache outlives an environment."""
    assert build._digest("2.9.0", tmp_path / "one") != build._digest(
        "2.9.0", tmp_path / "other"
    )
