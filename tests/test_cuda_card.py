"""What is asked of a card before anything lies on it; torch.cuda is asked in place of a card."""

import sys
from pathlib import Path

import forked
import pytest
import torch

from grpo_kit._support import cuda

FAKE = """
import os, sys, torch
torch.cuda.is_available = lambda: True
torch.cuda.memory_reserved = lambda *_: {reserved}
sys.platform = {platform!r}
from grpo_kit._support.cuda import use_expandable_segments
print(use_expandable_segments())
print(use_expandable_segments())
told = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
print(told(), os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
"""


def asked(monkeypatch, *, reserved=0, platform="linux", **environment):
    """The lines that the fake prints, in a process of its own: torch's settings are the process's."""
    for name in cuda.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code = FAKE.format(reserved=reserved, platform=platform)
    done = forked.bare().run("-c", code)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_segments_are_expandable_and_it_is_said_once(monkeypatch):
    first, second, settings = asked(monkeypatch)
    assert "expandable_segments:True" in first and second == "None"
    assert settings == "expandable_segments:True expandable_segments:True"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *zip(
            cuda.ALLOCATOR_SETTINGS,
            ["max_split_size_mb:64", "expandable_segments:False", ""],
            strict=True,
        )
    ],
)
def test_what_somebody_set_is_kept(monkeypatch, name, value):
    first, _, settings = asked(monkeypatch, **{name: value})
    assert first == "None" and "expandable_segments:True" not in settings


@pytest.mark.parametrize("options", [{"reserved": 2**21}, {"platform": "win32"}])
def test_not_on_a_card_in_use_nor_where_it_does_not_exist(monkeypatch, options):
    first, _, settings = asked(monkeypatch, **options)
    assert first == "None" and "expandable_segments" not in settings


@pytest.mark.parametrize(("capability", "own"), [(7, False), (8, True), (9, True)])
def test_emulated_bfloat16_is_none(monkeypatch, capability, own):
    """A T4 (7.5) says yes where it only emulates."""
    properties = type("Properties", (), {"major": capability})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    assert torch.cuda.is_bf16_supported()
    assert cuda.has_bf16() == own


def test_everybody_asks_this_one_function():
    root = Path(__file__).parent.parent
    files = [
        p for part in ("grpo_kit", "tests", "benchmarks") for p in (root / part).rglob("*.py")
    ]
    asking = [p.name for p in files if "is_bf16_supported(" in p.read_text()]
    assert sorted(asking) == ["cuda.py", "test_cuda_card.py"]


def test_no_card_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not cuda.has_bf16() and cuda.use_expandable_segments() is None


@pytest.mark.parametrize(
    ("system", "release", "before", "limit"),
    [
        ("linux", "5.15.167.4-microsoft-standard-WSL2", 1.0, 0.88),
        ("win32", "11", 1.0, 0.88),
        ("linux", "6.8.0-generic", 1.0, None),
        ("win32", "11", 0.5, None),
    ],
)
def test_memory_that_a_driver_would_take_from_the_system_is_not_taken(
    monkeypatch, system, release, before, limit
):
    """A desktop holds 3 GiB of 24, another run of ours half of one."""
    given = []
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(cuda.platform, "release", lambda: release)
    for name, value in {
        "is_available": True,
        "get_per_process_memory_fraction": before,
        "mem_get_info": (20.5 * 2**30, 24 * 2**30),
        "memory_reserved": 2**30,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", given.append)
    said = cuda.stay_on_the_card()
    assert given == ([] if limit is None else [limit]) and (said is None) == (limit is None)
    assert limit is None or "88% of the card" in said


@pytest.mark.parametrize("newer", [True, False])
def test_segments_are_set_by_the_name_that_this_torch_has(newer, monkeypatch):
    """The newer name came after torch 2.8; the older one then warns."""
    said = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", said.append)
    if newer:
        monkeypatch.setattr(
            torch._C, "_accelerator_setAllocatorSettings", said.append, raising=False
        )
        monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
    for name in cuda.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(cuda.ALLOCATOR_SETTINGS[0], "")  # to be put back
    monkeypatch.delenv(cuda.ALLOCATOR_SETTINGS[0])
    assert cuda.use_expandable_segments() and said == ["expandable_segments:True"]
