"""What a card does, in one file, beside what the model of it expects (docs/what_to_expect.md). `make card` runs it.

    python -m benchmarks.card.report                     # card_report.json
    python -m benchmarks.card.report --weights FOLDER    # the main job with these weights, by the card's own preset

Parts, each in a process of its own and written as it ends: the tests of a card; milliseconds a decoded token (random
weights in Qwen2.5-1.5B's shapes); a step of 64 x 512 tokens, full and LoRA; the main job by `grpo-kit train`, with
SmolLM2-135M where no weights are given. Called again, it goes on with the parts that are missing or failed.
No network is needed. What cannot run is said and left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.card.expect import LENGTHS, plan_of
from benchmarks.card.peaks import CARDS, H200, results
from benchmarks.result import ROOT, command_line, origin, read_result, write_result
from grpo_kit._support.cuda import has_bf16

PARTS = ("tests", "decode", "step full", "step lora", "main job")
TESTS = ("tests/engine/test_cuda.py", "tests/test_cuda_card.py", "tests/pretend_card")
# on the task "largest"
SHORT = ("model=smollm2-135m-instruct", "learning_rate=1e-5", "steps=32")
MOST_SECONDS = 3600  # of a part
STEP = ("seconds", "phases", "memory", "reserved ever", "optimizer")


class Failed(Exception):
    """A part ended with an error; the last lines that it printed."""


def run(*arguments: str) -> str:
    """What `python ARGUMENTS` printed. Raises Failed."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": paths,
        "KIT_PROFILE": "smoke",
    }  # for the tests; all else names its own
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS
    )
    if done.returncode:
        raise Failed("\n".join((done.stdout + done.stderr).splitlines()[-15:]))
    return done.stdout


def tests(asked: Namespace, folder: Path) -> dict[str, Any]:
    """How many passed, and which failed."""
    try:
        said = run(
            "-m", "pytest", "-q", "--tb=line", "-rfEs", "-p", "no:cacheprovider", *asked.tests
        )
    except Failed as failure:
        said = str(failure)
        if not re.search(r"\d+ (passed|failed|error)", said):
            raise
    last = re.findall(r"^.*\d+ (?:passed|failed|skipped|error).*$", said, re.M)[-1]
    return {
        "summary": last.strip("= "),
        "not passed": re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*$", said, re.M),
    }


def decode(asked: Namespace, folder: Path) -> dict[str, Any]:
    """Milliseconds a token of 64 rows, one row, 256 rows, full and LoRA; the card's peaks."""
    run("-m", "benchmarks.card.decode", str(folder / "out.json"), *asked.small)
    found = json.loads((folder / "out.json").read_text())
    for kind in ("full", "lora"):
        found[kind].pop("kernels")
    return found


def step(tuning: str, asked: Namespace, folder: Path) -> dict[str, Any]:
    """Seconds and peak memory of a step of 64 x 512 tokens."""
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    plan = plan_of(
        "full" if tuning == "full" else "LoRA", replace(H200, gib=gib, bf16=has_bf16()), 512
    )
    if not (plan.fits or asked.small):
        return {"skipped": f"does not fit, by the plan: {plan.peak_gib:.1f} of {gib:.1f} GiB"}
    optimizer = "adamw-8bit-split" if tuning == "full" and has_bf16() else "adamw"
    out = folder / "out.json"
    run("-m", "benchmarks.card.step", "kit", "long", tuning, optimizer, str(out), *asked.small)
    found = json.loads(out.read_text())
    return {name: found[name] for name in STEP}


def main_job(asked: Namespace, folder: Path) -> dict[str, Any]:
    """Held-out accuracy before and after, and seconds; by gpu24, or t4 on a card without bfloat16."""
    preset = "smoke" if asked.small else "gpu24" if has_bf16() else "t4"
    task = [] if asked.weights else ["largest"]
    changes = (
        []
        if asked.small
        else [f"model={asked.weights}", "steps=20"]
        if asked.weights
        else SHORT
    )
    named = [word for change in changes for word in ("--set", change)]
    begin = time.perf_counter()
    run(
        "-m",
        "grpo_kit",
        "train",
        *task,
        "--preset",
        preset,
        *named,
        "--folder",
        str(folder / "run"),
    )
    saved = json.loads((folder / "run" / "results.json").read_text())
    return saved | {
        "preset": preset,
        "changes": list(changes),
        "seconds in all": time.perf_counter() - begin,
    }


