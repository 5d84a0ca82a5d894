"""How often a model is right before any training: every task's base rate, from samples at temperature 1.

    python -m benchmarks.base_rates                                    # SmolLM2-135M-Instruct, every task
    python -m benchmarks.base_rates --tasks events tools --model smoke  # a tiny random model, seconds

For each task: pass@1 and the mean reward with their 95 % intervals (bootstrap over prompts), the share of well-formed
answers, the share of groups whose rewards differ (what GRPO can learn from), and the best constant strategy on the
same rows. Writes benchmarks/results/base_rates_<model>.json; tasks already there are measured again.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.result import RESULTS, WEIGHTS, command_line, origin
from grpo_kit import load_policy, profile, tasks
from grpo_kit.evaluation.answers import answer
from grpo_kit.evaluation.intervals import bootstrap_mean

MADE = {
    "largest": lambda: tasks.largest(),
    "arithmetic": lambda: tasks.arithmetic(),
    "countdown, 2 numbers": lambda: tasks.countdown(numbers=(2, 2)),
    "countdown, 3 numbers": lambda: tasks.countdown(numbers=(3, 3)),
    "code, level 1": lambda: tasks.code(levels=(1,), n_held_out=24),
    "code, level 2": lambda: tasks.code(levels=(2,), n_held_out=20),
    "code, level 3": lambda: tasks.code(levels=(3,), n_held_out=20),
    "events": lambda: tasks.events(),
    "science": lambda: tasks.science(),
    "tools": lambda: tasks.tools(),
}


def measure(model, tokenizer, task: tasks.Task, *, prompts: int, group_size: int, seed: int) -> dict:
    """Sample `group_size` completions of the first `prompts` held-out rows and judge them."""
    rows = task.held_out[:prompts]
    made = answer(model, tokenizer, task, rows, samples=group_size, temperature=1.0, seed=seed)
    judged = [[reward for reward in group if reward is not None] for group in made.by_row(made.rewards)]

    def interval(groups: list[list[float]]) -> str:
        e = bootstrap_mean([sum(group) / len(group) for group in groups if group])
        return f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]"

    signal = [len(group) > 1 and max(group) - min(group) > 1e-6 for group in judged]
    tokens = [completion.tokens for completion in made.completions]
    name, best = task.best_constant(rows)
    return {
        "pass@1": interval(made.by_row([float(right) for right in made.right])),
        "mean reward": interval(judged),
        "well-formed": round(sum(made.formatted) / len(made.formatted), 3),
        "groups with a signal": round(sum(signal) / len(signal), 3),
        "tokens, mean": round(sum(tokens) / len(tokens), 1),
        "best constant": f"{best:.3f} ({name})",
        "prompts": len(rows),
        "group_size": group_size,
    }


def main() -> None:
    """Measure the tasks asked for, print each as it comes, save all."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, path, or smoke")
    parser.add_argument("--weights", help="what the weights are, for the record, where --model is a path")
    parser.add_argument("--tasks", nargs="+", default=list(MADE), choices=list(MADE), metavar="TASK")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    smoke = options.model == "smoke"
    name = profile("smoke").model if smoke else options.model
    model, tokenizer = load_policy(name, quiet=True)
    model.eval()
    path = RESULTS / f"base_rates_{Path(name).name.lower()}.json"
    saved = json.loads(path.read_text()) if path.exists() else {"tasks": {}}
    command = f"python -m benchmarks.base_rates --model {Path(name).name} --prompts {options.prompts}"
    saved |= origin(command, "torch", "transformers")
    saved |= {"weights": options.weights or WEIGHTS.get(name, name), "seed": options.seed}
    for task in options.tasks:
        torch.manual_seed(options.seed)
        prompts, group_size = (2, 2) if smoke else (options.prompts, options.group_size)
        found = measure(
            model, tokenizer, MADE[task](), prompts=prompts, group_size=group_size, seed=options.seed
        )
        saved["tasks"][task] = found
        print(task, json.dumps(found), flush=True)
        if not smoke:
            path.write_text(json.dumps(saved, indent=2) + "\n")


if __name__ == "__main__":
    main()
