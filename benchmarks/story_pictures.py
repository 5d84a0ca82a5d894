"""The two pictures of docs/from_rlhf_to_r1.md: who holds what in memory, and one step of GRPO in four moves.

    python -m benchmarks.story_pictures   # seconds; trains nothing

Memory is counted, not measured: in copies of one model's weights, where Adam holds two moments. The step is notebook
04's: the same four made-up completions, scored by the task and compared by the kit. Writes docs/who_holds_what.png and
docs/group_step.png.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.result import ROOT, command_line
from grpo_kit import tasks
from grpo_kit.objectives import group_advantages
from grpo_kit.watch import BASE, COLOURS, diagram, new_figure

MEMORY = ROOT / "docs" / "who_holds_what.png"
STEP = ROOT / "docs" / "group_step.png"
DPI = 160  # 1,280 pixels, shown 800 wide
INK, GREY = "#1f2937", "#5b6470"
BLUE, ORANGE, GREEN = COLOURS[:3]

TRAINED = ("weights", "gradient", "moment", "moment")  # what a trained model holds: four copies
FROZEN = ("weights",)
# method -> (who says what is good, models in memory, what stands there in place of a model)
METHODS = {
    "PPO, as in RLHF": (
        "a reward model, trained on what people preferred",
        {
            "policy": TRAINED,
            "value model": TRAINED,
            "reference": FROZEN,
            "reward model": FROZEN,
        },
        "",
    ),
    "DPO": (
        "people or a model, in pairs labelled before training",
        {"policy": TRAINED, "reference": FROZEN},
        "a file of pairs",
    ),
    "GRPO, as in DeepSeekMath": (
        "a reward model; a group of answers replaces the value model",
        {"policy": TRAINED, "reference": FROZEN, "reward model": FROZEN},
        "",
    ),
    "GRPO with a program, as in this course": (
        "a program that checks the answer; no KL term",
        {"policy": TRAINED},
        "a program",
    ),
}
CELL, GAP, LEFT = 6.6, 1.6, 2.0  # percent of the width


def copies(models: dict[str, tuple[str, ...]]) -> int:
    """Copies of the weights that these models hold.

    >>> copies({"policy": TRAINED, "reference": FROZEN})
    5
    """
    return sum(map(len, models.values()))


def draw_memory() -> Figure:
    """A row a method: its models in memory, each as wide as the copies of the weights that it holds."""
    figure = new_figure(8, 5.4, dpi=DPI, layout=None)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 100), ylim=(0, 67.5))
    axes.axis("off")
    for row, (method, (judge, models, instead)) in enumerate(METHODS.items()):
        draw_method(axes, 66 - 15 * row, method, judge, models, instead)
    legend = "A cell is one copy of the model's weights.  w weights   g gradient   m, v Adam's two moments"
    axes.text(LEFT, 4.6, legend, color=GREY, fontsize=9.5)
    axes.text(LEFT, 1.6, "blue: trained", color=BLUE, fontsize=9.5, fontweight="bold")
    axes.text(LEFT + 14, 1.6, "grey: frozen", color=GREY, fontsize=9.5, fontweight="bold")
    axes.text(
        LEFT + 28,
        1.6,
        "green, dashed: no model at all",
        color=GREEN,
        fontsize=9.5,
        fontweight="bold",
    )
    return figure


def draw_method(
    axes: Axes,
    top: float,
    method: str,
    judge: str,
    models: dict[str, tuple[str, ...]],
    instead: str,
) -> None:
    """One method: its name, who says what is good, and its models from left to right."""
    axes.text(LEFT, top - 1.6, method, color=INK, fontsize=11.5, fontweight="bold")
    axes.text(
        98,
        top - 1.6,
        f"{copies(models)} copies",
        color=INK,
        fontsize=11.5,
        fontweight="bold",
        ha="right",
    )
    axes.text(LEFT, top - 4.4, f"scored by {judge}", color=GREY, fontsize=10)
    x, low, height = LEFT, top - 12, 4.2
    for name, parts in models.items():
        colour = BLUE if parts == TRAINED else BASE
        for part, letter in zip(parts, "wgmv", strict=False):
            alpha = 0.55 if part == "weights" else 0.25
            axes.add_patch(Rectangle((x, low), CELL, height, facecolor=colour, alpha=alpha))
            axes.add_patch(
                Rectangle((x, low), CELL, height, fill=False, edgecolor=colour, linewidth=1.4)
            )
            axes.text(
                x + CELL / 2,
                low + height / 2,
                letter,
                color=INK,
                fontsize=10,
                ha="center",
                va="center",
            )
            x += CELL
        middle = x - CELL * len(parts) / 2
        axes.text(middle, low + height + 0.9, name, color=INK, fontsize=10, ha="center")
        x += GAP + (len(parts) == 1) * 5  # its name is wider than its cell
    if instead:
        width = 18
        box = Rectangle(
            (x, low), width, height, fill=False, edgecolor=GREEN, linewidth=1.4, linestyle="--"
        )
        axes.add_patch(box)
        axes.text(
            x + width / 2,
            low + height / 2,
            instead,
            color=GREEN,
            fontsize=10,
            ha="center",
            va="center",
        )


def scored_group() -> tuple[str, list[str], torch.Tensor, torch.Tensor]:
    """Notebook 04's question, its four completions, their rewards and their advantages."""
    task = tasks.largest(numbers=(3, 5))
    row = {"question": "Which number is the largest: 12, 47, 31?", "answer": "47"}
    texts = [
        "47</answer>",
        "31</answer>",
        "47, as it is the largest",
        "31, since 31 comes last</answer>",
    ]
    rewards = torch.tensor(task.score(row, texts)["reward"].to_numpy())
    return row["question"], texts, rewards, group_advantages(rewards, group_size=len(texts))


