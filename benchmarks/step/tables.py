"""What is printed of a result: seconds, times the floor, and what fewer and faster tokens make of each ratio."""

from __future__ import annotations

from typing import Any

from benchmarks.step.phases import PHASES
from benchmarks.step.report import REFERENCES
from benchmarks.step.tokens import KINDS

_FLOORS = {
    "floor": "seconds",
    "floor, attention too": "seconds with attention",
    "floor, skipping": "seconds with skipping",
}
_SHORT = {"trl-hf": "x trl-hf", "trl-hf-tuned": "x tuned", "kit-before": "x before"}


def tables(result: dict[str, Any]) -> str:
    """All of them, a title before each but the first; of a result without arms, why there are none."""
    if not result["arms"]:
        why = "; ".join(f"{arm}: {why}" for arm, why in result["not run"].items())
        return f"no arm was measured ({why})"
    parts = [
        seconds_table(result),
        "rates, memory, and times as fast\n" + rate_table(result),
        "times the floor\n" + floor_table(result),
        "tokens computed\n" + token_table(result),
    ]
    for reference in REFERENCES[1:]:
        if reference in result["arms"] and list(result["arms"])[-1] != reference:
            title = f"faster than {reference} = by fewer tokens x by faster tokens"
            parts.append(f"{title}\n{factor_table(result, reference)}")
    marked = [arm for arm, row in result["arms"].items() if row["measured on a busy machine"]]
    if marked:
        parts.append(
            f"* {', '.join(marked)}: measured beside other load, which took more than {result['busy from']:.0%} of "
            "the cores; seconds say little"
        )
    return "\n\n".join(parts)


def seconds_table(result: dict[str, Any]) -> str:
    """One line an arm: median seconds of the step [quartiles, of several rounds], then of its phases.

    A phase that takes less than 0.005 s in every arm has no column.
    """
    arms = result["arms"].values()
    phases = [
        phase
        for phase in PHASES
        if max(row["phases"][phase]["median"] for row in arms) >= 0.005
    ]
    several = result["n"] > 1
    lines = [["arm", "step s [q1, q3]" if several else "step s", *phases]]
    for arm, row in result["arms"].items():
        s = row["seconds"]
        lines.append(
            [
                arm + "*" * bool(row["measured on a busy machine"]),
                f"{s['median']:.2f}" + f" [{s['q1']:.2f}, {s['q3']:.2f}]" * several,
                *(f"{row['phases'][phase]['median']:.2f}" for phase in phases),
            ]
        )
    for name, key in _FLOORS.items():
        least = result["floor"][key]
        cells = [f"{least[phase]:.2f}" if phase in least else "-" for phase in phases]
        lines.append([name, f"{least['step']:.2f}", *cells])
    return _aligned(lines)


def rate_table(result: dict[str, Any]) -> str:
    """One line an arm: tokens a second, peak memory, and how many times as fast as the references that were run."""
    run = [name for name in REFERENCES if name in result["arms"]]
    lines = [["arm", "decode tok/s", "step tok/s", "peak GiB", *(_SHORT[name] for name in run)]]
    for arm, row in result["arms"].items():
        lines.append(
            [arm, f"{row['tokens/s decode']:.0f}", f"{row['tokens/s step']:.0f}"]
            + [f"{max(row['peak bytes'].values()) / 2**30:.2f}"]
            + [f"{row[f'{name} / this']:.2f}" for name in run]
        )
    return _aligned(lines)


def floor_table(result: dict[str, Any]) -> str:
    """One line an arm: its median seconds by the floor's, by phase and in all."""
    phases = list(result["floor"]["seconds"])
    lines = [["arm", *phases]]
    for arm, row in result["arms"].items():
        lines.append([arm, *(f"{row['times the floor'][phase]:.2f}" for phase in phases)])
    return _aligned(lines)


def token_table(result: dict[str, Any]) -> str:
    """One line an arm: positions through the model; "-" where nobody could count them."""
    lines = [["arm", *KINDS]]
    for arm, row in result["arms"].items():
        lines.append(
            [
                arm,
                *(
                    "-" if row["tokens"][kind] is None else str(row["tokens"][kind])
                    for kind in KINDS
                ),
            ]
        )
    least = result["floor"]["tokens"]
    return _aligned([*lines, ["floor", *(str(least[kind]) for kind in KINDS)]])


def factor_table(result: dict[str, Any], reference: str) -> str:
    """A line an arm and phase: ratio, of it by fewer and by faster tokens; of the step, tokens' share of its ratio."""
    older = REFERENCES[: REFERENCES.index(reference) + 1]
    rows = {
        arm: row["against"][reference]
        for arm, row in result["arms"].items()
        if arm not in older
    }
    lines = [
        ["arm", "phase", "times as fast", "fewer tokens", "faster tokens", "tokens' share"]
    ]
    for arm, found in rows.items():
        for phase in (name for name in result["floor"]["seconds"] if name in found):
            of = found[phase]
            share = of["share by tokens"] if phase == "step" else None
            numbers = (f"{of[name]:.2f}" for name in ("ratio", "fewer tokens", "faster tokens"))
            lines.append([arm, phase, *numbers, "" if share is None else f"{share:.0%}"])
            arm = ""  # named once
    return _aligned(lines)


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
