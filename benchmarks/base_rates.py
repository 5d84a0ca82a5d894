"""How often a model is right before any training: every task's base rate, from samples at temperature 1.

    python -m benchmarks.base_rates                                    # SmolLM2-135M-Instruct, every short task
    python -m benchmarks.base_rates --tasks thinking --model FOLDER --name qwen2.5-coder-0.5b-instruct \\
        --weights "what they are" --dtype bfloat16                     # tasks with and without thoughts
    python -m benchmarks.base_rates --tasks interval_scheduling tools --model smoke  # a tiny random model, seconds
    python -m benchmarks.base_rates --model NAME --show                # what was measured, as a table

For each task: pass@1, pass@k and the mean reward with their 95 % intervals (bootstrap over prompts), the share of
well-formed answers, the share of groups that hold right and wrong and of those whose rewards differ (what GRPO can
learn from), how long completions are, the best constant strategy on the same rows, and what readiness says.
--tasks: names, short (the default), thinking, or turns: worlds of several turns, with what plays them perfectly and at
random beside the best sequence of actions that reads no reply (in base_rates_<name>_turns.json).
Writes benchmarks/results/base_rates_<name>.json; tasks already there are measured again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

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
from examples.calculator import calculator
from examples.lookup import lookup
from examples.phone import phone
from examples.shop import shop
from examples.tools import tools
from grpo_kit import episodes, load_policy, preset, tasks
from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean
from grpo_kit.evaluation.readiness import Readiness, readiness
from grpo_kit.more.episodes import EpisodeTask
from grpo_kit.rewards import SoftFormat

STEP_BY_STEP = "Let's solve this step by step.\n<think>\n"
# countdown's plain examples
_KNOWN = {2: ("3 * 5", 15), 3: ("(3 + 5) * 2", 16), 4: ("(3 + 5) * 2 + 9", 25)}


def countdown(numbers: int | tuple[int, int], **options: Any) -> tasks.Task:
    """With so many numbers in a question, or between so many."""
    return tasks.countdown(
        numbers=(numbers, numbers) if isinstance(numbers, int) else numbers,
        n_held_out=64,
        **options,
    )


def thinking(numbers: int | tuple[int, int]) -> tasks.Task:
    """With thoughts, and each operator as often: what the profiles of cards train on."""
    return countdown(numbers, balanced=True, think=True)


def countdown_that_knows(numbers: int) -> tasks.Task:
    """With thoughts, and a worked example that knows the answer at once."""
    task, plain = countdown(numbers, think=True), countdown(numbers)
    solution, target = _KNOWN[numbers]
    response = (
        f"<think>\nI try {solution}, which is {target}.\n</think>\n<answer>{solution}</answer>"
    )
    return replace(task, examples=((plain.examples[0][0], response),))


def gsm8k(**changes: Any) -> tasks.Task:
    """Of one half of the test questions the other half held out, as long as thoughts are worth waiting for here."""
    return replace(tasks.gsm8k(train="test", max_completion_tokens=256), **changes)


def without_thoughts(task: tasks.Task) -> tasks.Task:
    """The answer at once: prefill, system text, format and example without thoughts."""
    (question, response), *_ = task.examples
    return replace(
        task,
        system="Answer with the number alone in <answer> tags.",
        prefill="<answer>",
        examples=((question, response.partition("</think>\n")[2]),),
        rewards=[task.rewards[0], SoftFormat(think=None)],
        max_completion_tokens=16,
    )


def arithmetic_in_thoughts() -> tasks.Task:
    """Sums with a place to carry in."""
    system = "Think in <think> tags, then: answer in <answer> tags."
    example = (
        "What is 21 + 34?",
        "<think>\n20 + 30 = 50, 1 + 4 = 5, 50 + 5 = 55.\n</think>\n<answer>55</answer>",
    )
    plain = arithmetic()
    changes = {
        "system": system,
        "prefill": "<think>\n",
        "examples": (example,),
        "max_completion_tokens": 96,
    }
    return replace(plain, rewards=[plain.rewards[0], SoftFormat()], **changes)


def code_in_words_first() -> tasks.Task:
    """No example, a sentence or two before the block."""
    return replace(
        tasks.code(levels=(1, 2), n_held_out=24),
        system="Think about it in a sentence or two, then answer with one Python code block.",
        prefill="Let's solve this step by step.\n",
        examples=(),
        max_completion_tokens=256,
    )


SHORT = {
    "largest": lambda: tasks.largest(),
    "arithmetic": arithmetic,
    "countdown, 2 numbers": lambda: countdown(2),
    "countdown, 3 numbers": lambda: countdown(3),
    "code, level 1": lambda: tasks.code(levels=(1,), n_held_out=24),
    "code, level 2": lambda: tasks.code(levels=(2,), n_held_out=20),
    "code, level 3": lambda: tasks.code(levels=(3,), n_held_out=20),
    "interval_scheduling": lambda: tasks.interval_scheduling(),
    "science": lambda: tasks.science(),
    "tools": tools,
}
THINKING = {
    "countdown, 2 numbers": lambda: countdown(2),
    "countdown, 2 numbers, thoughts, examples that know": lambda: countdown_that_knows(2),
    "countdown, 2 numbers, thoughts": lambda: countdown(2, think=True),
    "countdown, 2 and 3 numbers, thoughts": lambda: countdown((2, 3), think=True),
    "countdown, 3 numbers": lambda: countdown(3),
    "countdown, 3 numbers, thoughts, examples that know": lambda: countdown_that_knows(3),
    "countdown, 3 numbers, thoughts": lambda: countdown(3, think=True),
    "balanced countdown, 2 numbers": lambda: countdown(2, balanced=True),
    "balanced countdown, 2 numbers, thoughts": lambda: thinking(2),
    "balanced countdown, 2 numbers, thoughts, shorter search last": lambda: replace(
        thinking(2), examples=thinking(2).examples[::-1]
    ),
    "balanced countdown, 2 numbers, thoughts, no example": lambda: replace(
        thinking(2), examples=()
    ),
    "balanced countdown, 2 numbers, thoughts, step by step": lambda: replace(
        thinking(2), prefill=STEP_BY_STEP
    ),
    "balanced countdown, 2 and 3 numbers, thoughts": lambda: thinking((2, 3)),
    "balanced countdown, 3 numbers, thoughts": lambda: thinking(3),
    "balanced countdown, 3 and 4 numbers, thoughts": lambda: thinking((3, 4)),
    "balanced countdown, 4 numbers, thoughts": lambda: thinking(4),
    "gsm8k, no thoughts": lambda: without_thoughts(gsm8k()),
    "gsm8k, thoughts": lambda: gsm8k(),
    "gsm8k, thoughts, no example": lambda: gsm8k(examples=()),
    "gsm8k, thoughts, step by step": lambda: gsm8k(prefill=STEP_BY_STEP),
    "gsm8k, thoughts, step by step, no example": lambda: gsm8k(
        prefill=STEP_BY_STEP, examples=()
    ),
    "arithmetic": arithmetic,
    "arithmetic, thoughts": arithmetic_in_thoughts,
    "code, levels 1 and 2": lambda: tasks.code(levels=(1, 2), n_held_out=24),
    "code, levels 1 and 2, words first, no example": code_in_words_first,
}
TURNS = {
    "grid, 6 turns": lambda: episodes.grid(64, size=5, max_turns=6),
    "lookup": lookup,
    "calculator": calculator,
    "shop": shop,
    "phone": phone,
}
MADE = SHORT | THINKING | TURNS


def text(estimate: Estimate) -> str:
    """'0.250 [0.150, 0.350]'"""
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def row(ready: Readiness) -> dict[str, Any]:
    """What a table says of a task."""
    means = [
        sum(r * count for r, count in held.items()) / sum(held.values())
        for held in ready.rewards
        if held
    ]
    name, best = ready.constant or ("there is none", 0.0)
    lengths = ready.lengths
    return {
        "pass@1": text(ready.pass_at[1]),
        f"pass@{ready.samples}": text(ready.pass_at[ready.samples]),
        "mean reward": text(bootstrap_mean(means)),
        "well-formed": round(ready.format_rate.value, 3),
        "groups with right and wrong": text(ready.signal_right()),
        "groups with a signal": round(ready.signal_reward().value, 3),
        "tokens, median": lengths.quantile(0.5),
        "cut off": f"{lengths.cut_off} of {ready.n * ready.samples} at {lengths.limit}",
        "best constant": f"{best:.3f} ({name})",
        "readiness": ready.verdict,
        "prompts": ready.n,
        "group_size": ready.samples,
    }


def shown(saved: dict[str, Any]) -> str:
    """The file's rows as a Markdown table."""
    names = list(next(reversed(saved["tasks"].values())))
    lines = ["| task | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| {task} | " + " | ".join(str(found.get(name, "")) for name in names) + " |"
        for task, found in saved["tasks"].items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure the tasks asked for, print each as it comes, save all."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, path, or smoke")
    add_name_and_weights(parser)
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights"
    )
    kinds = {"short": SHORT, "thinking": THINKING, "turns": TURNS}
    parser.add_argument(
        "--tasks", nargs="+", default=["short"], choices=[*kinds, *MADE], metavar="TASK"
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--missing", action="store_true", help="only tasks that the file does not have"
    )
    parser.add_argument(
        "--show", action="store_true", help="print what the file has, measure nothing"
    )
    options = parser.parse_args()
    smoke = options.model == "smoke"
    asked = preset("smoke").model if smoke else options.model
    name = options.name or Path(asked).name.lower()
    chosen = list(
        dict.fromkeys(task for name in options.tasks for task in kinds.get(name, [name]))
    )
    several = "_turns" if set(chosen) <= set(TURNS) else ""
    path = RESULTS / f"base_rates_{name}{several}.json"
    saved = read_result(path, tasks={})
    if options.show:
        print(shown(saved))
        return
    model, tokenizer = load_policy(asked, dtype=options.dtype, quiet=True)
    model.eval()
    command = (
        f"python -m benchmarks.base_rates --model {name} --tasks {' '.join(options.tasks)} --dtype {options.dtype} "
        f"--prompts {options.prompts} --group-size {options.group_size}"
    )
    saved |= origin(command, "torch", "transformers") | {
        "dtype": options.dtype,
        "seed": options.seed,
    }
    saved["weights"] = options.weights or WEIGHTS.get(asked, name)
    for task in chosen:
        if options.missing and task in saved["tasks"]:
            continue
        torch.manual_seed(options.seed)
        made, size = MADE[task](), 2 if smoke else options.group_size
        rows = made.held_out[: 2 if smoke else options.prompts]
        how = {"samples": size, "group_size": size, "seed": options.seed}
        found = row(
            readiness(model, tokenizer, made, rows=rows, seconds=None, quiet=True, **how)
        )
        if isinstance(made, EpisodeTask):
            found |= {
                "random": round(made.blind(rows).get("random", 0.0), 3),
                "optimum": made.score(made.optimum, rows),
            }
        saved["tasks"][task] = found
        print(task, json.dumps(found), flush=True)
        if not smoke:
            write_result(path, saved)


if __name__ == "__main__":
    main()
