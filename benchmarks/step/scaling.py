"""How a step's seconds grow with completion length, group size and prompts: one figure, with the floor in it.

    python -m benchmarks.step.scaling
    python -m benchmarks.step.scaling --before ../an_older_checkout --arms kit,trl-hf-tuned

One of the three changes at a time. Each point is one step of each arm in a process of its own, on prompts and
completions of words, each completion of exactly that length. Saved after each: the same command goes on where it was
stopped.
Writes benchmarks/results/step_scaling_<size>.json and .png; --draw draws it again from the JSON alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from benchmarks.result import command_line, origin, save  # noqa: E402
from benchmarks.step.__main__ import parse_common, prepare, same_for  # noqa: E402
from benchmarks.step.arms import ARMS  # noqa: E402
from benchmarks.step.floor import FORMULAS  # noqa: E402
from benchmarks.step.run import BEFORE, Measured, check_same_work  # noqa: E402
from benchmarks.step.unfinished import Unfinished  # noqa: E402
from benchmarks.step.workload import Shape  # noqa: E402

AXES = ("completion", "group_size", "prompts")
LABELS = {
    "completion": "tokens of each completion",
    "group_size": "completions a prompt",
    "prompts": "prompts",
}
# axis -> its points, the middle one of each axis being where the other axes stay
POINTS = {
    "smoke": {"completion": (2, 4, 8), "group_size": (2, 4, 8), "prompts": (1, 2, 4)},
    "cpu": {"completion": (32, 128, 512), "group_size": (4, 8, 16), "prompts": (1, 2, 4)},
    "gpu": {"completion": (128, 512, 2048), "group_size": (4, 8, 16), "prompts": (2, 8, 32)},
}
PROMPT_TOKENS = {"smoke": 16, "cpu": 256, "gpu": 256}
TUNED = (2, False)  # trl-hf-tuned: (micro-batch, checkpointing)


def points(size: str) -> Iterator[dict[str, int]]:
    """Distinct points, one axis after the other: {"completion", "group_size", "prompts"}.

    >>> len(list(points("cpu")))
    7
    """
    middle = {axis: values[1] for axis, values in POINTS[size].items()}
    seen = []
    for axis in AXES:
        for value in POINTS[size][axis]:
            point = {**middle, axis: value}
            if point not in seen:
                seen.append(point)
                yield point


def main(arguments: list[str] | None = None) -> Path:
    """Measure what is missing, save, draw; returns the JSON's path."""
    options = _parse(arguments)
    folder, name = Path(options.out), f"step_scaling_{options.size}"
    if options.draw:
        path = folder / f"{name}.json"
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
        return path
    kept = Unfinished(folder / f".{name}.unfinished.json", same_for(options))
    every, found, peaks = list(points(options.size)), [], None
    for number, point in enumerate(every):
        tokens = PROMPT_TOKENS[options.size]
        shape = Shape(
            point["prompts"], point["group_size"], (tokens, tokens), None, point["completion"]
        )
        runner = prepare(options, shape, "words", kept, peaks)
        peaks = runner.prepared["peaks"]
        measured: dict[str, Measured] = {}
        tuned = options.tuned_micro_batch or TUNED[0], TUNED[1]
        for arm in options.arms:
            one = runner.measure(arm, tuned, what=f"{point} {runner.prepared['checksum']}")
            if isinstance(one, str):
                print(f"{arm}: {one}")
                continue
            measured[arm] = one
            first = next(iter(measured))
            check_same_work(
                {arm: one.step, first: measured[first].step}, runner.work, options.tolerance
            )
        said = ", ".join(f"{arm} {m.step.seconds:.2f} s" for arm, m in measured.items())
        least = runner.prepared["floor"]["seconds"]
        print(
            f"{number + 1} of {len(every)}: {point}: {said}, floor {least['step']:.2f} s",
            flush=True,
        )
        arms = {arm: _arm(m) for arm, m in measured.items()}
        floor = {
            k: v for k, v in runner.prepared["floor"].items() if k != "seconds with skipping"
        }
        found.append(
            {**point, "arms": arms, "floor": floor, "floor tokens": runner.prepared["least"]}
        )
    result = origin(options.command, "torch", "transformers", "trl") | {
        "weights": runner.prepared["weights"],
        "threads": runner.prepared["threads"],
        "tuning": options.tuning,
        "seed": options.seed,
        "n": 1,
        "prompt tokens": tokens,
        "trl-hf-tuned": {"micro-batch": tuned[0], "gradient checkpointing": tuned[1]},
        "axes": POINTS[options.size],
        "peaks": peaks,
        "formulas": FORMULAS,
        "points": found,
    }
    path = save(folder, name, result)
    kept.done()
    draw(result, path.with_suffix(".png"))
    print(f"saved {path} and {path.with_suffix('.png').name}")
    return path


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel an axis: seconds of a step by arm, and the floor below them; both scales logarithmic."""
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    arms = list(dict.fromkeys(arm for point in result["points"] for arm in point["arms"]))
    figure, panels = plt.subplots(
        1, len(AXES), figsize=(11, 3.8), sharey=True, layout="constrained"
    )
    middle = {axis: values[1] for axis, values in result["axes"].items()}
    for panel, axis in zip(panels, AXES, strict=True):
        line = [
            p
            for p in result["points"]
            if all(p[other] == middle[other] for other in AXES if other != axis)
        ]
        line.sort(key=lambda point: point[axis])
        for colour, arm in zip(colours, arms, strict=False):
            there = [point for point in line if arm in point["arms"]]
            x, y = [p[axis] for p in there], [p["arms"][arm]["seconds"] for p in there]
            panel.plot(x, y, "o-", color=colour, label=arm)
            for i, point in enumerate(there):
                if point["arms"][arm]["busy"]:
                    panel.plot(x[i], y[i], "x", color="black")
        floor = [point["floor"]["seconds"]["step"] for point in line]
        panel.plot([p[axis] for p in line], floor, "--", color="black", label="floor")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_xticks([p[axis] for p in line], [str(p[axis]) for p in line])
        panel.minorticks_off()
        fixed = ", ".join(f"{_short(other)} {middle[other]}" for other in AXES if other != axis)
        panel.set_title(fixed, fontsize="small")
        panel.set_xlabel(LABELS[axis])
    panels[0].set_ylabel("seconds of one step")
    panels[0].legend()
    what = f"{result['weights'].split(',')[0]}, prompts of {result['prompt tokens']} tokens, {result['hardware']}"
    busy = any(arm["busy"] for point in result["points"] for arm in point["arms"].values())
    figure.suptitle(
        f"{what}, {result['date']}" + "; x: beside other load" * busy, fontsize="small"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _short(axis: str) -> str:
    return {"completion": "completions of", "group_size": "groups of", "prompts": "prompts:"}[
        axis
    ]


def _arm(measured: Measured) -> dict[str, Any]:
    step = measured.step
    return {
        "seconds": step.seconds,
        "phases": step.phases,
        "tokens": step.tokens,
        "peak bytes": step.memory,
        "others' share of the cores": {"before": measured.before, "meanwhile": step.others},
        "busy": measured.busy,
        "code": measured.code,
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.prog = "benchmarks.step.scaling"
    parser.add_argument(
        "--arms", default="kit", help=f"of {', '.join(ARMS)}; kit-before comes with --before"
    )
    parser.add_argument("--draw", action="store_true", help="only the figure, from the JSON")
    options = parse_common(parser, arguments)
    options.arms = options.arms.split(",")
    if unknown := sorted(set(options.arms) - set(ARMS)):
        parser.error(f"--arms: {', '.join(unknown)} not known; use {', '.join(ARMS)}")
    if options.before and BEFORE not in options.arms:
        options.arms.append(BEFORE)
    if BEFORE in options.arms and not options.before:
        parser.error(f"--arms {BEFORE}: give the checkout with --before")
    return options


if __name__ == "__main__":
    main()
