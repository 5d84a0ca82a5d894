"""A forked process ends, prints and is killed as `python WORDS` of a fresh interpreter does."""

import signal
import subprocess
import sys
import time

import forked
import pytest

ENDS = {
    "a number": "import sys; print('before'); sys.exit(3)",
    "a text": "import sys; sys.exit('no')",
    "an error": "print('before'); 1 / 0",
    "the stop button": "raise KeyboardInterrupt",
    "its last words": "import atexit; atexit.register(print, 'last'); print('first')",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "where and as whom": "import os, sys; print(__name__, sys.argv, os.environ['WHO'], os.getcwd(), sys.path[0])",
}


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_an_interpreter_does(end, tmp_path):
    words, environment = ["-c", ENDS[end], "a", "b"], {"WHO": "me", "PATH": "/bin"}
    found = forked.run(*words, cwd=tmp_path, environment=environment)
    wanted = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (wanted.returncode, wanted.stdout)
    assert found.stderr.splitlines()[-1:] == wanted.stderr.splitlines()[-1:]


def test_scripts_and_modules(tmp_path):
    (tmp_path / "neighbour.py").write_text("name = 'beside'")
    (tmp_path / "script.py").write_text(
        "import sys, neighbour; print(neighbour.name, *sys.argv[1:], __file__)"
    )
    assert (
        forked.run(tmp_path / "script.py", "x").stdout == f"beside x {tmp_path / 'script.py'}\n"
    )
    assert (
        forked.run("-m", "script", "y", cwd=tmp_path).stdout
        == f"beside y {tmp_path / 'script.py'}\n"
    )


def test_it_is_killed_and_the_next_one_knows_nothing_of_it():
    child = forked.start(
        "-c", "import time, torch; torch.here = 1; print('on', flush=True); time.sleep(60)"
    )
    while "on" not in child.text("out"):
        time.sleep(0.01)
    assert child.poll() is None
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert forked.run("-c", "import torch; print(hasattr(torch, 'here'))").stdout == "False\n"
