"""How fresh the live chart is, and what it costs: in a real Jupyter kernel, over runs of three lengths.

    python -m benchmarks.live_chart

Steps take no time: a clock is put forward by what a step would take, and adds the processor time that the display
really spends, so that 100 steps of a minute are measured in seconds. Each run is told the same rows (7 measures, 3
parts) and 32 completions a step, and is repeated, each time in a new kernel.

Writes benchmarks/results/live_chart.json; for each run and repeat
    first picture        seconds from the end of step 1 to the first picture that shows it; null: none before the end
    worst lag, steps     steps that are done and not in the picture, when the display has had its turn; highest
    worst lag, seconds   from the end of a step to the picture that shows it (or to the end of training); highest
    share                of the time from the end of step 2 to the end, spent in the display
    pictures             drawn before the end
    last picture         seconds of processor time for the one that stays
"""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import nbclient
import nbformat

from benchmarks.result import RESULTS, ROOT, command_line, origin, save

RUNS = ((12, 2), (32, 4), (100, 60))  # steps, seconds a step

KERNEL = """
import json, random, sys, time
sys.path.insert(0, FOLDER)
import pandas as pd
import grpo_kit
from IPython import get_ipython
from grpo_kit.watch._live import LiveChart
assert grpo_kit.__file__.startswith(FOLDER), grpo_kit.__file__

past, pictures, ends = [0.0], [], []
clock = lambda: time.process_time() + past[0]
publisher = get_ipython().display_pub
publish = publisher.publish

def noted(data, *args, **options):
    publish(data, *args, **options)
    if "image/png" in data or "<svg" in data.get("text/html", ""):
        pictures.append((clock(), max(chart._run.rows if hasattr(chart, "_run") else chart._rows, default=0)))

publisher.publish = noted
rng = random.Random(0)
names = ["reward", "reward_std", "reward/exact", "reward/format", "reward/length", "entropy", "grad_norm", "kl",
         "completion_cut_off", "frac_reward_zero_std"]

def row(step):
    return {"step": step, "completion_length": 200.0, "learning_rate": 1e-5, "temperature": 1.0,
            "step_seconds": SECONDS} | {name: rng.random() for name in names}

def written(step):
    text = "Each of the numbers is smaller than the one before it. " * 8
    return pd.DataFrame([{"step": step, "group": i // 8, "prompt": text, "prefill": "<think>", "completion": text,
                          "reward": rng.random(), "reward/exact": 1.0} for i in range(32)])

chart = LiveChart(clock=clock)
chart.start(STEPS, None)
spent = 0.0
for step in range(1, STEPS + 1):
    told = row(step), written(step)
    past[0] += SECONDS
    begun = clock()
    ends.append(begun)
    chart.update([told[0]], told[1])
    spent += (clock() - begun) * (step > 2)
over = clock()
early = list(pictures)
chart.finish()
print("RESULT", json.dumps({"ends": ends, "pictures": early, "spent": spent, "over": over, "last": clock() - over}))
"""


def measure(steps: int, seconds: float) -> dict[str, Any]:
    """One run in a new kernel; see the module for what it gives."""
    code = f"FOLDER, STEPS, SECONDS = {str(ROOT)!r}, {steps}, {seconds}\n{KERNEL}"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    cells = nbclient.NotebookClient(notebook, timeout=300).execute().cells
    said = "".join(
        output["text"] for output in cells[0].outputs if output.output_type == "stream"
    )
    found = json.loads(said.split("RESULT", 1)[1].splitlines()[0])
    return freshness(found["ends"], found["pictures"], found["over"]) | {
        "share": found["spent"] / (found["over"] - found["ends"][1]),
        "pictures": sum(step > 0 for _, step in found["pictures"]),
        "last picture": found["last"],
    }


def freshness(
    ends: list[float], pictures: list[tuple[float, int]], over: float
) -> dict[str, Any]:
    """First picture and worst lag. ends: when each step ended; pictures: when each was shown, and its last step.

    over: the end of training. A picture belongs to the step that ended before it.

    >>> freshness([10, 20, 30], [(12, 1), (33, 3)], over=34)
    {'first picture': 2, 'worst lag, steps': 1, 'worst lag, seconds': 13}
    """
    shown = [
        next((at for at, last in pictures if last >= step), None)
        for step in range(1, len(ends) + 1)
    ]
    behind = []
    for step, after in enumerate([*ends[1:], math.inf], 1):
        behind.append(step - max((last for at, last in pictures if at < after), default=0))
    return {
        "first picture": None if shown[0] is None else shown[0] - ends[0],
        "worst lag, steps": max(behind),
        "worst lag, seconds": max(
            (over if at is None else at) - end for at, end in zip(shown, ends, strict=True)
        ),
    }


def meets(found: dict[str, Any]) -> bool:
    """The first picture within 5 s, never more than two steps or 5 s behind, at most 2 % of the time."""
    soon = found["first picture"] is not None and found["first picture"] <= 5
    fresh = found["worst lag, steps"] <= 2 or found["worst lag, seconds"] <= 5
    return soon and fresh and found["share"] <= 0.02


def main() -> None:
    """Measure, print and save."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    command = f"python -m benchmarks.live_chart --repeats {options.repeats}"
    result = origin(command, "ipykernel", "matplotlib", "nbclient") | {
        "n": options.repeats,
        "runs": [],
    }
    for steps, seconds in RUNS:
        repeats = [measure(steps, seconds) for _ in range(options.repeats)]
        run = {"run": f"{steps} x {seconds} s", "meets all three": all(map(meets, repeats))}
        result["runs"].append(run | {"repeats": repeats})
        share = statistics.median(r["share"] for r in repeats)
        print(run, f"share {share:.2%}", repeats[0], flush=True)
    print(save(RESULTS, "live_chart", result))


if __name__ == "__main__":
    main()
