"""Fifteen minutes of any CUDA card without a network: what only it can tell, in an order that a cut does not spoil.

    python -m benchmarks.card.program --minutes 12 --parts FOLDER     # card_program.json; called again it goes on
    python -m benchmarks.card.program --dry                           # tiny shapes, on a CPU too: that all of it runs

FOLDER is outside of the checkout; the weights' parts (benchmarks.card.parts) may arrive there while it runs. Nobody
waits for them: what is not whole is said, parts of the program that need no weights go before, and the folder is looked
at again after each. In this order: GSM8K before and after 60 steps of 8 x 8, fully, seed 0; its null (rewards shuffled
within groups); seeds 1 and 2; countdown with thoughts, full and LoRA; seconds a token and a step in Qwen2.5-1.5B's
shapes, QLoRA's tokens; the tests that failed on the last card. Half of GSM8K's 1,319 test questions are trained on, the
others are held out: no published number is comparable.

Packages are looked for first, and missing ones named. Predictions are written before anything runs. Each part is a
process of its own with a time limit; what it has written is in card_program.json at once, whatever ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.card import parts as weights
from benchmarks.card.predictions import peaks_of, predicted
from benchmarks.card.program_parts import PROGRAM, Part, missing
from benchmarks.result import ROOT, command_line, origin, read_result, write_result
from benchmarks.step.floor import device_peaks
from grpo_kit._support.cuda import has_bf16

LEAST = 20.0  # seconds, for which no part is begun
DONE, CUT = "done", "cut off"


class Program:
    """One call of the program: its result, and the parts that are still to do."""

    def __init__(self, asked: Namespace, card: str | None) -> None:
        self.asked, self.card, self.began = asked, card, time.monotonic()
        self.result = read_result(asked.out, parts={})
        if self.result.get("card", card) != card:
            raise ValueError(
                f"out={str(asked.out)!r} is of {self.result['card']}, this is {card}; name another file"
            )
        self.model: Path | None = None  # the weights, once they are whole
        self.known: dict[str, float] = {}  # parts of the weights that were whole
        self.tried: set[str] = set()

    def left(self) -> float:
        """Seconds of --minutes."""
        return 60 * self.asked.minutes - (time.monotonic() - self.began)

    def state(self, part: Part) -> dict[str, Any]:
        """What the result has of a part."""
        return self.result["parts"].setdefault(part.name, {})

    def write(self) -> None:
        self.result["seconds in all"] = time.monotonic() - self.began
        write_result(self.asked.out, self.result)

    def begin(self, program: tuple[Part, ...]) -> None:
        """Packages and predictions, before anything runs."""
        packages = sorted({name for part in program for name in part.packages})
        self.result |= origin("python -m benchmarks.card.program", *packages) | {
            "card": self.card
        }
        self.result["dry"] = self.asked.dry
        self.result["missing packages"] = missing(packages)
        if self.card and "predicted" not in self.result:
            gib = torch.cuda.get_device_properties(0).total_memory / 2**30
            measured = None if self.asked.dry else peaks_here()
            self.result["peaks"] = measured
            self.result["predicted"] = predicted(peaks_of(self.card, gib, measured))
        for part in program:
            state = self.state(part)
            state["limit s"] = part.limit
            if state.get("ended") != DONE:
                state.setdefault("ended", "not begun")
        self.write()
        if self.result["missing packages"]:
            print(f"missing packages: {', '.join(self.result['missing packages'])}", flush=True)

    def look_for_weights(self) -> str | None:
        """Put them together once all parts are whole; else why not."""
        if self.model or self.asked.dry and self.asked.parts is None:
            return None
        if self.asked.parts is None:
            return "no weights: --parts was not given"
        begin, target = time.monotonic(), self.asked.work / "model.gguf"
        try:
            found = weights.look(self.asked.parts, self.known)
            self.model = weights.assemble(found, target, self.asked.sum)
        except ValueError as why:
            return f"weights: {why}"
        self.result["weights"] = {
            "said": found.said,
            "sha256": self.asked.sum,
            "s": time.monotonic() - begin,
        }
        self.write()
        return None

    def why_not(self, part: Part) -> str | None:
        """What a part waits for, None where it can begin."""
        if lacking := missing(part.packages):
            return f"missing packages: {', '.join(lacking)}"
        if not self.card and not (self.asked.dry and part.learns):
            return "needs a card"
        if part.learns and (why := self.look_for_weights()):
            return why
        limit, expected = self.limit_of(part), self.expected(part)
        if limit < LEAST or limit < expected / 2:
            return (
                f"no time: {limit:.0f} s, and {expected:.0f} were predicted"
                if expected
                else "no time"
            )
        return None

    def expected(self, part: Part) -> float:
        """Predicted seconds, 0 where there is no prediction."""
        known = {} if self.asked.dry else self.result.get("predicted", {})
        return known.get(part.name, {}).get("seconds", 0.0)

    def limit_of(self, part: Part) -> float:
        """Seconds: the part's own, on a slow card half as many again as were predicted; no more than are left."""
        return min(max(part.limit, 1.5 * self.expected(part)), self.left())

    def next_part(self, program: tuple[Part, ...]) -> Part | None:
        """The first that is not done and can begin. What another waits for is written."""
        for part in program:
            state = self.state(part)
            if state["ended"] == DONE or part.name in self.tried:
                continue
            if (why := self.why_not(part)) is None:
                return part
            state["ended"] = why
        return None

    def run(self, part: Part) -> None:
        """In a process of its own, ended at the limit with all that it has begun; its file is read meanwhile."""
        self.tried.add(part.name)
        state, limit = self.state(part), self.limit_of(part)
        name = part.name.replace(" ", "_")
        out, log = self.asked.work / f"{name}.json", self.asked.work / f"{name}.log"
        state["ended"], seen = CUT, None
        self.write()
        print(f"{part.name} ... ({limit:.0f} s)", flush=True)
        begin = time.monotonic()
        with log.open("w", encoding="utf-8") as said:
            child = subprocess.Popen(
                self.command(part, out, limit), cwd=ROOT, env=environment(), stdout=said, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                while child.poll() is None and time.monotonic() - begin < limit:
                    time.sleep(0.2)
                    seen = self.take(state, out, seen)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                code = child.wait()
        self.take(state, out, None)
        state["s"] = time.monotonic() - begin
        state["ended"] = (
            f"its limit of {limit:.0f} s"
            if state["s"] >= limit
            else how_it_ended(code, state, log)
        )
        self.write()
        print(f"{part.name}: {state['ended'].splitlines()[0]}, {state['s']:.0f} s", flush=True)

    def take(self, state: dict[str, Any], out: Path, seen: float | None) -> float | None:
        """Copy what the part has written, if it is newer than what was seen; a file that is being written waits."""
        if not out.is_file() or out.stat().st_mtime_ns == seen:
            return seen
        with suppress(ValueError):
            state["result"] = read_result(out)
            self.write()
            return out.stat().st_mtime_ns
        return seen

    def command(self, part: Part, out: Path, limit: float) -> list[str]:
        """Of the part's process."""
        words = [str(out) if word == "OUT" else word for word in part.command[1:]]
        if part.learns:
            task = words[words.index("--task") + 1]
            tuning = words[words.index("--tuning") + 1] if "--tuning" in words else "full"
            base = self.asked.work / f"{task}_{tuning}_before.json"
            words += ["--seconds", f"{limit:.0f}", "--before", str(base)]
            words += ["--dry"] if self.asked.dry else ["--model", str(self.model)]
        elif self.asked.dry:
            words += ["--small"]
        return [sys.executable, "-m", f"benchmarks.{part.command[0]}", *words]


def how_it_ended(code: int, state: dict[str, Any], log: Path) -> str:
    """ "done", or "failed" with the last lines that were printed; a part of the report that failed is a failure too."""
    inner = state.get("result", {}).get("parts", {})
    failed = [
        f"{name}: {found['failed']}" for name, found in inner.items() if "failed" in found
    ]
    if code == 0 and not failed:
        return DONE
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "\n".join([f"failed ({code})", *(failed or tail)])


def environment() -> dict[str, str]:
    """Of a part: this checkout's modules."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
    }


def peaks_here() -> dict[str, float]:
    """The card's large product and copy; what they held is given back to it."""
    found = device_peaks(True, torch.bfloat16 if has_bf16() else torch.float16)
    torch.cuda.empty_cache()
    return found


def main() -> None:
    """Do what is not done, as long as --minutes last."""
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, default=Path("card_program.json"))
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument(
        "--parts", type=Path, help="the folder in which the weights' parts arrive"
    )
    parser.add_argument("--sum", default=weights.QWEN, help="SHA-256 of the whole file")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "card_program"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[part.name for part in PROGRAM],
        help="these, in this order",
    )
    parser.add_argument(
        "--dry", action="store_true", help="tiny shapes, to see that it runs; needs no weights"
    )
    asked = parser.parse_args()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if card is None and not asked.dry:
        parser.error("there is no CUDA card on this machine; --dry runs what a CPU can")
    asked.work.mkdir(parents=True, exist_ok=True)
    try:
        program = Program(asked, card)
    except ValueError as error:
        parser.error(str(error))
    by_name = {part.name: part for part in PROGRAM}
    chosen = tuple(by_name[name] for name in asked.only) if asked.only else PROGRAM
    program.begin(chosen)
    while (part := program.next_part(chosen)) is not None:
        program.run(part)
    program.write()
    for part in chosen:
        print(f"{part.name}: {program.state(part)['ended'].splitlines()[0]}")
    print(f"written to {asked.out}")


if __name__ == "__main__":
    main()
