"""A memory plan as a table, a chart and a few lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30

COLOURS = {
    "weights": "#0072B2",
    "reference model": "#5B9BD5",
    "cast weights": "#3F4E8C",
    "optimizer": "#00785A",
    "gradients": "#B4568E",
    "keys and values": "#8C6D31",
    "logits and sampling": "#C58B00",
    "activations": "#C24E00",
    "head and backward": "#7A5195",
    "optimizer's own": "#4E9A3B",
    "reserve": "#777777",
}


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a step, by moment and part. Made by plan_memory().

    parts: moment -> part -> bytes. usable_gib: memory of the card, the CUDA context included.
    chunk_tokens, checkpointed_layers: how the update is cut. checkpoint_gib: on disk, weights (or adapters) and
    optimizer state. advice: changes to make, empty if the plan fits.
    """

    title: str
    parts: dict[str, dict[str, float]]
    usable_gib: float
    chunk_tokens: int
    checkpointed_layers: int
    layers: int
    checkpoint_gib: float
    advice: list[str]

    @property
    def peak_gib(self) -> float:
        """The peak, GiB, with context and reserve."""
        return max(sum(parts.values()) for parts in self.parts.values()) / GIB

    @property
    def fits(self) -> bool:
        """Whether the peak stays within usable_gib."""
        return self.peak_gib <= self.usable_gib

    def table(self) -> pd.DataFrame:
        """GiB: parts as rows, moments as columns, their sum last."""
        table = pd.DataFrame(self.parts) / GIB
        table = table[(table > 0).any(axis=1)]
        return pd.concat([table, table.sum().rename("total").to_frame().T])

    def plot(self) -> Figure:
        """Stacked bars, one a moment, against the card's memory."""
        from grpo_kit._support.display import new_figure

        table = self.table().drop("total")
        width = max(self.peak_gib, self.usable_gib)
        figure = new_figure(9.5, 3.6, dpi=130)
        axes = figure.add_subplot()
        left = pd.Series(0.0, index=table.columns)
        for part, row in table.iterrows():
            bars = axes.barh(
                table.columns,
                row,
                left=left,
                label=part,
                color=COLOURS[part],
                height=0.62,
                edgecolor="white",
            )
            labels = [f"{gib:.1f}" if gib >= 0.03 * width else "" for gib in row]
            axes.bar_label(bars, labels, label_type="center", color="white", fontsize=8)
            left += row
        axes.set_yticks(
            range(len(left)), [f"{moment}\n{total:.1f}" for moment, total in left.items()]
        )
        axes.axvline(self.usable_gib, zorder=2.5, color="black", linestyle="--", linewidth=1.2)
        axes.text(
            self.usable_gib,
            -0.5,
            f"usable on the card: {self.usable_gib:.1f} ",
            ha="right",
            va="center",
            fontsize=9,
        )
        axes.set_xlim(0, 1.03 * width)
        axes.set_ylim(len(table.columns) - 0.5, -0.65)
        axes.set_xlabel("GiB")
        axes.set_title(self.title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8.5)
        return figure

    def _sentences(self) -> list[str]:
        word = "fits" if self.fits else "does not fit"
        return [
            f"{word}: {self.peak_gib:.1f} of {self.usable_gib:.1f} GiB at the peak; update in chunks of "
            f"{self.chunk_tokens} tokens, {self.checkpointed_layers} of {self.layers} layers checkpointed",
            f"disk: a checkpoint takes {self.checkpoint_gib:.1f} GiB, and {2 * self.checkpoint_gib:.1f} until it has "
            "taken the place of the one before",
        ]

    def __str__(self) -> str:
        table = self.table().to_string(float_format=_gib)
        lines = [self.title, f"GiB\n{table}", *self._sentences()]
        return "\n".join([*lines, *(f"- {line}" for line in self.advice)])

    def _repr_html_(self) -> str:
        table = self.table().to_html(float_format=_gib)
        advice = "".join(f"<li>{line}</li>" for line in self.advice)
        sentences = "<br>".join(self._sentences())
        return f"<p><b>{self.title}</b> (GiB)</p>{table}<p>{sentences}</p><ul>{advice}</ul>"


def _gib(number: float) -> str:
    return f"{number:.2f}" if number else "-"