def measure(part: str, asked: Namespace) -> dict[str, Any]:
    """One of PARTS; what failed is kept as "failed"."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if part.startswith("step"):
                return step(part.split()[1], asked, Path(folder))
            return {"tests": tests, "decode": decode, "main job": main_job}[part](
                asked, Path(folder)
            )
        except Exception as error:
            # written, and the next part goes on: a lent card's time is short
            return {"failed": str(error) if isinstance(error, Failed) else repr(error)}


def row_of(name: str, bandwidth: float | None) -> tuple[str, dict[str, Any]]:
    """The card of the table that this one is, else the one nearest in bandwidth (bytes/s, measured), and its cells."""
    plain = re.sub(r"NVIDIA|GeForce|Tesla", "", name).split()
    found = next((card for card in CARDS if card.name.split() == plain), None)
    expected = results("card_expected.json")
    if found is None and bandwidth is not None:
        share = expected["costs"]["bandwidth"]
        found = min(CARDS, key=lambda card: abs(share * card.bandwidth / bandwidth - 1))
    found = found or CARDS[0]
    return found.name, expected["expected"][found.name]


def beside(report: dict[str, Any]) -> str:
    """The report beside the model's row, as a table in text."""
    parts = report["parts"]
    decoded = parts.get("decode", {})
    name, cells = row_of(report["hardware"], decoded.get("peaks", {}).get("bytes/s"))
    lines = [f"{'':34}{report['hardware']:>24}{'model of ' + name:>22}"]

    def line(what: str, here: Any, there: Any = None) -> None:
        here, there = (
            value if isinstance(value, str) else f"{value:.4g}"
            for value in (here, there or "-")
        )
        lines.append(f"{what:34}{here:>24}{there:>22}")

    for kind, label in (("full", "full"), ("lora", "LoRA")):
        cell = cells[label][str(LENGTHS[1])]
        if kind in decoded:
            line(
                f"ms a token of 64 rows, {label}",
                decoded[kind]["8x8"]["ms a token"],
                cell.get("ms a token at 288"),
            )
        if "seconds" in (found := parts.get(f"step {kind}", {})):
            line(f"s a step of 64 x 512, {label}", found["seconds"], cell.get("step"))
            line(f"GiB reserved at the peak, {label}", found["reserved ever"], cell["peak GiB"])
    if "after" in (job := parts.get("main job", {})):
        line(
            f"main job, {job['measure']}",
            " -> ".join(f"{job[when][job['measure']]:.3f}" for when in ("before", "after")),
        )
    if "summary" in (found := parts.get("tests", {})):
        line("tests", found["summary"].split(" in ")[0])
    for part, found in parts.items():
        for word in ("failed", "skipped"):
            if word in found:
                lines.append(f"{part}: {word}: {found[word].splitlines()[-1]}")
    return "\n".join(lines)


def begun(out: Path, card: str) -> dict[str, Any]:
    """What an earlier call wrote there, to go on with. Raises ValueError where that is of another card."""
    report = read_result(out, parts={})
    if report.get("hardware", card) != card:
        raise ValueError(
            f"out={str(out)!r} holds a report of {report['hardware']}, this is {card}; name another file"
        )
    return report


def main() -> None:
    """Measure what is missing, save after each part, print it beside the table."""
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("card_report.json"))
    parser.add_argument(
        "--weights", help="a folder or name of the main job's model, in place of SmolLM2-135M"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="what pytest is given")
    parser.add_argument(
        "--small",
        action="store_const",
        const=["--small"],
        default=[],
        help="tiny shapes, to see that it runs",
    )
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(
            "there is no CUDA card on this machine; `make card` runs its tests on a pretend one"
        )
    try:
        report = begun(asked.out, torch.cuda.get_device_name())
    except ValueError as error:
        parser.error(str(error))
    packages = ("torch", "transformers", "peft", "bitsandbytes", "triton")
    report |= origin("python -m benchmarks.card.report", *packages)
    report["memory GiB"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    report["capability"] = list(torch.cuda.get_device_capability())
    for part in asked.parts:
        if part in report["parts"] and "failed" not in report["parts"][part]:
            print(f"{part}: kept from before", flush=True)
            continue
        print(f"{part} ...", flush=True)
        report["parts"][part] = measure(part, asked)
        write_result(asked.out, report)
    print(beside(report))
    print(f"written to {asked.out}")


if __name__ == "__main__":
    main()
