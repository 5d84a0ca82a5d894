"""Installed packages and the machine. Imports happen only when needed: see _surroundings.py."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from importlib import metadata
from typing import Any

from grpo_kit._support.torch_builds import misfits
from grpo_kit.doctor._report import Section

GIB = 2**30
_FOR_TESTS = ("test", "browser")  # extras that no run needs
# Variables that change how a run behaves, shown if set.
_VARIABLES = (
    "KIT_PROFILE", "GRPO_KIT_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip


def versions(section: Section) -> None:
    """Python and each required distribution of grpo-kit, beside the required range."""
    from packaging.specifiers import SpecifierSet

    python = platform.python_version()
    try:
        kit = metadata.metadata("grpo-kit")
    except metadata.PackageNotFoundError:
        section.add("python", python)
        section.add("grpo-kit", "not installed", "no ranges to compare with")
        section.advise(
            "grpo-kit is not installed, only found: run `pip install -e .` in its folder, or `make`"
        )
        return
    section.add("grpo-kit", kit["Version"])
    python_range = kit["Requires-Python"] or ""
    section.add("python", python, f"wants {python_range}")
    if python not in SpecifierSet(python_range):
        section.advise(f"python {python} lies outside {python_range}: make an environment with another")
    for name, (requirement, extra) in sorted(_requirements(kit).items()):
        wants = f"wants {requirement.specifier}" + (f", for [{extra}]" if extra else "")
        install = f"pip install '{name}{requirement.specifier}'"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            section.add(name, "none", wants)
            if not extra:
                section.advise(f"{name} is not installed: {install}")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            section.add(name, version, wants)
        else:
            section.add(name, version, f"OUTSIDE: {wants}")
            section.advise(f"{name} {version} was not tested: {install}")
    section.to_do.extend(misfits())
    if importlib.util.find_spec("unsloth"):
        section.advise("Unsloth is installed: see docs/tasks_and_rewards.md, Unsloth and vLLM")


def machine(section: Section) -> None:
    """Memory, cards, and the environment variables that matter: what torch.utils.collect_env does not say."""
    for name in _VARIABLES:
        if os.environ.get(name):
            section.add(name, os.environ[name])
    import psutil
    import torch
    from torch.utils import collect_env

    from grpo_kit.engine.memory._free import container_bytes, free_bytes

    cores = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    section.add("threads of torch", torch.get_num_threads(), f"{usable} of {cores} cores are free to use")
    memory, container = psutil.virtual_memory().total, container_bytes()
    section.add("memory (GiB)", memory / GIB)
    note = f"a container leaves {container / GIB:.1f}" if container < memory else ""
    section.add("memory free (GiB)", free_bytes(torch.device("cpu")) / GIB, note)
    if torch.cuda.is_available():
        _cards(section)
        return
    cards = collect_env.get_gpu_info(collect_env.run)  # nvidia-smi's
    section.add("card", None, f"nvidia-smi sees {cards}" if cards else "")
    if cards:
        section.advise(
            f"nvidia-smi sees {cards}, torch {torch.__version__} does not: install torch's CUDA build, a driver that "
            "is new enough for it, and look at CUDA_VISIBLE_DEVICES"
        )


def _cards(section: Section) -> None:
    import torch

    from grpo_kit._support.cuda import has_bf16

    count = torch.cuda.device_count()
    for i in range(count):
        card = torch.cuda.get_device_properties(i)
        memory = f"{card.total_memory / GIB:.1f} GiB, capability {card.major}.{card.minor}"
        section.add(f"card {i}", card.name, memory)
    section.add("card 0 free (GiB)", torch.cuda.mem_get_info(0)[0] / GIB)
    bf16 = has_bf16()
    section.add("bfloat16", bf16, "in hardware" if bf16 else "emulated at best")
    ampere = torch.cuda.get_device_capability(0)[0] >= 8
    section.add("tf32", ampere, "turned on by load_policy" if ampere else "")
    triton = importlib.util.find_spec("triton") is not None
    if triton and ampere:
        section.add("attention of the update", "FlexAttention", "compiled by triton")
    else:
        section.add("attention of the update", "SDPA", "the memory-efficient kernel, under a dense mask")
    if not bf16:
        name = torch.cuda.get_device_name(0)
        section.advise(f"card: {name} has no bfloat16, nor attention in it: take kit.preset('t4')")
    if importlib.util.find_spec("bitsandbytes") is None:
        section.advise(
            "bitsandbytes is missing: QLoRA and the optimizers with 8-bit moments, which bfloat16 weights are trained "
            'by, need it: pip install "grpo-kit[cuda]"'
        )
    if ampere and not triton:
        section.advise(
            "triton is missing: the update's attention on a card is compiled with it; install torch's own"
        )
    elif ampere and not any(map(shutil.which, ("gcc", "clang", "cc"))):
        section.advise(
            "no C compiler was found (gcc, clang): triton asks for one where it compiles for the first time"
        )
    if count > 1:
        section.advise(
            f"{count} cards: a process trains on the first; see docs/features.md, Several processes"
        )


def _requirements(kit: Any) -> dict[str, tuple[Any, str]]:
    """name -> (its Requirement, "" or the extra that requires it) of packages that a run on this system may use."""
    from packaging.requirements import Requirement

    requirements: dict[str, tuple[Any, str]] = {}
    extras = [extra for extra in kit.get_all("Provides-Extra") or [] if extra not in _FOR_TESTS]
    for extra in ("", *extras):
        for line in kit.get_all("Requires-Dist") or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                requirements.setdefault(requirement.name, (requirement, extra))
    return requirements
