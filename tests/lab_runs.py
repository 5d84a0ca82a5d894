"""A small laboratory whose rewards vary on a random model.

`python lab_runs.py FOLDER WHERE N [WHERE N ...]` runs a part of it once for each pair, and kills it at the Nth
time that it comes to WHERE: "row" (a line of metrics.jsonl was written, of which WatchRun adds a second to each step),
"saving" (half a checkpoint was written), "evaluated", "json" (settings.json or result.json was written).
"""

import os
import signal
import sys
from dataclasses import replace

import few_words

from grpo_kit import lab, tasks
from grpo_kit.loop import checkpoint
from grpo_kit.more.lab import _run as lab_run
from grpo_kit.record._jsonl_run import RunLog

ARMS = {"control": {}, "cold": {"temperature": 0.5}, "again": {"iterations": 2}}
SEEDS = [0, 1]


def letters(completions, **columns):
    """Share of characters that are letters: varies inside a group on a random model."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


class Colder:
    """A sample that samples as much colder than it is told."""

    def __init__(self, inner, *, by):
        self.inner, self.by = inner, by

    def __call__(self, model, tokenizer, task, rows, config, numbers):
        colder = replace(numbers, temperature=numbers.temperature / (1 + self.by))
        return self.inner(model, tokenizer, task, rows, config, colder)


def task():
    rows = [
        {"question": f"Say {i} and {'more ' * (i % 3)}:", "answer": str(i)} for i in range(24)
    ]
    made = tasks.from_rows(
        "letters", rows[:16], rows[16:], reward=letters, max_completion_tokens=6
    )
    right = lambda text, row: len(text) % 2 == int(row["answer"]) % 2  # noqa: E731
    return replace(
        made,
        read_answer=lambda text, prefill: text,
        is_correct=right,
        strategies={"never": lambda row: None},
    )


def replace_rows(made):
    """The same task, its first train row another."""
    return replace(made, train=[{"question": "Say something:", "answer": "1"}, *made.train[1:]])


def base():
    small = {
        "model": str(few_words.folder()),
        "steps": 3,
        "learning_rate": 1e-2,
        "save_steps": 2,
    }
    return {"config": "smoke", "task": task()} | small


def compare(folder, arms=tuple(ARMS), seeds=SEEDS):
    return lab.compare_arms(
        {arm: ARMS[arm] for arm in arms}, seeds, **base(), folder=folder, quiet=True
    )


def kill_at(where, count):
    def then_die(function):
        left = [count]

        def wrapped(*args, **kwargs):
            out = function(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return out

        return wrapped

    if where == "row":
        RunLog.write = then_die(RunLog.write)
    elif where == "saving":
        checkpoint.write_digests = then_die(checkpoint.write_digests)
    elif where == "evaluated":
        lab_run.evaluate = then_die(lab_run.evaluate)
    else:
        lab_run.write_json = then_die(lab_run.write_json)


if __name__ == "__main__":
    for where, count in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        child = os.fork()  # before any work: the imports are done once for all
        if child == 0:
            kill_at(where, int(count))
            compare(sys.argv[1], ["control", "again"], [0])
            os._exit(0)
        print(where, count, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
