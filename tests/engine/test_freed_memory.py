"""What a step frees stays with the process while training runs, and goes back to the system afterwards."""

import os
import platform
import resource
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from loop_runs import make

from grpo_kit.engine import fast
from grpo_kit.engine.fast import kept_for_the_next_step

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
CPU = torch.device("cpu")


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def a_step(megabytes=160):
    """Blocks above and below what glibc maps on its own."""
    blocks = [torch.ones(2**18 * size) for size in (megabytes // 2, *[4] * (megabytes // 8))]
    return sum(block[-1].item() for block in blocks)


def count_pages():
    """New pages of a second step, outside and inside."""
    counts = []
    for inside in (nullcontext(), kept_for_the_next_step(CPU)):
        with inside:
            a_step()
            before = faults()
            a_step()
            counts.append(faults() - before)
    print(*counts)


@glibc
def test_a_second_step_gets_no_new_pages():
    """In a process of its own: where an earlier test left a large hole, glibc takes from it without being told."""
    code = "from test_freed_memory import count_pages; count_pages()"
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | path,
        capture_output=True,
        text=True,
        check=True,
    )
    fresh, kept = map(int, done.stdout.split())
    assert fresh > 10_000 and kept < fresh / 20, (fresh, kept)


@glibc
def test_a_malloc_that_somebody_set_up_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setattr(fast, "glibc", lambda: pytest.fail("asked for"))
    with kept_for_the_next_step(CPU):
        pass


@glibc
def test_afterwards_memory_goes_back():
    with kept_for_the_next_step(CPU):
        a_step(640)
        inside = resident()
    assert inside - resident() > 400 * 2**20


@glibc
def test_an_error_ends_it_too():
    with pytest.raises(KeyboardInterrupt), kept_for_the_next_step(CPU):
        a_step(640)
        inside = resident()
        raise KeyboardInterrupt
    assert inside - resident() > 400 * 2**20


def test_cards_and_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(fast, "glibc", lambda: pytest.fail("asked for"))
    with kept_for_the_next_step(torch.device("cuda")):
        pass
    monkeypatch.setattr(fast, "glibc", lambda: None)
    with kept_for_the_next_step(CPU):
        pass


@glibc
def test_training_is_inside(tmp_path, monkeypatch):
    asked = []
    real = fast.glibc()

    class Libc:
        malloc_trim = staticmethod(lambda pad: asked.append("trim") or real.malloc_trim(pad))
        mallopt = staticmethod(lambda *call: asked.append(call) or real.mallopt(*call))

    monkeypatch.setattr(fast, "glibc", lambda: Libc)
    trainer = make(tmp_path / "run", seams="fast", steps=1)
    assert not asked
    trainer.train()
    assert asked[:2] == [(-1, -1), (-4, 0)] and asked[-1] == "trim"
