"""How often the intervals over seeds hold the truth, on made results whose truth is known.

    python -m benchmarks.interval_coverage            # a minute on one core
    python -m benchmarks.interval_coverage --draws 500

A made result is right or wrong for each seed and held-out row, in two arms. A row is hard or easy for both arms; it may
be so for one of them more than for the other (rows_vary), and a training may turn out well or badly (seeds_vary), all
in units of log-odds. What is measured: the share of paired differences whose 95 % interval holds the difference between
the arms in general, and how wide it is. The result goes to benchmarks/results/interval_coverage.json.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from scipy.special import expit

from benchmarks.result import RESULTS, command_line, origin, save
from grpo_kit.more.lab.statistics import difference_over_seeds

SEEDS, ROWS = (2, 3, 5, 10, 30), (64, 256)
SEEDS_VARY, ROWS_VARY, GAPS = (0.0, 0.3, 1.0), (0.0, 1.0), (0.0, 0.8)
_ROWS_ALIKE = 1.5  # how hard a row is for both arms, standard deviation
_MANY = 4_000_000


def truth(seeds_vary: float, rows_vary: float, gap: float) -> float:
    """The difference between the arms over all seeds and rows."""
    rng = np.random.default_rng(0)
    one, two = _chances(rng, 1, _MANY, seeds_vary, rows_vary, gap, each=True)
    return float((two - one).mean())


def made(
    rng: np.random.Generator,
    seeds: int,
    rows: int,
    *,
    seeds_vary: float,
    rows_vary: float,
    gap: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Right (1) or wrong (0) of two arms, each (seeds, rows)."""
    chances = _chances(rng, seeds, rows, seeds_vary, rows_vary, gap)
    one, two = ((rng.random((seeds, rows)) < p).astype(float) for p in chances)
    return one, two


def coverage(
    rng: np.random.Generator,
    draws: int,
    seeds: int,
    rows: int,
    *,
    true: float,
    **variation: float,
) -> dict[str, float]:
    """covered: share of intervals that hold the true difference; width: their mean width."""
    covered, width = 0, 0.0
    for _ in range(draws):
        d, _ = difference_over_seeds(*made(rng, seeds, rows, **variation))
        covered += d.low <= true <= d.high
        width += d.high - d.low
    return {"covered": covered / draws, "width": width / draws}


def _chances(rng, seeds, rows, seeds_vary, rows_vary, gap, *, each=False):
    """The chance of a right answer in either arm; each: a seed of its own for every row."""
    hard, other = _ROWS_ALIKE * rng.standard_normal(rows), rows_vary * rng.standard_normal(rows)
    one, two = (
        seeds_vary * rng.standard_normal(rows if each else (seeds, 1)) for _ in range(2)
    )
    return expit(hard + one), expit(hard + other + gap + two)


def main() -> None:
    """Simulate every mixture, print it and save it."""
    parser = command_line(__doc__)
    parser.add_argument("--draws", type=int, default=2000, help="made results a mixture")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, table = np.random.default_rng(options.seed), []
    for seeds_vary, rows_vary, gap in product(SEEDS_VARY, ROWS_VARY, GAPS):
        variation = {"seeds_vary": seeds_vary, "rows_vary": rows_vary, "gap": gap}
        true = truth(**variation)
        for seeds, rows in product(SEEDS, ROWS):
            found = coverage(rng, options.draws, seeds, rows, true=true, **variation)
            table.append({"seeds": seeds, "rows": rows, **variation, "truth": true, **found})
            print(
                f"{seeds:2} seeds, {rows:3} rows; seeds vary {seeds_vary:.1f}, rows {rows_vary:.1f}; truth "
                f"{true:+.3f}: {found['covered']:.1%} covered, {100 * found['width']:.1f} points wide",
                flush=True,
            )
    covered = [row["covered"] for row in table]
    print(
        f"{min(covered):.1%} to {max(covered):.1%} of {options.draws} intervals, median {np.median(covered):.1%}"
    )
    command = (
        f"python -m benchmarks.interval_coverage --draws {options.draws} --seed {options.seed}"
    )
    result = origin(command, "numpy", "scipy") | {
        "draws": options.draws,
        "seed": options.seed,
        "mixtures": table,
    }
    print(save(RESULTS, "interval_coverage", result))


if __name__ == "__main__":
    main()
