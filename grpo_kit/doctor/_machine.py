"""Installed packages and the machine. Imports happen only when needed: see _surroundings.py."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from importlib import metadata
from typing import Any

from grpo_kit._support.torch_builds import misfits
from grpo_kit.doctor._report import Row, Section

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

    add, to_do = section.rows.append, section.to_do.append
    try:
        about = metadata.metadata("grpo-kit")
    except metadata.PackageNotFoundError:
        add(Row("python", platform.python_version()))
        add(Row("grpo-kit", "not installed", "no ranges to compare with"))
        to_do("grpo-kit is not installed, only found: run `pip install -e .` in its folder, or `make`")
        return
    add(Row("grpo-kit", about["Version"]))
    python = about["Requires-Python"] or ""
    add(Row("python", platform.python_version(), f"wants {python}"))
    if platform.python_version() not in SpecifierSet(python):
        to_do(f"python {platform.python_version()} lies outside {python}: make an environment with another")
    for name, (requirement, extra) in sorted(_required(about).items()):
        wants = f"wants {requirement.specifier}" + (f", for [{extra}]" if extra else "")
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            add(Row(name, "none", wants))
            if not extra:
                to_do(f"{name} is not installed: pip install '{name}{requirement.specifier}'")
            continue
        inside = requirement.specifier.contains(version, prereleases=True)
        add(Row(name, version, wants if inside else f"OUTSIDE: {wants}"))
        if not inside:
            to_do(f"{name} {version} was not tested: pip install '{name}{requirement.specifier}'")
    section.to_do.extend(misfits())
    if importlib.util.find_spec("unsloth"):
        to_do("Unsloth is installed: see docs/tasks_and_rewards.md, Unsloth and vLLM")


def machine(section: Section) -> None:
    """Memory, cards, and the environment variables that matter: what torch.utils.collect_env does not say."""
    add, to_do = section.rows.append, section.to_do.append
    for name in filter(os.environ.get, _VARIABLES):
        add(Row(name, os.environ[name]))
    import psutil
    import torch
    from torch.utils import collect_env

    from grpo_kit.engine.memory._free import container_bytes, free_bytes

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add(
        Row(
            "threads of torch", torch.get_num_threads(), f"{usable} of {os.cpu_count()} cores are free to use"
        )
    )
    memory, left = psutil.virtual_memory().total, container_bytes()
    add(Row("memory (GiB)", memory / GIB))
    by = f"a container leaves {left / GIB:.1f}" if left < memory else ""
    add(Row("memory free (GiB)", free_bytes(torch.device("cpu")) / GIB, by))
    if torch.cuda.is_available():
        _cards(section)
        return
    cards = collect_env.get_gpu_info(collect_env.run)  # nvidia-smi's
    add(Row("card", None, f"nvidia-smi sees {cards}" if cards else ""))
    if cards:
        to_do(
            f"nvidia-smi sees {cards}, torch {torch.__version__} does not: install torch's CUDA build, a driver that "
            "is new enough for it, and look at CUDA_VISIBLE_DEVICES"
        )


def _cards(section: Section) -> None:
    import torch

    from grpo_kit._support.cuda import has_bf16

    add, to_do = section.rows.append, section.to_do.append
    count = torch.cuda.device_count()
    for i in range(count):
        card = torch.cuda.get_device_properties(i)
        what = f"{card.total_memory / GIB:.1f} GiB, capability {card.major}.{card.minor}"
        add(Row(f"card {i}", card.name, what))
    add(Row("card 0 free (GiB)", torch.cuda.mem_get_info(0)[0] / GIB))
    bf16 = has_bf16()
    add(Row("bfloat16", bf16, "in hardware" if bf16 else "emulated at best"))
    ampere = torch.cuda.get_device_capability(0)[0] >= 8
    add(Row("tf32", ampere, "turned on by load_policy" if ampere else ""))
    triton = importlib.util.find_spec("triton") is not None
    flex = triton and ampere
    how = "compiled by triton" if flex else "the memory-efficient kernel, under a dense mask"
    add(Row("attention of the update", "FlexAttention" if flex else "SDPA", how))
    if not bf16:
        to_do(
            f"card: {torch.cuda.get_device_name(0)} has no bfloat16, nor attention in it: take kit.preset('t4')"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        to_do(
            "bitsandbytes is missing: QLoRA and the optimizers with 8-bit moments, which bfloat16 weights are trained "
            'by, need it: pip install "grpo-kit[cuda]"'
        )
    if ampere and not triton:
        to_do("triton is missing: the update's attention on a card is compiled with it; install torch's own")
    elif ampere and not any(map(shutil.which, ("gcc", "clang", "cc"))):
        to_do(
            "no C compiler was found (gcc, clang): triton asks for one where it compiles for the first time"
        )
    if count > 1:
        to_do(f"{count} cards: a process trains on the first; see docs/features.md, Several processes")


def _required(about: Any) -> dict[str, tuple[Any, str]]:
    """name -> (its Requirement, "" or the extra that requires it) of packages that a run on this system may use."""
    from packaging.requirements import Requirement

    found: dict[str, tuple[Any, str]] = {}
    extras = [e for e in about.get_all("Provides-Extra") or [] if e not in _FOR_TESTS]
    for extra in ("", *extras):
        for requirement in map(Requirement, about.get_all("Requires-Dist") or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                found.setdefault(requirement.name, (requirement, extra))
    return found
