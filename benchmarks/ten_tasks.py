"""Does readiness say beforehand what a short run does? Ten kinds of task, each before, and after 16 steps of GRPO.

    python -m benchmarks.ten_tasks                        # all ten; goes on where it was stopped
    python -m benchmarks.ten_tasks --task "soft text"     # one kind, measured again
    python -m benchmarks.ten_tasks --table                # the table in Markdown, from what is there; trains nothing

Of each kind: readiness on 16 training questions x 8 samples, the task's measure on 32 held-out ones, 16 steps
of 2 x 8 completions (the profile cpu otherwise, one seed), the measure again. Everything is small so that a kind takes
a minute or two of one core: intervals are wide, and one seed says what can happen, not what does on average.
Writes benchmarks/results/ten_tasks.jsonl, one line a kind; a later line of a kind takes the place of an earlier one.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, six_digits
from examples.arithmetic import arithmetic
from examples.tools import tools
from grpo_kit import GRPOTrainer, compare, evaluate, load_policy, preset, readiness, tasks
from grpo_kit.evaluation.comparison import Comparison
from grpo_kit.more.episodes import EpisodeTask, grid
from grpo_kit.rewards import Bleu, ExactAnswer, SoftFormat
from grpo_kit.tasks import Task, from_rows

FILE = RESULTS / "ten_tasks.jsonl"
MODEL, STEPS, PROMPTS, GROUP, LOOKED_AT, SAMPLES, HELD_OUT = (
    "smollm2-135m-instruct",
    16,
    2,
    8,
    16,
    8,
    32,
)
THINGS = "apple river stone cloud bread horse chair glass paper garden window candle bridge island".split()
LABELS = {
    "billing": "invoice refund charge payment receipt price fee bill".split(),
    "delivery": "parcel courier shipment address tracking box van driver".split(),
    "account": "password login username email profile settings code lock".split(),
}


def soft_text() -> Task:
    """A sentence said again in other order, judged by BLEU."""
    pairs = [(a, b) for i, a in enumerate(THINGS) for b in THINGS[i + 1 :]]
    rows = [
        {
            "question": f"Say it the other way round: the {a} is near the {b}.",
            "answer": f"The {b} is near the {a}.",
        }
        for a, b in pairs
    ]
    return from_rows("soft text", rows, reward=Bleu(tag=None), max_completion_tokens=16)


def own_reward() -> Task:
    """No answers: a reward of one's own that likes exclamation marks, up to three."""

    def lively(completions: list[str], **columns: list) -> list[float]:
        return [min(3, text.count("!")) / 3 for text in completions]

    rows = [
        {"question": f"Greet the {thing} and its friend {n}."}
        for thing in THINGS
        for n in range(12)
    ]
    return from_rows("own reward", rows, reward=lively, max_completion_tokens=16)


def format_only() -> Task:
    """No answers: thoughts and an answer in their tags."""
    rows = [
        {"question": f"What goes with a {a} and a {b}?"}
        for a in THINGS
        for b in THINGS
        if a != b
    ]
    return from_rows(
        "format only", rows, reward=SoftFormat(), max_completion_tokens=32, prefill="<think>",
        system="Think between <think> and </think>, then answer between <answer> and </answer>, in few words.",
    )  # fmt: skip


def several_rewards() -> Task:
    """Three labels: the exact one, the format, and a short answer."""

    def short(completions: list[str], **columns: list) -> list[float]:
        return [1 / max(1, len(text.split())) for text in completions]

    rows = [
        {"question": f"A customer writes about the {word} number {n}.", "answer": label}
        for n in range(2, 9)
        for label, words in LABELS.items()
        for word in words
    ]
    return from_rows(
        "several rewards", rows, reward=[ExactAnswer(), SoftFormat(think=None), short], prefill="<answer>",
        reward_weights=[0.6, 0.3, 0.1], max_completion_tokens=8,
        system="Sort the message: billing, delivery or account. Write <answer>label</answer>.",
    )  # fmt: skip


