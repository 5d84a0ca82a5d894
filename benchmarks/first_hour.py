"""A newcomer's first hour, from rows of their own to a tuned model, on whatever versions are installed.

    python -m benchmarks.first_hour labels       # or json, text, gsm8k: one line more in the results
    python -m benchmarks.first_hour --table      # the table in Markdown, from what is there; trains nothing

Each is written from README and docs alone: rows, a task, readiness, 16 steps of 2 x 8 completions of SmolLM2-135M on
the CPU, base beside tuned on rows that were held out. Everything the kit prints is printed, to be read.
Minutes count from the start of Python: to the first reward of a training step, and to the comparison.
Writes benchmarks/results/first_hours.jsonl.
"""

from __future__ import annotations

import csv
import json
import random
import sys
import tempfile
import time
from pathlib import Path

STARTED = time.perf_counter()

import grpo_kit as kit  # noqa: E402
from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, six_digits  # noqa: E402

FILE = RESULTS / "first_hours.jsonl"
MODEL, STEPS, HELD_OUT = "smollm2-135m-instruct", 16, 40
PACKAGES = ("torch", "transformers", "peft", "datasets", "numpy", "pandas")
LABELS = {
    "billing": "invoice refund charge payment receipt price fee bill".split(),
    "delivery": "parcel courier shipment address tracking box van driver".split(),
    "account": "password login username email profile settings code lock".split(),
}
NAMES = "Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Klara Leo".split()
CITIES = "Paris Rome Oslo Berlin Madrid Vienna Lisbon Dublin Prague Athens".split()


def labels(folder: Path):
    """Messages and their label, in a CSV."""
    words = [(word, label) for label, known in LABELS.items() for word in known]
    rows = [
        (f"I have a question about my {word}, number {n}.", label)
        for n in range(1, 9)
        for word, label in words
    ]
    random.Random(0).shuffle(rows)
    with open(folder / "tickets.csv", "w", newline="") as file:
        csv.writer(file).writerows([("message", "label"), *rows])
    import pandas as pd

    return kit.tasks.from_rows(
        "labels", pd.read_csv(folder / "tickets.csv"), question="message", answer="label",
        reward=kit.rewards.ExactAnswer(), prefill="<answer>", max_completion_tokens=8,
        examples=[("I have a question about my sofa.", "<answer>delivery</answer>")],
        system="Sort the message: billing, delivery or account. Write <answer>label</answer>.",
    )  # fmt: skip


def json_of_three(folder: Path):
    """Name, city and age out of a sentence; the columns are called so, and the reward is one's own."""
    rng = random.Random(0)
    rows = []
    for _ in range(200):
        name, city, age = rng.choice(NAMES), rng.choice(CITIES), rng.randint(18, 80)
        rows.append(
            {
                "question": f"{name}, {age}, lives in {city}.",
                "name": name,
                "city": city,
                "age": age,
            }
        )

    def fields(completions, name, city, age, **columns):
        earned = []
        for text, *golds in zip(completions, name, city, age, strict=True):
            try:
                found = json.loads("{" + text.split("}")[0] + "}")
                right = [
                    str(found.get(k)) == str(gold)
                    for k, gold in zip(("name", "city", "age"), golds, strict=True)
                ]
                earned.append(0.25 + sum(right) / 4)
            except (ValueError, AttributeError):
                earned.append(0.0)
        return earned

    return kit.tasks.from_rows(
        "json", rows, reward=fields, prefill="{", max_completion_tokens=32,
        system='Answer with JSON: {"name": ..., "city": ..., "age": ...}',
    )  # fmt: skip


def text(folder: Path):
    """A sentence in the past, judged by BLEU: partial credit, seldom the very words."""
    verbs = {
        "walks": "walked",
        "looks": "looked",
        "waits": "waited",
        "works": "worked",
        "talks": "talked",
    }
    rows = [
        {"question": f"{name} {now} in {city} today.", "answer": f"{name} {then} in {city} yesterday."}
        for name in NAMES for city in CITIES[:5] for now, then in verbs.items()
    ]  # fmt: skip
    random.Random(0).shuffle(rows)
    return kit.tasks.from_rows(
        "past", rows, reward=kit.rewards.Bleu(tag=None), max_completion_tokens=20,
        system="Say the sentence about yesterday.",
    )  # fmt: skip


