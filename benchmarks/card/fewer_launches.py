"""What six launches a layer would be worth: ms of a decoded token by the launch model, before a line is written.

    python -m benchmarks.card.fewer_launches             # seconds; the table of benchmarks/card/six_launches.md

The model is that of docs/what_to_expect.md. A design takes launches away, and the bytes that only go from one kernel to
the next; weights, keys and values are read as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.card.expect import H200_WIDTH, costs
from benchmarks.card.peaks import CARDS, H200, Work, counted, decoded, layers
from benchmarks.result import command_line

ROWS = (1, 8, 64)
SHOWN = (H200, *(card for card in CARDS if card.name in ("RTX 4090", "L4")))


@dataclass(frozen=True)
class Design:
    """layer, rest: launches; None: today's. between: share of today's other bytes (neither weights nor a product's)
    that stays."""

    name: str
    layer: float | None = None
    rest: float | None = None
    between: float = 1.0


DESIGNS = (
    Design("today"),
    Design("attention in two", 21, between=0.7),
    Design("six a layer", 6, between=0.35),
    Design("six a layer, sampling in ten", 6, 10, 0.25),
)


def work_of(design: Design, rows: int) -> Work:
    """A decoded token of all rows under the design; full fine-tuning, bfloat16."""
    today = decoded("full", H200_WIDTH, rows)
    of_layers, rest = (
        counted("full", "decode fused 64", part).launches for part in ("layer", "rest")
    )
    launches = of_layers if design.layer is None else design.layer * layers()
    launches += rest if design.rest is None else design.rest
    return replace(today, launches=launches, other_bytes=design.between * today.other_bytes)


def table() -> str:
    """Milliseconds a token by card, rows and design, as Markdown; at last those of reading the weights alone."""
    heads = " | ".join(design.name for design in DESIGNS)
    lines = [
        f"| ms a token | rows | {heads} | reading the weights |",
        "|---|---|" + "---|" * (len(DESIGNS) + 1),
    ]
    for card in SHOWN:
        floor = costs().card(
            Work(product_bytes=decoded("full", H200_WIDTH, 1).product_bytes), card
        )
        for rows in ROWS:
            milliseconds = [
                1e3 * costs().token(work_of(design, rows), card) for design in DESIGNS
            ]
            shown = " | ".join(f"{value:.2f}" for value in (*milliseconds, 1e3 * floor))
            lines.append(f"| {card.name} | {rows} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Print it."""
    command_line(__doc__).parse_args()
    print(table())


if __name__ == "__main__":
    main()
