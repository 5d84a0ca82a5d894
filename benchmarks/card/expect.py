"""What to expect of a card: seconds a step, tokens a second and memory. A model of peaks and launches, no measurement.

    python -m benchmarks.card.expect            # results/card_expected.json, and the tables of docs/what_to_expect.md
    python -m benchmarks.card.expect --check    # the model beside what was measured on an H200

Each phase is bytes over bandwidth, FLOPs over the peak and launches times their cost; all three are counted on the
pretend card (card_counts.json, by benchmarks.card.counts), memory is kit.plan_memory's. Peaks are the data sheets',
the achieved share of them and the cost of a launch those of the H200 run (card_h200.json).

Simplifications: every completion is as long as it may be; all cards have the H200's launch costs and shares of the
peaks; no clock falls (an L4 and a T4 have 72 and 70 W); nothing overlaps in a graph, the host and the card otherwise.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

from benchmarks.card.peaks import (
    CARDS,
    H200,
    MODEL,
    Costs,
    Peaks,
    Work,
    counted,
    decoded,
    layers,
    prefilled,
    results,
    updated,
)
from benchmarks.result import RESULTS, ROOT, command_line, six_digits, write_result
from benchmarks.step.sizes import SIZES
from benchmarks.step.workload import completion_lengths
from grpo_kit.engine._kv_cache import row_bucket
from grpo_kit.more.memory.plan import plan_memory
from grpo_kit.trainer.presets import preset

PROMPTS, GROUP, PROMPT_TOKENS = 8, 8, 256
H200_WIDTH = 204  # columns attended in the mean of tokens 32 to 288, which were timed there
LENGTHS, TUNINGS = (256, 512, 1024), ("full", "LoRA", "QLoRA")
PAGE, MEASURED = ROOT / "docs" / "what_to_expect.md", "card_h200.json"
RUNS = {MEASURED: False, "card_h200_fused.json": True}  # was decode by fused layers?
AGAIN, ANEW = "ran out of memory and began again", "nine graphs captured anew in this step"


@cache
def costs() -> Costs:
    """Four numbers from the H200: its large product and copy; a token of one row; three phases of the full step."""
    run = results(MEASURED)
    peaks, phases = run["decode"]["peaks"], run["step full"]["phases"]
    shares = peaks["bytes/s"] / H200.bandwidth, peaks["FLOP/s"] / H200.flops16
    none = Costs(*shares, 0.0, 0.0, phases["other"])
    one_row = decoded("full", H200_WIDTH, 1, fused=False)
    seconds = run["decode"]["full"]["1x1"]["ms a token"] / 1e3 - none.token(one_row, H200)
    outside = h200_step("full")
    eager = sum(phases[name] for name in outside) / sum(
        work.launches for work in outside.values()
    )
    return Costs(*shares, seconds / one_row.launches, eager, phases["other"])


def h200_step(kind: str, file: str = MEASURED) -> dict[str, Work]:
    """The phases outside graphs of the step that ran there, with its own token counts."""
    run = results(file)[f"step {kind.lower()}"]
    scored, optimizer = (
        results(MEASURED)["step full"]["tokens"]["head"],
        counted(kind, "optimizer"),
    )
    plan = plan_of(kind, H200, round(scored / (0.75 * PROMPTS * GROUP)))
    tokens = scored + 0.75 * PROMPTS * PROMPT_TOKENS  # groups of equal rewards are left out
    chunks = math.ceil(tokens / plan.chunk_tokens)
    return {
        "prefill": prefilled(kind, run["tokens"]["prefill"]),
        "forward-backward": updated(
            kind, tokens, chunks, plan.checkpointed_layers, PROMPT_TOKENS + 150
        ),
        "optimizer": optimizer,
    }


def plan_of(kind: str, peaks: Peaks, length: int) -> Any:
    """The memory plan of the card's preset, with the memory that torch reports."""
    name = "gpu24" if peaks.bf16 else "t4"
    cfg = preset(name, model=MODEL, tuning=kind.split()[0].lower())
    return plan_memory(
        cfg, peaks.gib / 0.92, prompt_tokens=PROMPT_TOKENS, completion_tokens=length
    )


def width_of(step: int, limit: int) -> int:
    """Columns that the engine attends at a step: the next power of two."""
    return min(max(64, 1 << step.bit_length()), limit)


