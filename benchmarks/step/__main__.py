"""One GRPO step, the arms in turn: same weights, prompts, completions, rewards; what differs is how it is done.

    python -m benchmarks.step --arms trl-hf,trl-hf-tuned,kit --size cpu --workload realistic --rounds 2
    python -m benchmarks.step --workload main-job --before ../an_older_checkout

Every measurement is one step of a fresh trainer in a fresh process. After each, the arm must have done the same work
as the first of the reference arms: equal tokens and rewards, loss and gradient norm within a tolerance; else it stops.
Each measurement is saved: the same command goes on where it was stopped, and measures anew what other code measured.
Prints tables and saves benchmarks/results/step_<size>_<workload>.json. benchmarks/README.md says how to read it.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.result import RESULTS, command_line, save, versions
from benchmarks.step.arms import ARMS, cannot_run
from benchmarks.step.processes import in_a_child
from benchmarks.step.report import REFERENCES, make_result, result_name
from benchmarks.step.run import BEFORE, TOLERANCE, Measured, Runner, check_same_work, model_of
from benchmarks.step.sizes import SIZES, WORKLOADS
from benchmarks.step.tables import tables
from benchmarks.step.unfinished import Unfinished
from benchmarks.step.workload import Shape
from grpo_kit.models._model_facts import hardware

# (micro-batch, checkpointing) of which TRL gets the fastest
CANDIDATES = {
    True: [(2, False), (4, False), (8, False), (16, False), (8, True), (16, True), (32, True)],
    False: [(2, False), (8, False), (32, False)],  # by cuda
}


def main(arguments: list[str] | None = None) -> Path:
    """Run, check, print, save; returns the file written."""
    options = _parse(arguments)
    arms, absent = _arms(options)
    for arm, why in absent.items():
        print(f"{arm}: {why}")
    runner = prepare(options, SIZES[options.size].shape(options.workload), options.workload)
    lengths = [
        sum(map(len, ids)) for ids in (runner.work.prompt_ids, runner.work.completion_ids)
    ]
    print(
        f"{', '.join(arms)}: {options.rounds} rounds of {lengths[0]} prompt and {lengths[1]} completion tokens",
        flush=True,
    )
    tuned = SIZES[options.size].tuned.get(options.workload)
    if options.tuned_micro_batch:
        tuned = options.tuned_micro_batch, False
    if tuned is None:
        tuned = _fastest(runner) if {*arms} & {"trl-hf-tuned", "kit-rollout"} else (1, True)
    rounds: list[dict[str, Measured]] = []
    for number in range(options.rounds):
        rounds.append({})
        for arm in list(arms):
            measured = runner.measure(arm, tuned, number)
            if isinstance(measured, str):
                absent[arm] = measured
                print(f"{arm}: {measured}")
                arms.remove(arm)
                continue
            rounds[-1][arm] = measured
            reference = next((a for a in REFERENCES if a in rounds[0]), next(iter(rounds[0])))
            steps = {arm: measured.step, reference: rounds[0][reference].step}
            check_same_work(steps, runner.work, options.tolerance)
            done = sum(map(len, rounds))
            left = runner.seconds_a_measurement * (options.rounds * len(arms) - done)
            print(
                f"round {number + 1}: {arm} {measured.step.seconds:.2f} s (about {left / 60:.1f} min left)",
                flush=True,
            )
    result = make_result(options, runner.prepared, tuned, rounds, absent)
    if not result["arms"]:
        runner.kept.done()  # else the same command would read again what could not be measured
        raise SystemExit(tables(result))
    print(tables(result))
    path = save(Path(options.out), result_name(options), result)
    runner.kept.done()
    print(f"saved {path}")
    return path


def prepare(
    options: argparse.Namespace,
    shape: Shape,
    kind: str,
    kept: Unfinished | None = None,
    peaks: dict[str, float] | None = None,
) -> Runner:
    """The work and the machine's peaks, in a process of their own; and what an earlier call has measured of it.

    kept: where measurements are kept, None: a file of this work. peaks: known ones.
    """
    work = {"kind": kind, "size": options.size, "shape": asdict(shape), "seed": options.seed}
    asked = {"do": "prepare", "model": model_of(options), "work": work, "peaks": peaks}
    prepared = in_a_child(asked)
    if "error" in prepared:
        raise SystemExit(f"the work could not be made: {prepared['error']}")
    if kept is None:
        kept = Unfinished(
            Path(options.out, f".{result_name(options)}.unfinished.json"),
            same_for(options) | {"work": prepared["checksum"]},
        )
    return Runner(options, prepared, kept)


def same_for(options: argparse.Namespace) -> dict:
    """What has to be equal for two measurements to be compared."""
    return {
        "weights and seed": model_of(options),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "versions": versions("torch", "transformers", "trl"),
    }


def parse_common(
    parser: argparse.ArgumentParser, arguments: list[str] | None
) -> argparse.Namespace:
    """Options that every command of this benchmark has, and what follows from them."""
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--before", help="another checkout, whose kit is the arm kit-before")
    parser.add_argument(
        "--busy", action="store_true", help="go on beside other load, and note it"
    )
    parser.add_argument("--tuning", choices=("full", "lora"), default="full")
    parser.add_argument("--model", help="name or folder, in place of the size's own")
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="Qwen2.5-1.5B's shapes (smoke: tiny ones), no download",
    )
    parser.add_argument(
        "--memory-cap-gib", type=float, help="CUDA: as if the card had no more, e.g. 22.5"
    )
    parser.add_argument(
        "--tuned-micro-batch", type=int, help="for trl-hf-tuned, without checkpointing"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(RESULTS), help="folder of the JSON")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    shown = ["<a checkout>" if argument == options.before else argument for argument in given]
    options.command = " ".join(["python", "-m", parser.prog, *shown])
    options.load = os.getloadavg()[0]
    options.model = options.model or SIZES[options.size].model
    options.cuda = options.size == "gpu"
    if options.cuda and not torch.cuda.is_available():
        parser.error("--size gpu needs a CUDA device; use --size cpu")
    if options.memory_cap_gib and not options.cuda:
        parser.error("--memory-cap-gib has no effect without --size gpu")
    if options.before and not Path(options.before, "grpo_kit", "__init__.py").is_file():
        parser.error(
            f"--before {options.before}: no grpo_kit in it; give the folder of a checkout"
        )
    options.dtype = "bfloat16" if options.cuda else "float32"
    options.tolerance = TOLERANCE[options.dtype]
    return options


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.prog = "benchmarks.step"
    parser.add_argument(
        "--arms", default="trl-hf,trl-hf-tuned,kit", help=f"of {', '.join(ARMS)}"
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="realistic")
    parser.add_argument("--rounds", type=int, help="measurements of each arm (cpu 1, gpu 5)")
    options = parse_common(parser, arguments)
    options.rounds = SIZES[options.size].rounds if options.rounds is None else options.rounds
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    if options.random_weights and options.workload in ("main-job", "think"):
        parser.error(
            f"--workload {options.workload} needs a chat template; --random-weights has none"
        )
    return options


def _arms(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The arms to run and, of the others, why not; with --before, `kit` becomes kit-before and kit."""
    kit = [BEFORE, "kit"] if options.before else ["kit"]
    wanted = options.arms.split(",")
    names = dict.fromkeys(n for arm in wanted for n in (kit if arm == "kit" else [arm]))
    if unknown := sorted(set(names) - set(ARMS)):
        raise SystemExit(f"--arms: {', '.join(unknown)} not known; use {', '.join(ARMS)}")
    absent = {arm: why for arm in names if (why := cannot_run(arm))}
    if BEFORE in names and not options.before:
        absent[BEFORE] = "give the checkout with --before"
    arms = [arm for arm in names if arm not in absent]
    if not arms:
        raise SystemExit(f"--arms {options.arms}: none of these can run here: {absent}")
    return arms, absent


def _fastest(runner: Runner) -> tuple[int, bool]:
    """The candidate with the shortest update that fits, each measured for one step."""
    seconds = {}
    rows = len(runner.work.completion_ids)
    candidates = [c for c in CANDIDATES[runner.options.cuda] if rows % c[0] == 0]
    for candidate in candidates:
        measured = runner.measure("trl-hf-tuned", candidate, what="tuning")
        if isinstance(measured, str):
            print(f"trl-hf-tuned: {candidate} {measured}")
            continue
        seconds[candidate] = measured.step.phases["forward-backward"]
        print(
            f"trl-hf-tuned: {candidate} (micro-batch, checkpointing) {seconds[candidate]:.2f} s",
            flush=True,
        )
    if not seconds:
        raise SystemExit(f"trl-hf-tuned: none of {candidates} fits; raise --memory-cap-gib")
    return min(seconds, key=seconds.get)


if __name__ == "__main__":
    main()
