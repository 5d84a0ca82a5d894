"""Each measurement in a fresh process, with the kit of this checkout or of another, and with this one's benchmark."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import ROOT

# The kit is bound first, from its own folder; what is imported after it comes from this checkout.
_LAUNCH = """
import sys
sys.path.insert(0, sys.argv[1])
import grpo_kit
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from benchmarks.step.child import main
main(Path(sys.argv[3]), sys.argv[1])
"""


def in_a_child(
    request: dict[str, Any], kit: Path = ROOT, *, fork: bool = True
) -> dict[str, Any]:
    """What child.py answers to the request, which it gets with grpo_kit of the folder `kit`.

    fork: it may be a fork of a process that has imported. False where another checkout's kit is measured beside it,
    which cannot be one: what is compared starts alike.

    {"error": why} where memory did not suffice. What it prints is seen as it goes.
    Raises SystemExit where it failed in another way.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "child.request")
        asked.write_text(json.dumps(request))
        sys.stdout.flush()
        code = _exit_code(asked, kit, fork)
        answer = asked.with_suffix(".answer")
        if code == -9:
            return {"error": "killed, most likely for want of memory"}
        if code or not answer.exists():
            what = request.get("arm", request["do"])
            raise SystemExit(f"{what} failed with exit code {code}; what it said is above")
        return json.loads(answer.read_text())


def _exit_code(asked: Path, kit: Path, fork: bool) -> int:
    """Of the child that answers: with this checkout's kit and no card, a fork of a process that has only imported."""
    if fork and kit == ROOT and not torch.cuda.is_available():
        child = _imported().Process(target=_answer, args=(asked, dict(os.environ)))
        child.start(), child.join()
        return child.exitcode
    words = [sys.executable, "-c", _LAUNCH, str(kit), str(ROOT), str(asked)]
    return subprocess.run(words, env=os.environ | {"PYTHONPATH": str(kit)}).returncode


@functools.cache
def _imported() -> multiprocessing.context.BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.step.child"])
    return context


def _answer(asked: Path, environment: dict[str, str]) -> None:
    from benchmarks.step.child import main

    os.environ.update(environment)
    main(asked, str(ROOT))


def code_state(kit: Path) -> dict[str, str | None]:
    """Which code a measurement with that kit ran: "commit" (None without git) and "files", a hash.

    files: over the kit's Python files and this benchmark's, so that uncommitted changes count.
    """
    digest = hashlib.sha256()
    for folder in (kit / "grpo_kit", ROOT / "benchmarks" / "step"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    asked = subprocess.run(
        ["git", "-C", str(kit), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    commit = asked.stdout.strip()[:12] if asked.returncode == 0 else None
    changed = [
        "git",
        "-C",
        str(kit),
        "status",
        "--porcelain",
        "--",
        "grpo_kit",
        "benchmarks/step",
    ]
    if commit and subprocess.run(changed, capture_output=True, text=True).stdout.strip():
        commit += " and changes"
    return {"commit": commit, "files": digest.hexdigest()[:12]}