def expected(kind: str, peaks: Peaks, length: int) -> dict[str, Any]:
    """One cell of the table."""
    plan, cost = plan_of(kind, peaks, length), costs()
    found = {"peak GiB": plan.peak_gib, "usable GiB": plan.usable_gib, "fits": plan.fits}
    if not plan.fits:
        return found
    kind += "" if peaks.bf16 else " float32"
    rows = PROMPTS * GROUP
    works = [decoded(kind, width_of(step, length), rows) for step in range(1, length)]
    tokens = PROMPTS * (PROMPT_TOKENS - 1) + rows * length
    chunks = math.ceil(tokens / plan.chunk_tokens)
    seconds = {
        "prefill": cost.phase(prefilled(kind, PROMPTS * PROMPT_TOKENS), peaks),
        "decode": sum(cost.token(work, peaks) for work in works),
        "update": cost.phase(
            updated(kind, tokens, chunks, plan.checkpointed_layers, PROMPT_TOKENS + length / 2),
            peaks,
        ),
        "optimizer": cost.phase(counted(kind, "optimizer"), peaks),
        "other": cost.other,
    }
    rollout = seconds["prefill"] + seconds["decode"]
    return found | {
        "chunk tokens": plan.chunk_tokens,
        "checkpointed layers": plan.checkpointed_layers,
        "ms a token": 1e3 * seconds["decode"] / (length - 1),
        "ms a token at 288": 1e3 * cost.token(decoded(kind, H200_WIDTH, rows), peaks),
        "tokens/s": rows * length / rollout,
        "seconds": seconds,
        "step": sum(seconds.values()),
    }


def check(file: str = MEASURED) -> list[dict[str, Any]]:
    """The model beside the H200's numbers, of the layers that decoded in that run. Costs are the first run's."""
    run, fused, cost, rows = results(file), RUNS[file], costs(), []
    first = file == MEASURED

    def row(what: str, predicted: float, measured: float, note: str = "") -> None:
        rows.append({"what": what, "predicted": predicted, "measured": measured})
        rows[-1] |= {"ratio": predicted / measured, "note": note}

    for kind in ("full", "LoRA"):
        for shape, many in (("1x1", 1), ("8x8", 64), ("8x32", 256)):
            work = decoded(kind, H200_WIDTH, many, fused=fused)
            measured = run["decode"][kind.lower()][shape]["ms a token"]
            note = "calibrates" if (kind, many, first) == ("full", 1, True) else ""
            row(
                f"{kind}: ms a token of {many} rows",
                1e3 * cost.token(work, H200),
                measured,
                note,
            )
    for kind in ("full", "LoRA"):
        step, size = run[f"step {kind.lower()}"], SIZES["gpu"].realistic
        lengths = completion_lengths(
            PROMPTS * GROUP, size.mean_completion, size.max_completion, 0
        )
        alive = [sum(n > step for n in lengths) for step in range(1, max(lengths))]
        works = [
            decoded(kind, width_of(step, max(lengths)), row_bucket(many), fused=fused)
            for step, many in enumerate(alive, start=1)
        ]
        found = {"decode": sum(cost.token(work, H200) for work in works)}
        found |= {name: cost.phase(work, H200) for name, work in h200_step(kind, file).items()}
        notes = dict.fromkeys(found, AGAIN if first and kind == "LoRA" else "")
        if kind == "full":
            notes |= (
                dict.fromkeys(list(found)[1:], "calibrates with the two others")
                if first
                else {"decode": ANEW}
            )
        for name, seconds in found.items():
            row(f"{kind}: {name} of a step, s", seconds, step["phases"][name], notes[name])
        row(
            f"{kind}: a step, s",
            sum(found.values()) + cost.other,
            step["seconds"],
            notes["decode"],
        )
    return rows


def all_expected() -> dict[str, Any]:
    """The whole result."""
    cells = {
        card.name: {
            kind: {str(length): expected(kind, card, length) for length in LENGTHS}
            for kind in TUNINGS
        }
        for card in CARDS
    }
    return {
        "what": "A model of peaks and launches, not a measurement",
        "command": "python -m benchmarks.card.expect",
        "hardware": "none: counts of the pretend card, data sheets, shares and launch costs of an H200",
        "model": MODEL,
        "work": f"{PROMPTS} x {GROUP} completions behind prompts of {PROMPT_TOKENS} tokens",
        "cards": {card.name: vars(card) for card in (*CARDS, H200)},
        "costs": vars(costs()),
        "check": check(),
        "check fused": check("card_h200_fused.json"),
        "expected": cells,
    }


