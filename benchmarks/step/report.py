"""From measured steps to what is saved."""

from __future__ import annotations

import statistics
import zlib
from argparse import Namespace
from typing import Any

from benchmarks.result import origin, spread
from benchmarks.step.arms import OF_TRL
from benchmarks.step.busy import MOST
from benchmarks.step.floor import FORMULAS
from benchmarks.step.phases import PHASES, Step
from benchmarks.step.run import BEFORE, Measured
from benchmarks.step.tokens import PASSES, factors
from benchmarks.step.workload import FLAT_SHARE, Workload

REFERENCES = ("trl-hf", "trl-hf-tuned", BEFORE)


def result_name(options: Namespace) -> str:
    """step_<size>_<workload>, with _lora for adapters."""
    return f"step_{options.size}_{options.workload}" + (
        "_lora" if options.tuning == "lora" else ""
    )


def make_result(
    options: Namespace,
    prepared: dict[str, Any],
    tuned: tuple[int, bool],
    rounds: list[dict[str, Measured]],
    absent: dict[str, str],
) -> dict[str, Any]:
    """Everything that is saved: seconds, bytes, FLOP/s; medians and quartiles over the rounds, and each round raw."""
    work = Workload(**prepared["work"])
    floor = prepared["floor"]
    arms = {arm: _arm([r[arm] for r in rounds if arm in r], work) for arm in rounds[0]}
    for arm, row in arms.items():
        medians = _medians(row)
        least = floor["seconds" if arm in OF_TRL else "seconds with skipping"]
        row["times the floor"] = {
            phase: medians[phase] / seconds for phase, seconds in least.items()
        }
        row["against"] = {}
        for reference in REFERENCES:
            if reference in arms:
                theirs = arms[reference]
                row[f"{reference} / this"] = (
                    theirs["seconds"]["median"] / row["seconds"]["median"]
                )
                row["against"][reference] = factors(
                    row["tokens"], medians, theirs["tokens"], _medians(theirs)
                )
    return origin(options.command, "torch", "transformers", "trl") | {
        "load average before": options.load,
        "threads": prepared["threads"],
        "weights": prepared["weights"],
        "tuning": options.tuning,
        "precision": "bfloat16 weights and autocast" if options.cuda else "float32",
        "n": len(rounds),
        "seed": options.seed,
        "work": _work(options.workload, work, prepared),
        "tolerance": options.tolerance,
        "memory cap GiB": options.memory_cap_gib,
        "trl-hf-tuned": {"micro-batch": tuned[0], "gradient checkpointing": tuned[1]},
        "not run": absent,
        "arms": arms,
        "passes of a token": PASSES,
        "busy from": MOST,
        "floor": {"peaks": prepared["peaks"], "formulas": FORMULAS, "tokens": prepared["least"]}
        | floor,
        "rounds": [{arm: _raw(measured) for arm, measured in r.items()} for r in rounds],
    }


def _arm(measured: list[Measured], work: Workload) -> dict[str, Any]:
    steps = [m.step for m in measured]
    completion_tokens = sum(map(len, work.completion_ids))
    all_tokens = sum(map(len, work.rows))
    seconds = spread([s.seconds for s in steps])
    phases = {phase: spread([s.phases[phase] for s in steps]) for phase in PHASES}
    return {
        "rollouts by": steps[-1].engine,
        "code": measured[-1].code,
        "seconds": seconds,
        "phases": phases,
        "tokens": steps[-1].tokens,
        "tokens/s decode": completion_tokens / phases["decode"]["median"],
        "tokens/s step": all_tokens / seconds["median"],
        "peak bytes": {k: max(s.memory[k] for s in steps) for k in steps[0].memory},
        "timeline": {
            "seconds": [round(t, 3) for t, _ in steps[-1].timeline],
            "GiB": [round(held / 2**30, 3) for _, held in steps[-1].timeline],
        },
        "measured on a busy machine": sum(m.busy for m in measured),
    }


def _medians(row: dict[str, Any]) -> dict[str, float]:
    return {phase: s["median"] for phase, s in row["phases"].items()} | {
        "step": row["seconds"]["median"]
    }


def _work(kind: str, work: Workload, prepared: dict[str, Any]) -> dict[str, Any]:
    lengths = [len(ids) for ids in work.completion_ids]
    return {
        "kind": kind,
        "prompts": len(work.prompts),
        "group_size": work.group_size,
        "prompt tokens": [len(ids) for ids in work.prompt_ids],
        "completion tokens": sum(lengths),
        "completion lengths": lengths,
        "completion mean": sum(lengths) / len(lengths),
        "completion maximum": max(lengths),
        "share cut off": sum(ids[-1] != work.eos for ids in work.completion_ids) / len(lengths),
        "tokens all prompts begin with": _common(work.prompt_ids),
        "groups with equal rewards": f"{sum(work.flat)} of {len(work.flat)} (aim {FLAT_SHARE})",
        "tokens": work.tokens,
        "tokens crc32": prepared["checksum"],
    }


def _common(prompts: list[list[int]]) -> int:
    columns = list(zip(*prompts, strict=False))
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), len(columns))


def _raw(measured: Measured) -> dict[str, Any]:
    step: Step = measured.step
    return {
        "seconds": step.seconds,
        "phases": step.phases,
        "bytes": step.memory,
        "tokens": sum(map(len, step.completion_ids)),
        "tokens crc32": zlib.crc32(repr(step.completion_ids).encode()),
        "tokens computed": step.tokens,
        "mean reward": statistics.fmean(step.rewards),
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "others' share of the cores": {"before": measured.before, "meanwhile": step.others},
        "busy": measured.busy,
        "code": measured.code,
    }
