"""Installed packages and the machine. Imports happen only when needed: see _surroundings.py."""

from __future__ import annotations

import getpass
import importlib.util
import os
import platform
import re
import shutil
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from grpo_kit._support.lazy import misfits

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Row:
    """One fact: a name, its value (its unit is in the name), and a note."""

    name: str
    value: Value
    note: str = ""


@dataclass(frozen=True)
class Section:
    """Facts of one kind, and advice to the reader: one line each."""

    title: str
    rows: list[Row] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)

    def add(self, name: str, value: Value, note: str = "") -> None:
        """One more fact."""
        self.rows.append(Row(name, value, note))

    def advise(self, line: str) -> None:
        """One more line of advice."""
        self.to_do.append(line)


@dataclass(frozen=True)
class Check:
    """One checked part: outcome "ok", "failed" or "skipped", the observation or reason, and the duration."""

    part: str
    outcome: str
    said: str
    seconds: float


def as_text(section: Section) -> str:
    """Title and aligned rows.

    >>> print(as_text(Section("Disk", [Row("free (GiB)", 3.14159, "of runs/"), Row("writable", True)])))
    Disk
      free (GiB)  3.1  of runs/
      writable    yes
    """
    values = [_as_word(row.value) for row in section.rows]
    name_width = max((len(row.name) for row in section.rows), default=0)
    value_width = max(map(len, values), default=0)
    lines = [section.title]
    for row, value in zip(section.rows, values, strict=True):
        lines.append(f"  {row.name:<{name_width}}  {value:<{value_width}}  {row.note}".rstrip())
    return scrubbed("\n".join(lines))


def line_of(check: Check, width: int) -> str:
    """A check as one line; width: of the longest part's name.

    >>> line_of(Check("rollout", "ok", "48 tokens", 1.25), 8)
    '  rollout   ok        1.2 s  48 tokens'
    """
    # An exception's message may have many lines; the first names the error.
    first_line = check.said.strip().partition("\n")[0]
    return scrubbed(
        f"  {check.part:<{width}}  {check.outcome:<7} {check.seconds:5.1f} s  {first_line}".rstrip()
    )


def as_data(
    sections: Sequence[Section], checks: Sequence[Check], to_do: Sequence[str]
) -> dict[str, Any]:
    """The report as plain values for JSON: sections by title, rows by name."""
    data: dict[str, Any] = {}
    for section in sections:
        data[section.title] = {
            row.name: {"value": row.value, "note": row.note} for row in section.rows
        }
    data["Self-check"] = [asdict(check) for check in checks]
    data["What to do"] = list(to_do)
    return _scrub_values(data)


def scrubbed(text: str) -> str:
    """text without names of persons and machines: the home folder is ~, tokens, users and hosts are starred out.

    >>> scrubbed("401 for hf_abcdefghijklmnop at https://me:secret@hub.example")
    '401 for *** at https://***@hub.example'
    """
    text = re.sub(r"\bhf_\w{8,}", "***", text)
    text = re.sub(r"(?<=://)[^/\s@]+@", "***@", text)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
        if os.environ.get(name):
            text = text.replace(os.environ[name], "***")
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=/|\W|$)", "~", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = ""
    if user:  # as a part of a path only: a user may be called torch
        text = re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\]|\W|$)", "***", text)
    host = socket.gethostname()
    if len(host) > 3:
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])(\.[\w.-]+)?", "***", text)
    return text


def _scrub_values(value: Any) -> Any:
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, dict):
        return {key: _scrub_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_scrub_values(item) for item in value]
    return value


def _as_word(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


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
        section.advise(
            f"python {python} lies outside {python_range}: make an environment with another"
        )
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

    from grpo_kit.engine.cpu._matmul import HAS_PRODUCT, compiled
    from grpo_kit.engine.memory._free import container_bytes, free_bytes

    cores = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    section.add(
        "threads of torch",
        torch.get_num_threads(),
        f"{usable} of {cores} cores are free to use",
    )
    memory, container = psutil.virtual_memory().total, container_bytes()
    section.add("memory (GiB)", memory / GIB)
    note = f"a container leaves {container / GIB:.1f}" if container < memory else ""
    section.add("memory free (GiB)", free_bytes(torch.device("cpu")) / GIB, note)
    if torch.cuda.is_available():
        _cards(section)
        return
    in_c = HAS_PRODUCT and compiled() is not None
    section.add("decoding in C", in_c)
    if not in_c and platform.system() == "Linux":
        section.advise(
            "no C compiler with OpenMP: sampling takes up to twice as long; install gcc"
        )
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
        section.add(
            "attention of the update", "SDPA", "the memory-efficient kernel, under a dense mask"
        )
    if not bf16:
        name = torch.cuda.get_device_name(0)
        section.advise(
            f"card: {name} has no bfloat16, nor attention in it: take kit.preset('t4')"
        )
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
