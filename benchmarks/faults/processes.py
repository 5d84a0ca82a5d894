"""Work in forked processes, as torchrun starts them: where one dies, all end."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT = 300.0  # seconds
pids: list[int] = []  # in the first process: those of the others


def in_children(
    work: Callable[[], dict[str, Any]], place: Path, count: int = 1
) -> dict[str, Any]:
    """What work() returns in the first of `count` processes.

    {"killed": True} where a signal ended one, {"error": a traceback} where one raised, {"hung": True} after TIMEOUT.
    place: a folder for their answers.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children: dict[int, int] = {}  # pid -> rank
    for rank in reversed(range(count)):  # the first one is forked last: it knows the others
        answer = place / f"answer-{rank}.json"
        answer.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            pids[:] = list(children)
            if count > 1:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_PORT": port}
                os.environ |= {"MASTER_ADDR": "127.0.0.1"}
            _answer(work, answer)
        children[pid] = rank
    until, signalled, hung = time.monotonic() + TIMEOUT, False, False
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            failed = "error" in _read(place / f"answer-{children.pop(pid)}.json")
            signalled |= os.WIFSIGNALED(status)
            if children and (failed or os.WIFSIGNALED(status)):
                _end(children)
                break
        elif time.monotonic() > until:
            hung = True
            _end(children)
            break
        else:
            time.sleep(0.02)
    if hung:
        return {"hung": True}
    if signalled:
        return {"killed": True}
    found = [_read(place / f"answer-{rank}.json") for rank in range(count)]
    return next((one for one in found if "error" in one), found[0])


def _answer(work: Callable[[], dict[str, Any]], answer: Path) -> None:
    """In a child: do the work, write what it returns, and end."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        warnings.simplefilter("ignore")
        found = work()
    except BaseException:
        found = {"error": traceback.format_exc()[-2500:]}
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2
    )
    (answer.parent / "filler").unlink(missing_ok=True)
    answer.write_text(json.dumps(found))
    os._exit(0)


def _read(answer: Path) -> dict[str, Any]:
    return json.loads(answer.read_text()) if answer.exists() else {}


def _end(children: dict[int, int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
