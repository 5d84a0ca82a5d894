"""Where memory is short, what an update frees goes back to the system, however it lies between what is in use."""

import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from loop_runs import make

from grpo_kit.engine import _update_memory
from grpo_kit.engine.memory import _free
from grpo_kit.engine.memory._free import without_holes

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
CPU = torch.device("cpu")
MIB = 2**20


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def hold_every_second():
    """MiB that the process holds for 320 MiB in use, among as much that was freed."""
    before = resident()
    blocks = [torch.ones(16 * MIB // 4) for _ in range(40)]
    blocks = blocks[::2]
    return (resident() - before) // MIB


def held_in_a_process_of_its_own(around):
    """Where an earlier test left a large hole, glibc takes from it without being told."""
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    code = "from test_freed_memory import *\ntorch.ones(31 * MIB // 4)\n"  # what it freed, glibc keeps from now on
    code += f"with {around}:\n    print(hold_every_second())"
    run = partial(subprocess.run, env=os.environ | path, capture_output=True, text=True)
    return int(run([sys.executable, "-c", code], check=True).stdout)


@glibc
def test_freed_blocks_between_those_in_use_go_back():
    assert held_in_a_process_of_its_own("nullcontext()") > 600
    assert held_in_a_process_of_its_own("without_holes(CPU)") < 340


@glibc
def test_a_malloc_that_somebody_set_up_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert _free._glibc() is None


def test_cards_and_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(_free, "_glibc", lambda: pytest.fail("asked for"))
    with without_holes(torch.device("cuda")):
        pass
    monkeypatch.setattr(_free, "_glibc", lambda: None)
    with without_holes(CPU):
        pass


@glibc
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(
    "gib, wanted", [(2**20, []), (2**-10, ["trim", (-3, MIB), (-3, 32 * MIB)] * 2)]
)
def test_an_update_gives_back_where_memory_is_short(
    tmp_path, monkeypatch, stopped, gib, wanted
):
    """And leaves glibc alone where half of what is free would do as well: there giving back takes a third longer."""
    asked = []
    real = _free._glibc()

    class Libc:
        malloc_trim = staticmethod(lambda pad: asked.append("trim") or real.malloc_trim(pad))
        mallopt = staticmethod(lambda *call: asked.append(call) or real.mallopt(*call))

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_free, "_glibc", lambda: Libc)
    monkeypatch.setattr(_update_memory, "free_bytes", lambda device: int(gib * 2**30))
    trainer = make(tmp_path / "run", seams="fast", steps=1)
    if stopped:
        monkeypatch.setattr(trainer.update, "_forward", stop)
    with pytest.raises(KeyboardInterrupt) if stopped else nullcontext():
        trainer.train()
    assert asked == wanted
