"""What running a program in the sandbox costs: one program, a batch of 64, and beside a trainer that holds gigabytes.

    python -m benchmarks.sandbox_cost                  # under a minute
    python -m benchmarks.sandbox_cost --parent-gib 8

Medians in milliseconds. The rows of a table are measured in turn, round after round. "plain" is a fresh interpreter by
subprocess.run with no isolation and no limits: what of the cost is Python's start.
Saves benchmarks/results/sandbox_cost.json.
"""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from benchmarks.result import RESULTS, command_line, origin, save, spread
from grpo_kit.more.code.sandbox.pool import LauncherError, Pool, interpreter

LIMITS = {"seconds": 20.0, "memory_mb": 256, "output_kb": 64}
PROGRAMS = {"empty": b"", "print": b"print(sum(range(1000)))"}


def in_turn(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict]:
    """Arm -> median and quartiles in ms; the arms run A B C A B C ..."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(rounds + 1):
        for name, run in arms.items():
            started = time.perf_counter()
            run()
            if round_:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    table = {}
    for name, values in seconds.items():
        found = {part: round(1000 * value, 2) for part, value in spread(values).items()}
        table[name] = {
            "median_ms": found["median"],
            "quartiles_ms": [found["q1"], found["q3"]],
            "n": len(values),
        }
    return table


def plain(program: bytes) -> None:
    """The same interpreter with no sandbox around it."""
    command = [interpreter()["executable"], "-I", "-S", "-B", "-c", program.decode()]
    subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env={}, check=True)


def pools() -> dict[str, Pool]:
    """The kinds of isolation that work here."""
    found = {}
    for kind in ("sandlock", "bubblewrap"):
        try:
            fields, *_ = Pool(kind).run([(b"", b"")], LIMITS, 1)[0]
        except LauncherError as problem:
            print(f"{kind}: left out, {problem}")
            continue
        if fields["status"] == "ok":
            found[kind] = Pool(kind)
    return found


def show(title: str, table: dict[str, dict]) -> None:
    print(f"\n{title}")
    for name, row in table.items():
        low, high = row["quartiles_ms"]
        print(
            f"  {name:34} {row['median_ms']:9.1f} ms   ({low:.1f} to {high:.1f}, n = {row['n']})"
        )


def main() -> None:
    """Run, print, save."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--parent-gib", type=float, default=4.0)
    options = parser.parse_args()
    kinds, workers = pools(), os.cpu_count() or 1
    load = os.getloadavg()[0]
    tables = {}

    arms = {f"plain, {name}": lambda code=code: plain(code) for name, code in PROGRAMS.items()}
    for kind, pool in kinds.items():
        for name, code in PROGRAMS.items():
            arms[f"{kind}, {name}"] = lambda pool=pool, code=code: pool.run(
                [(code, b"")], LIMITS, 1
            )
    tables["one program"] = in_turn(arms, options.rounds)
    show("One program", tables["one program"])

    batch = [(PROGRAMS["print"], b"")] * 64
    arms = {
        f"{kind}, {workers} workers": lambda pool=pool: pool.run(batch, LIMITS, workers)
        for kind, pool in kinds.items()
    }
    tables["batch of 64"] = in_turn(arms, max(3, options.rounds // 8))
    show("A batch of 64 programs", tables["batch of 64"])

    def fresh(kind: str) -> None:
        """A launcher started from this process, one program, and its end."""
        pool = Pool(kind)
        pool.run([(PROGRAMS["print"], b"")], LIMITS, 1)
        pool.close()

    def arms_beside() -> dict[str, Callable[[], object]]:
        arms = {
            "os.fork and exit, for comparison": lambda: os.waitpid(os.fork() or os._exit(0), 0)
        }
        for kind, pool in kinds.items():
            arms[f"{kind}, print"] = lambda pool=pool: pool.run(
                [(PROGRAMS["print"], b"")], LIMITS, 1
            )
            arms[f"{kind}, launcher started anew"] = lambda kind=kind: fresh(kind)
        return arms

    def resident_gib() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * mmap.PAGESIZE / 2**30

    # Twice small, twice large, in turn: both see the same minutes of the machine.
    size = int(options.parent_gib * 2**30)
    for half in ("first", "second"):
        for large in (False, True):
            if large:
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                for start in range(0, size, mmap.PAGESIZE):
                    memory[start] = 1  # each page is there
            title = f"beside a parent of {resident_gib():.2f} GiB, {half} time"
            tables[title] = in_turn(arms_beside(), max(1, options.rounds // 2))
            show(title[0].upper() + title[1:], tables[title])
            if large:
                memory.close()

    command = f"python -m benchmarks.sandbox_cost --rounds {options.rounds} --parent-gib {options.parent_gib}"
    saved = origin(command, *filter(find_spec, ["sandlock"]))
    saved["versions"]["python"] = platform.python_version()
    if "bubblewrap" in kinds:
        said = subprocess.check_output(["bwrap", "--version"], text=True)
        saved["versions"]["bubblewrap"] = said.split()[-1]
    saved |= {
        "kernel": platform.release(),
        "user": "root" if os.getuid() == 0 else "ordinary user",
        "load average before": round(load, 2),
        "tables": tables,
    }
    save(RESULTS, "sandbox_cost", saved)
    for pool in kinds.values():
        pool.close()


if __name__ == "__main__":
    main()
