"""What Linux alone has is taken away before the kit is imported: the rest works, and what needs it says so.

No macOS and no Windows: torch, transformers and Python's own modules keep what they have found. What runs here is each
line of the kit.
"""

from pathlib import Path

import forked
import pytest

from grpo_kit.record import _run_folder as run_lock
from grpo_kit.record._run_folder import GOING, alone, is_locked

ROOT = Path(__file__).parent.parent
WITHOUT = """
import os, select, signal, sys
import datasets, filelock, matplotlib.pyplot, pandas, peft, psutil, torch, transformers  # with all that they find
import subprocess, multiprocessing, asyncio
for name in ("fork", "register_at_fork", "sched_getaffinity", "killpg", "setsid", "getuid", "geteuid", "uname",
             "sysconf", "pidfd_open"):
    delattr(os, name)
del select.poll, signal.SIGKILL, signal.SIGUSR1
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
"""


EVERY_MODULE = """
import importlib, pkgutil, grpo_kit
alone = ("launcher", "confinement", "folders", "program_watch", "interpreter", "__main__")
for module in pkgutil.walk_packages(grpo_kit.__path__, "grpo_kit."):
    if module.name.split(".")[-1] not in alone and "bridges" not in module.name:
        importlib.import_module(module.name)
print("all modules")
"""
A_RUN = """
import grpo_kit as kit
from grpo_kit.more.code import sandbox
real = sandbox.platform.system
sys.platform, sandbox.platform.system = "win32", lambda: "Windows"  # after what they import
try:
    sandbox.run_python("print(1)")
except sandbox.SandboxUnavailableError as error:
    print(error)
try:
    sandbox.run_python("print(1)", allow_unsafe=True)
except sandbox.SandboxUnavailableError as error:
    print(error)
sys.platform = "linux"
cfg = kit.preset("smoke", save_steps=1)
model, tokenizer = kit.load_policy(cfg.model, quiet=True)
task = kit.tasks.largest(n_train=8, n_held_out=8)
trainer = kit.GRPOTrainer(model, task, cfg, tokenizer=tokenizer, folder=sys.argv[1] + "/run")
trainer.train()
print("step", trainer.step, sorted(p.name for p in trainer.folder.glob("checkpoint-*")))
sandbox.platform.system = real
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What one process prints that imports every module and then trains; the run first, so that it loads its own."""
    words = [WITHOUT + A_RUN + EVERY_MODULE, str(tmp_path_factory.mktemp("systems"))]
    done = forked.bare().run("-c", *words, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_every_module_is_imported_without_what_linux_alone_has(said):
    """But those of the launcher, a process that is never started there, and TRL's and vLLM's."""
    assert said.endswith("all modules\n")


def test_a_run_with_checkpoints_and_the_sandboxs_no(said):
    assert "isolation needs Linux on x86-64 or aarch64, and this is Windows" in said
    assert "which Windows does not have; run it in WSL" in said
    assert "step 2 ['checkpoint-2']" in said


def test_a_lock_that_keeps_others_from_reading_and_writing_is_a_run_that_goes_on(
    tmp_path, monkeypatch
):
    """As Windows locks: neither its own process nor another one reads, writes or removes the file meanwhile."""
    held = []

    def refuses(method):
        def either(path, *args, **kwargs):
            if held and Path(path).name == GOING:
                raise PermissionError(13, "locked", str(path))
            return method(path, *args, **kwargs)

        return either

    for name in ("write_bytes", "unlink"):
        monkeypatch.setattr(Path, name, refuses(getattr(Path, name)))
    monkeypatch.setattr(run_lock, "open", refuses(open), raising=False)
    with alone(tmp_path):
        held.append(True)
        with alone(tmp_path):
            pass
        held.clear()
        assert is_locked(tmp_path) is True
        held.append(True)
    held.clear()
    assert not is_locked(tmp_path)
