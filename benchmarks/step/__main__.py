"""One GRPO step, the arms in turn: same weights, prompts, completions, rewards; what differs is how it is done.

    python -m benchmarks.step --arms trl-hf,trl-hf-tuned,kit --size cpu --workload realistic --rounds 2

Every measurement is one step of a fresh trainer. After each, the arm must have done the same work as the first of
the reference arms: equal tokens and rewards, loss and gradient norm within a tolerance; otherwise it stops. Prints a
table and saves benchmarks/results/step_<size>_<workload>.json. benchmarks/README.md says how to read it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.result import RESULTS, WEIGHTS, command_line, save
from benchmarks.step.arms import ARMS, Setup, cannot_run, measure, release
from benchmarks.step.phases import Step
from benchmarks.step.report import REFERENCES, make_result, result_name, table
from benchmarks.step.sizes import SIZES, random_weights
from benchmarks.step.workload import Workload, make_workload
from grpo_kit import load_policy

# Relative, for loss and gradient norm. Rounding alone: on this work SmolLM2's gradient of layer 0's v_proj is off by
# 0.2 to 0.3 % of the float64 one, packed or padded, and it carries the norm; the other parameters by 0.002 %.
TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-2}


CANDIDATES = [(2, False), (4, False), (8, False), (16, False), (8, True), (16, True), (32, True)]


def main(arguments: list[str] | None = None) -> Path:
    """Run, check, print, save; returns the file written."""
    options = _parse(arguments)
    arms, absent = _arms(options.arms, options.skip)
    for arm, why in absent.items():
        print(f"{arm}: {why}")
    setup, weights = _prepare(options)
    tokens = [sum(map(len, ids)) for ids in (setup.workload.prompt_ids, setup.workload.completion_ids)]
    print(
        f"{', '.join(arms)}: {options.rounds} rounds of {tokens[0]} prompt and {tokens[1]} completion tokens"
    )
    started = time.perf_counter()
    rounds: list[dict[str, Step]] = []
    for number in range(options.rounds):
        rounds.append({})
        for arm in list(arms):
            try:
                step = measure(arm, setup)
            except torch.cuda.OutOfMemoryError:
                absent[arm] = "out of memory"
            if arm in absent:
                print(f"{arm}: {absent[arm]}")
                arms.remove(arm)
                release(setup.cuda)
                continue
            rounds[-1][arm] = step
            reference = next((a for a in REFERENCES if a in rounds[0]), next(iter(rounds[0])))
            check_same_work({arm: step, reference: rounds[0][reference]}, setup.workload, options.tolerance)
            done = sum(map(len, rounds))
            left = (time.perf_counter() - started) / done * (options.rounds * len(arms) - done)
            print(
                f"round {number + 1}: {arm} {step.seconds:.2f} s (about {left / 60:.1f} min left)",
                flush=True,
            )
    result = make_result(options, setup, weights, rounds, absent)
    print(table(result))
    path = save(Path(options.out), result_name(options), result)
    print(f"saved {path}")
    return path


def check_same_work(steps: dict[str, Step], work: Workload, tolerance: float) -> None:
    """Stop unless all did the same: the work's tokens, equal rewards, loss and gradient norm within the tolerance.

    Loss is a mean over tokens of numbers around 1, so below 0.1 it is compared with 0.1.
    Raises SystemExit that shows both.
    """
    (arm, one), (other, two) = list(steps.items())[0], list(steps.items())[-1]
    for name, step in steps.items():
        if step.completion_ids != work.completion_ids:
            counts = [sum(map(len, ids)) for ids in (step.completion_ids, work.completion_ids)]
            raise SystemExit(
                f"{name} trained on other completions: {counts[0]} tokens, the work has {counts[1]}"
            )
    if one.rewards != two.rewards:
        raise SystemExit(f"rewards differ: {arm} {one.rewards}, {other} {two.rewards}")
    for name, least in (("loss", 0.1), ("grad_norm", 0.0)):
        a, b = getattr(one, name), getattr(two, name)
        if not abs(a - b) <= tolerance * max(abs(b), least):
            raise SystemExit(
                f"{name} differs by more than {tolerance:g} of its size: {arm} {a!r}, {other} {b!r}"
            )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--arms", default="trl-hf,trl-hf-tuned,kit", help=f"of {', '.join(ARMS)}, unsloth")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--workload", choices=("realistic", "fixed"), default="realistic")
    parser.add_argument("--rounds", type=int, help="measurements of each arm (cpu 1, gpu 5)")
    parser.add_argument(
        "--skip", choices=("on", "off", "both"), default="both", help="`kit` with skipping, without, or both"
    )
    parser.add_argument("--tuning", choices=("full", "lora"), default="full")
    parser.add_argument("--model", help="name or folder, in place of the size's own")
    parser.add_argument("--random-weights", action="store_true", help="Qwen2.5-1.5B's shapes, no download")
    parser.add_argument("--memory-cap-gib", type=float, help="CUDA: as if the card had no more, e.g. 22.5")
    parser.add_argument("--tuned-micro-batch", type=int, help="for trl-hf-tuned, without checkpointing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(RESULTS), help="folder of the JSON")
    options = parser.parse_args(arguments)
    options.command = shlex.join(["python", "-m", "benchmarks.step", *(arguments or sys.argv[1:])])
    options.rounds = SIZES[options.size].rounds if options.rounds is None else options.rounds
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    options.load = os.getloadavg()[0]
    options.cuda = options.size == "gpu"
    if options.cuda and not torch.cuda.is_available():
        parser.error("--size gpu needs a CUDA device; use --size cpu")
    if options.memory_cap_gib and not options.cuda:
        parser.error("--memory-cap-gib has no effect without --size gpu")
    options.dtype = "bfloat16" if options.cuda else "float32"
    options.tolerance = TOLERANCE[options.dtype]
    return options


def _arms(wanted: str, skip: str) -> tuple[list[str], dict[str, str]]:
    """The arms to run and, of the others, why not; `kit` becomes kit, kit-skip or both."""
    kit = {"on": ["kit-skip"], "off": ["kit"], "both": ["kit", "kit-skip"]}[skip]
    names = dict.fromkeys(n for arm in wanted.split(",") for n in (kit if arm == "kit" else [arm]))
    if unknown := sorted(set(names) - {*ARMS, "unsloth"}):
        raise SystemExit(f"--arms: {', '.join(unknown)} not known; use {', '.join(ARMS)}, unsloth")
    absent = {arm: why for arm in names if (why := cannot_run(arm))}
    arms = [arm for arm in names if arm not in absent]
    if not arms:
        raise SystemExit(f"--arms {wanted}: none of these can run here: {absent}")
    return arms, absent


def _prepare(options: argparse.Namespace) -> tuple[Setup, str]:
    size = SIZES[options.size]
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)
    if options.memory_cap_gib:
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_cap_gib / total))
    torch.manual_seed(options.seed)
    if options.random_weights:
        model, tokenizer = random_weights(options.tuning, options.dtype)
        weights = "Qwen2.5-1.5B's shapes, random weights; made-up words as tokens"
    else:
        name = options.model or size.model
        model, tokenizer = load_policy(name, tuning=options.tuning, dtype=options.dtype, quiet=True)
        weights = WEIGHTS.get(name, name)
    work = make_workload(
        tokenizer,
        options.workload,
        prompts=size.prompts,
        group_size=size.group_size,
        prompt_tokens=size.prompt_tokens,
        mean_completion=size.mean_completion,
        max_completion=size.max_completion,
        seed=options.seed,
    )
    tuned = (options.tuned_micro_batch, False) if options.tuned_micro_batch else size.tuned
    setup = Setup(
        model=model.to("cpu"),
        tokenizer=tokenizer,
        workload=work,
        cuda=options.cuda,
        bf16=options.cuda,
        warmup=1 if options.cuda else 0,
        tuned=tuned or (1, True),
    )
    return (setup if tuned else replace(setup, tuned=_fastest(setup))), weights


def _fastest(setup: Setup) -> tuple[int, bool]:
    """The candidate with the shortest update that fits, each measured for one step."""
    seconds = {}
    for candidate in CANDIDATES:
        try:
            step = measure("trl-hf-tuned", replace(setup, tuned=candidate, warmup=0))
        except torch.cuda.OutOfMemoryError:
            print(f"trl-hf-tuned: {candidate} does not fit")
            step = None
        if step is None:
            release(setup.cuda)
            continue
        seconds[candidate] = step.phases["forward-backward"]
        print(
            f"trl-hf-tuned: {candidate} (micro-batch, checkpointing) {seconds[candidate]:.2f} s", flush=True
        )
    if not seconds:
        raise SystemExit(f"trl-hf-tuned: none of {CANDIDATES} fits; raise --memory-cap-gib")
    return min(seconds, key=seconds.get)


if __name__ == "__main__":
    main()