KINDS: dict[str, Callable[[], Task | EpisodeTask]] = {
    "exact": tasks.largest,
    "numeric": lambda: arithmetic(digits=(1, 2)),
    "soft text": soft_text,
    "own reward, no answer": own_reward,
    "code": lambda: tasks.code(levels=(1,), n_held_out=8, max_completion_tokens=64),
    "calls": tools,
    "format only": format_only,
    "several rewards": several_rewards,
    "episodes": grid,
    "countdown": lambda: tasks.countdown(numbers=(2, 2)),
}


def measure(kind: str, seed: int) -> dict:
    """One kind: readiness, before, 16 steps, after."""
    task, start = KINDS[kind](), time.perf_counter()
    model, tokenizer = load_policy(MODEL, seed=seed, quiet=True)
    ready = readiness(
        model,
        tokenizer,
        task,
        rows=task.train[:LOOKED_AT],
        samples=SAMPLES,
        group_size=GROUP,
        seed=seed,
        seconds=None,
        quiet=True,
    )
    rows = task.held_out[:HELD_OUT]
    before = evaluate(model, tokenizer, task, rows=rows)
    numbers = preset("cpu", prompts_per_step=PROMPTS, steps=STEPS, group_size=GROUP, seed=seed)
    with tempfile.TemporaryDirectory() as made_in:
        folder = Path(made_in) / "run"
        GRPOTrainer(model, task, numbers, tokenizer=tokenizer, folder=folder, live=None).train()
        flags = [one["name"] for one in _lines(folder / "flags.jsonl")]
    found = compare(before, evaluate(model, tokenizer, task, rows=rows))
    made = {"kind": kind, "task": task.name, "seed": seed, "steps": STEPS, "n": found.base.n}
    made |= {
        "verdict": ready.verdict,
        "reason": ready.reason,
        "unequal": ready.signal_reward().value,
    }
    made |= {"accuracy": _pair(found, "strict"), "reward": _pair(found, "reward")}
    made |= {
        "measure": ready.measure,
        "sentence": found.sentence,
        "constant": found.constant,
        "flags": flags,
    }
    return made | {"seconds": round(time.perf_counter() - start, 1), "weights": WEIGHTS[MODEL]}


def _lines(path: Path) -> list[dict]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.is_file()
        else []
    )


def _pair(found: Comparison, name: str) -> dict | None:
    """Before, after and the difference with its interval; None where the task has no such measure."""
    if name not in found.difference:
        return None
    before, after = ((one.rates | one.rewards)[name].value for one in (found.base, found.tuned))
    change = found.difference[name]
    return {
        "before": before,
        "after": after,
        "gain": change.value,
        "low": change.low,
        "high": change.high,
    }


def done() -> dict[str, dict]:
    """kind -> its last line."""
    return {one["kind"]: one for one in _lines(FILE)}


def table(found: dict[str, dict]) -> str:
    """In Markdown, a row a kind."""
    lines = [
        "| kind | readiness | groups with unequal rewards | mean reward | accuracy | best constant | red flags |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in (kind for kind in KINDS if kind in found):
        one = found[kind]
        gain, right = one["reward"], one["accuracy"]
        constant = "–" if one["constant"] is None else f"{one['constant'][1]:.2f}"
        accuracy = (
            "–"
            if right is None
            else f"{right['before']:.0%} -> {right['after']:.0%}".replace("%", " %")
        )
        lines.append(
            f"| {kind} | {one['verdict']} | {one['unequal']:.0%} | {gain['before']:.2f} -> {gain['after']:.2f}, "
            f"{gain['gain']:+.2f} [{gain['low']:.2f}, {gain['high']:.2f}] | {accuracy} | {constant} | "
            f"{', '.join(one['flags']) or '–'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, print each as it comes, save all."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--task", nargs="+", choices=list(KINDS), metavar="KIND", help="measured again"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    if not options.table:
        missing = options.task or [kind for kind in KINDS if kind not in done()]
        for kind in missing:
            command = f'python -m benchmarks.ten_tasks --task "{kind}" --seed {options.seed}'
            found = measure(kind, options.seed) | origin(command, "torch", "transformers")
            with FILE.open("a", encoding="utf-8") as file:
                file.write(json.dumps(six_digits(found), ensure_ascii=False) + "\n")
            print(
                f"{kind}, {found['seconds']:.0f} s\n  {found['reason']}\n  {found['sentence']}",
                flush=True,
            )
    print(table(done()))


if __name__ == "__main__":
    main()