def draw_step() -> Figure:
    """Four completions through sample, score, compare and update."""
    question, texts, rewards, advantages = scored_group()
    moves = {
        "1 · sample\nthe policy answers four times": 19,
        "2 · score\na program": 46.5,
        "3 · compare\nin the group": 67,
        "4 · update\nmove the weights": 88,
    }
    widths = dict(zip(moves, (33, 14, 17, 19), strict=True))
    boxes = {name: (x, 43, widths[name], 8.5, name, BASE) for name, x in moves.items()}
    figure = diagram(
        boxes, list(zip(moves, list(moves)[1:], [""] * 3, strict=False)), height=4.2
    )
    figure.set_dpi(DPI)
    axes = figure.axes[0]
    axes.text(2, 49.6, question, color=INK, fontsize=11, fontweight="bold")
    axes.text(47, 49.6, "The prompt ends in the prefill <answer>.", color=GREY, fontsize=10.5)
    for n, (text, reward, advantage) in enumerate(zip(texts, rewards, advantages, strict=True)):
        y, colour = 34 - 6 * n, BLUE if advantage > 0 else ORANGE
        axes.text(3, y, text, color=INK, fontsize=10, family="monospace", va="center")
        axes.text(46.5, y, f"{reward:.2f}", color=INK, fontsize=12, ha="center", va="center")
        axes.text(
            67, y, f"{advantage:+.2f}", color=colour, fontsize=12, ha="center", va="center"
        )
        change = "pushed up" if advantage > 0 else "pushed down"
        axes.text(88, y, change, color=colour, fontsize=12, ha="center", va="center")
    axes.text(
        46.5,
        10,
        f"mean {rewards.mean():.2f}",
        color=GREY,
        fontsize=10.5,
        ha="center",
        va="center",
    )
    axes.text(
        67,
        10,
        "reward - mean,\nover the spread",
        color=GREY,
        fontsize=10.5,
        ha="center",
        va="center",
    )
    corner = {"arrowstyle": "-|>", "color": "#808080", "lw": 2, "mutation_scale": 16}
    axes.plot([88, 88, 1.2, 1.2], [13, 4, 4, 43], color="#808080", linewidth=2)
    axes.annotate("", (2.5, 43), (1.2, 43), arrowprops=corner)
    again = {"boxstyle": "round,pad=0.3", "fc": "white", "ec": "none"}
    axes.text(
        46,
        4,
        "the next step samples from the new weights",
        color=INK,
        fontsize=10.5,
        ha="center",
        va="center",
        bbox=again,
    )
    return figure


def save(figure: Figure, path: Path) -> None:
    """As a PNG on white ground, so that light and dark pages show it alike."""
    figure.savefig(path, dpi=DPI, facecolor="white")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    save(draw_memory(), MEMORY)
    save(draw_step(), STEP)