def gsm8k(folder: Path):
    """Rows as GSM8K has them: a worked solution, then #### and the number. The first try forgets that."""
    rng = random.Random(0)
    rows = []
    for _ in range(200):
        name, a, b = rng.choice(NAMES), rng.randint(2, 20), rng.randint(2, 20)
        solution = f"{name} has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}"
        rows.append(
            {
                "question": f"{name} has {a} apples and buys {b} more. How many are there?",
                "answer": solution,
            }
        )
    shape = dict(
        reward=[kit.rewards.NumericAnswer(), kit.rewards.SoftFormat(think=None)], reward_weights=[0.75, 0.25],
        prefill="<answer>", max_completion_tokens=12,
        examples=[("Ida has 1 apple and buys 1 more. How many?", "<answer>2</answer>")],
    )  # fmt: skip
    try:
        return kit.tasks.from_rows("apples", rows, **shape)
    except ValueError as error:
        print(f"ValueError: {error}")
    return kit.tasks.from_rows("apples", rows, answer_after="####", **shape)


HOURS = {"labels": labels, "json": json_of_three, "text": text, "gsm8k": gsm8k}


def hour(name: str) -> dict:
    """One first hour, and what a result says of it."""
    minutes = {}
    with tempfile.TemporaryDirectory() as folder:
        task = HOURS[name](Path(folder))
        model, tokenizer = kit.load_policy(MODEL)
        ready = kit.readiness(
            model, tokenizer, task, rows=task.train[:16], samples=8, group_size=8
        )
        minutes["readiness"] = _minutes()
        before = kit.evaluate(model, tokenizer, task, rows=task.held_out[:HELD_OUT])
        cfg = kit.preset("cpu", steps=STEPS, prompts_per_step=2, group_size=8)
        began = time.perf_counter()
        trainer = kit.GRPOTrainer(
            model, task, cfg, tokenizer=tokenizer, folder=f"{folder}/run", live=False
        )
        trainer.train()
        seconds = float(kit.read_metrics(trainer.folder)["step_seconds"].iloc[0])
        minutes["first reward"] = round((began - STARTED + seconds) / 60, 1)
        found = kit.compare(
            before, kit.evaluate(model, tokenizer, task, rows=task.held_out[:HELD_OUT])
        )
        print(found)
        minutes["comparison"] = _minutes()
    made = {
        "hour": name,
        "python": sys.version.split()[0],
        "minutes": minutes,
        "verdict": ready.verdict,
    }
    made |= {
        "promised": ready.reason,
        "came": found.sentence,
        "steps": STEPS,
        "n": found.base.n,
        "seed": 0,
    }
    return (
        made
        | {"weights": WEIGHTS[MODEL]}
        | origin(f"python -m benchmarks.first_hour {name}", *PACKAGES)
    )


def _minutes() -> float:
    return round((time.perf_counter() - STARTED) / 60, 1)


def table(lines: list[dict]) -> str:
    """In Markdown, a row an hour."""
    rows = [
        "| rows | Python, torch, transformers | minutes to readiness, first reward, comparison | promised | came |"
    ]
    rows.append("|---|---|---|---|---|")
    for one in lines:
        where = ", ".join(
            (one["python"], one["versions"]["torch"], one["versions"]["transformers"])
        )
        promised = one["promised"].split(" Audit of the reward")[0]
        rows.append(
            f"| {one['hour']} | {where} | {', '.join(map(str, one['minutes'].values()))} | {promised} | {one['came']} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("hour", nargs="?", choices=list(HOURS))
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    args = parser.parse_args()
    if args.table or not args.hour:
        print(table([json.loads(line) for line in FILE.read_text().splitlines()]))
        return
    line = json.dumps(six_digits(hour(args.hour)))
    with FILE.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
