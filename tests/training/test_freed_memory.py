"""What a step frees stays with the process while training runs, and goes back to the system afterwards."""

import platform
import resource
from pathlib import Path

import pytest
import torch
from tiny_run import make

from grpo_kit.training import freed_memory
from grpo_kit.training.freed_memory import kept_for_the_next_step

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


@glibc
def test_a_second_step_gets_no_new_pages():
    a_step()
    before = faults()
    a_step()
    fresh = faults() - before
    with kept_for_the_next_step(CPU):
        a_step()
        before = faults()
        a_step()
        kept = faults() - before
    assert fresh > 10_000 and kept < fresh / 20, (fresh, kept)


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
    monkeypatch.setattr(freed_memory, "_glibc", lambda: pytest.fail("asked for"))
    with kept_for_the_next_step(torch.device("cuda")):
        pass
    monkeypatch.setattr(freed_memory, "_glibc", lambda: None)
    with kept_for_the_next_step(CPU):
        pass


@glibc
def test_training_is_inside(tmp_path, monkeypatch):
    asked = []
    real = freed_memory._glibc()

    class Libc:
        malloc_trim = staticmethod(lambda pad: asked.append("trim") or real.malloc_trim(pad))
        mallopt = staticmethod(lambda *call: asked.append(call) or real.mallopt(*call))

    monkeypatch.setattr(freed_memory, "_glibc", lambda: Libc)
    trainer = make("kit", tmp_path, max_steps=1)
    assert not asked
    trainer.train()
    assert asked[:2] == [(-1, -1), (-4, 0)] and asked[-1] == "trim"
