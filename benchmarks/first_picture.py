"""README's two pictures: three questions before and after with two bars, and the live chart as it grew.

    python -m benchmarks.first_picture           # trains nothing
    python -m benchmarks.first_picture --train   # the run behind the chart, again; minutes

The questions and bars are what notebook 05 printed: the first three questions that training put right.
The chart is of a run of the same cells, `results/main_job_run`. Writes docs/before_and_after.png and
docs/live_chart.gif.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

from benchmarks.result import RESULTS, ROOT, command_line
from grpo_kit import GRPOTrainer, HeldOut, load_policy, plot_run, preset

NOTEBOOK = ROOT / "notebooks" / "05_train_full.ipynb"
PICTURE = ROOT / "docs" / "before_and_after.png"
RUN = RESULTS / "main_job_run"
ANIMATION = ROOT / "docs" / "live_chart.gif"
UPPER_PANELS = (0, 0, 1440, 405)  # reward, held-out accuracy, reward parts; pixels
WRONG, RIGHT, INK, GREY = "#c2410c", "#0f766e", "#1f2937", "#6b7280"
FIXED = re.compile(
    r"fixed, row \d+: (?P<question>.*)\nanswer: \d+\nbase: (?P<before>\d+)</answer>\ntuned: (?P<after>\d+)</answer>"
)
ACCURACY = re.compile(
    r"([\d.]+) % -> ([\d.]+) %, n = (\d+).*; the best constant strategy has ([\d.]+) %"
)
COUNTS = re.compile(r"(\d+) fixed, (\d+) broken")


def outputs() -> str:
    """All text that the notebook's cells printed or returned."""
    texts = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        for output in cell.get("outputs", []):
            texts += [
                *output.get("text", []),
                "\n",
                *output.get("data", {}).get("text/plain", []),
                "\n",
            ]
    return "".join(texts)


def draw_questions(axes: Axes, text: str) -> None:
    """A line a question: what the model answered before training, and after it."""
    axes.set_axis_off()
    axes.set(xlim=(0, 10), ylim=(0, 4.2))
    axes.text(6.75, 3.95, "before", ha="center", color=GREY, fontsize=13)
    axes.text(8.9, 3.95, "after", ha="center", color=GREY, fontsize=13)
    questions = list(FIXED.finditer(text))[:3]
    for height, match in zip((3.2, 2.2, 1.2), questions, strict=True):
        axes.text(
            0,
            height,
            match["question"].replace(": ", ":\n"),
            va="center",
            color=INK,
            fontsize=13,
        )
        axes.text(
            6.75,
            height,
            f"{match['before']}  ✗",
            ha="center",
            va="center",
            color=WRONG,
            fontsize=17,
        )
        axes.text(
            8.9,
            height,
            f"{match['after']}  ✓",
            ha="center",
            va="center",
            color=RIGHT,
            fontsize=17,
        )
    fixed, broken = COUNTS.search(text).groups()
    axes.text(
        0,
        0.2,
        f"Became right: {fixed} questions. Became wrong: {broken}.",
        color=GREY,
        fontsize=12,
    )


def draw_bars(axes: Axes, text: str) -> None:
    """The share of right answers before and after, and the line of the best rule that does not read the question."""
    before, after, n, habit = (float(number) for number in ACCURACY.search(text).groups())
    bars = axes.bar(["before", "after"], [before, after], color=[WRONG, RIGHT], width=0.55)
    shares = [f"{before:.0f} %", f"{after:.0f} %"]
    axes.bar_label(bars, shares, label_type="center", fontsize=17, color="white")
    axes.axhline(habit, color=GREY, linestyle="--", linewidth=1.5)
    habit_text = f"{habit:.0f} % without reading:\n“always the last number”"
    axes.text(-0.42, habit + 3, habit_text, color=GREY, fontsize=11)
    axes.set(ylim=(0, 95), yticks=[], xlim=(-0.5, 1.5))
    axes.set_title(
        f"right answers to {n:.0f} questions\nthat were never trained on",
        color=INK,
        fontsize=13,
    )
    axes.tick_params(length=0, labelsize=13, labelcolor=GREY)
    axes.spines[["top", "right", "left"]].set_visible(False)


def chart_after(step: int, folder: Path) -> Image.Image:
    """The upper panels of the live chart after so many steps of the recorded run."""
    lines = (RUN / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(
        "".join(line for line in lines if json.loads(line)["step"] <= step)
    )
    plot_run(folder).save(folder / "chart.png")
    chart = Image.open(folder / "chart.png").convert("RGBA")
    picture = (
        Image.alpha_composite(Image.new("RGBA", chart.size, "white"), chart)
        .convert("RGB")
        .crop(UPPER_PANELS)
    )
    return picture.resize(
        (picture.width * 2 // 3, picture.height * 2 // 3), Image.Resampling.LANCZOS
    )


def animate() -> None:
    """The chart after each step, a quarter of a second each; the last one stays for four seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "05_train_full"
        folder.mkdir()
        shutil.copy(RUN / "run.json", folder)
        frames = [
            chart_after(step, folder).quantize(96, dither=Image.Dither.NONE)
            for step in range(1, 33)
        ]
    durations = [250] * 31 + [4000]
    frames[0].save(
        ANIMATION,
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        loop=0,
        optimize=True,
    )
    print(ANIMATION)


def train() -> None:
    """Notebook 05's run on the preset `cpu`, seed 0; its record goes to RUN."""
    config = preset("cpu")
    task = config.make_task()
    model, tokenizer = load_policy(config.model, dtype=config.dtype)
    held_out = HeldOut(task, rows=64, every=8)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model, task, config, tokenizer=tokenizer, folder=f"{folder}/run", held_out=held_out
        )
        trainer.train()
        for name in ("run.json", "metrics.jsonl"):
            shutil.copy(trainer.folder / name, RUN)


def main() -> None:
    """Draw both, of a new run where one is asked for."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--train", action="store_true", help="make the run behind the chart again, first"
    )
    if parser.parse_args().train:
        train()
    text = outputs()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4), width_ratios=(1.75, 1), layout="constrained"
    )
    draw_questions(left, text)
    draw_bars(right, text)
    figure.savefig(PICTURE, dpi=110, facecolor="white")
    print(PICTURE)
    animate()


if __name__ == "__main__":
    main()
