"""From measured steps to what is saved and what is printed."""

from __future__ import annotations

import statistics
import zlib
from argparse import Namespace
from typing import Any

import torch

from benchmarks.result import origin, spread
from benchmarks.step.arms import Setup
from benchmarks.step.floor import FORMULAS, device_peaks, floor
from benchmarks.step.phases import PHASES, Step
from benchmarks.step.workload import FLAT_SHARE

REFERENCES = ("trl-hf", "trl-hf-tuned")


def result_name(options: Namespace) -> str:
    """step_<size>_<workload>, with _lora for adapters."""
    return f"step_{options.size}_{options.workload}" + ("_lora" if options.tuning == "lora" else "")


def make_result(
    options: Namespace, setup: Setup, weights: str, rounds: list[dict[str, Step]], absent: dict[str, str]
) -> dict[str, Any]:
    """Everything that is saved: seconds, bytes, FLOP/s; medians and quartiles over the rounds, and each round raw."""
    work = setup.workload
    lengths = [len(ids) for ids in work.completion_ids]
    completion_tokens = sum(lengths)
    all_tokens = completion_tokens + work.group_size * sum(map(len, work.prompt_ids))
    arms = {}
    for arm in rounds[0]:
        steps = [r[arm] for r in rounds if arm in r]
        seconds = spread([s.seconds for s in steps])
        phases = {phase: spread([s.phases[phase] for s in steps]) for phase in PHASES}
        arms[arm] = {
            "rollouts by": steps[-1].engine,
            "seconds": seconds,
            "phases": phases,
            "tokens/s decode": completion_tokens / phases["decode"]["median"],
            "tokens/s step": all_tokens / seconds["median"],
            "peak bytes": {k: max(s.memory[k] for s in steps) for k in steps[0].memory},
            "timeline": {
                "seconds": [round(t, 3) for t, _ in steps[-1].timeline],
                "GiB": [round(held / 2**30, 3) for _, held in steps[-1].timeline],
            },
        }
        for reference in REFERENCES:
            if reference in rounds[0]:
                base = statistics.median(r[reference].seconds for r in rounds if reference in r)
                arms[arm][f"{reference} / this"] = base / seconds["median"]
    peaks = device_peaks(options.cuda, getattr(torch, options.dtype))
    return origin(options.command, "torch", "transformers", "trl") | {
        "load average before": options.load,
        "weights": weights,
        "tuning": options.tuning,
        "precision": "bfloat16 weights and autocast" if setup.bf16 else "float32",
        "n": len(rounds),
        "seed": options.seed,
        "work": {
            "kind": options.workload,
            "prompts": len(work.prompts),
            "group_size": work.group_size,
            "prompt tokens": [len(ids) for ids in work.prompt_ids],
            "completion tokens": completion_tokens,
            "completion mean": completion_tokens / len(lengths),
            "completion maximum": max(lengths),
            "share cut off": sum(ids[-1] != work.eos for ids in work.completion_ids) / len(lengths),
            "groups with equal rewards": f"{sum(work.flat)} of {len(work.flat)} (aim {FLAT_SHARE})",
            "tokens": "random words of the vocabulary, forced",
        },
        "tolerance": options.tolerance,
        "memory cap GiB": options.memory_cap_gib,
        "trl-hf-tuned": {"micro-batch": setup.tuned[0], "gradient checkpointing": setup.tuned[1]},
        "not run": absent,
        "arms": arms,
        "floor": {
            "peaks": peaks,
            "formulas": FORMULAS,
            "seconds": floor(setup.model, work, peaks, skip=False),
            "seconds with skipping": floor(setup.model, work, peaks, skip=True),
        },
        "rounds": [{arm: _raw(step) for arm, step in r.items()} for r in rounds],
    }


def _raw(step: Step) -> dict:
    return {
        "seconds": step.seconds,
        "phases": step.phases,
        "bytes": step.memory,
        "tokens": sum(map(len, step.completion_ids)),
        "tokens crc32": zlib.crc32(repr(step.completion_ids).encode()),
        "mean reward": statistics.fmean(step.rewards),
        "loss": step.loss,
        "grad_norm": step.grad_norm,
    }


def table(result: dict) -> str:
    """One line an arm: median seconds [quartiles] of the step, then of its phases, rates, memory, ratios."""
    head = [
        "arm",
        "step s [q1, q3]",
        *PHASES,
        "decode tok/s",
        "step tok/s",
        "peak GiB",
        "x trl-hf",
        "x tuned",
    ]
    lines = [head]
    for arm, row in result["arms"].items():
        s = row["seconds"]
        ratios = [row.get(f"{r} / this") for r in REFERENCES]
        lines.append(
            [arm, f"{s['median']:.2f} [{s['q1']:.2f}, {s['q3']:.2f}]"]
            + [f"{row['phases'][phase]['median']:.2f}" for phase in PHASES]
            + [f"{row['tokens/s decode']:.0f}", f"{row['tokens/s step']:.0f}"]
            + [f"{max(row['peak bytes'].values()) / 2**30:.2f}"]
            + ["-" if r is None else f"{r:.2f}" for r in ratios]
        )
    for name, key in (("floor", "seconds"), ("floor, skipping", "seconds with skipping")):
        least = result["floor"][key]
        cells = [f"{least[phase]:.2f}" if phase in least else "-" for phase in PHASES]
        lines.append([name, f"{least['step']:.2f}", *cells, *["-"] * 5])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