def table(result: dict[str, Any]) -> str:
    """The table of cards, as Markdown."""
    heads = "".join(f" 64 x {length:,} |" for length in LENGTHS)
    lines = [f"| card | tuning |{heads}", "|---|---|" + "---|" * len(LENGTHS)]
    for card, kinds in result["expected"].items():
        for kind, cells in kinds.items():
            lines.append(
                f"| {card} | {kind} |" + "".join(f" {_cell(cell)} |" for cell in cells.values())
            )
    return "\n".join(lines)


def _cell(cell: dict[str, Any]) -> str:
    if not cell["fits"]:
        return f"does not fit: {cell['peak GiB']:.1f} of {cell['usable GiB']:.1f} GiB"
    return f"{cell['step']:.1f} s, {_hundreds(cell['tokens/s'])} tokens/s, {cell['peak GiB']:.1f} GiB"


def _hundreds(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}"


def check_table(result: dict[str, Any], name: str = "check") -> str:
    """The model beside the H200, as Markdown."""
    lines = [
        "| on the H200 | predicted | measured | predicted / measured | |",
        "|---|---|---|---|---|",
    ]
    for row in result[name]:
        numbers = f"{row['predicted']:.3g} | {row['measured']:.3g} | {row['ratio']:.2f}"
        lines.append(f"| {row['what']} | {numbers} | {row['note']} |")
    return "\n".join(lines)


def assumptions(result: dict[str, Any]) -> str:
    """Every number that is not counted, as Markdown."""
    cost, measured = result["costs"], "H200 run"
    rows = [
        (
            "share of the data sheet's bandwidth",
            f"{cost['bandwidth']:.2f}",
            f"{measured}: a large copy",
        ),
        (
            "share of its FLOPs",
            f"{cost['flops']:.2f}",
            f"{measured}: a product of 8192 x 8192, bfloat16",
        ),
        (
            "a launch in a graph",
            f"{1e6 * cost['graph']:.1f} µs",
            f"{measured}: a token of one row",
        ),
        (
            "a launch from Python",
            f"{1e6 * cost['eager']:.0f} µs",
            f"{measured}: prefill, update and optimizer",
        ),
        (
            "tokenizer, rewards, files",
            f"{cost['other']:.2f} s a step",
            f"{measured}: the step's rest",
        ),
    ]
    for card in result["cards"].values():
        peaks = f"{card['bandwidth'] / 1e9:,.0f} GB/s, {card['flops16'] / 1e12:.0f} TFLOP/s in 16 bits"
        peaks += "" if card["bf16"] else f", {card['flops32'] / 1e12:.1f} in float32"
        rows.append((card["name"], f"{peaks}, {card['gib']:.1f} GiB", card["source"]))
    return "\n".join(
        ["| | number | from |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def memory_table(result: dict[str, Any]) -> str:
    """The plan beside the allocator (card_memory.json), as Markdown."""
    lines = [
        "| | cut of the update | planned | by the allocator: allocated, reserved | of |",
        "|---|---|---|---|---|",
    ]
    for row in results("card_memory.json")["rows"]:
        cut = f"{row['chunk tokens']:,} tokens, {row['checkpointed layers']} of {layers()} layers again"
        found = f"{row['allocated GiB']:.1f}, {row['reserved GiB']:.1f}, {row['ended']}"
        lines.append(
            f"| {row['card']}, {row['tuning']} | {cut} | {row['planned GiB']:.1f} | {found} | "
        )
        lines[-1] += f"{row['usable GiB']:.1f} |"
    return "\n".join(lines)


def fused_table(result: dict[str, Any]) -> str:
    """The same of the second run."""
    return check_table(result, "check fused")


TABLES = {
    "expected": table,
    "check": check_table,
    "check fused": fused_table,
    "memory": memory_table,
    "assumptions": assumptions,
}


def with_tables(text: str, result: dict[str, Any]) -> str:
    """The page with its tables made anew, each between <!-- name --> and <!-- end of name -->."""
    for name, make in TABLES.items():
        between = rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)"
        text, times = re.subn(
            between, lambda m, make=make: m[1] + make(result) + m[2], text, flags=re.S
        )
        if times != 1:
            raise ValueError(f"the page has no place for its table: <!-- {name} -->")
    return text


def main() -> None:
    """Compute, print, save."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--check", action="store_true", help="print the model beside the H200, and save nothing"
    )
    asked = parser.parse_args()
    result = six_digits(all_expected())
    print(check_table(result), fused_table(result), sep="\n\n")
    if asked.check:
        return
    print(table(result))
    write_result(RESULTS / "card_expected.json", result)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")


if __name__ == "__main__":
    main()
