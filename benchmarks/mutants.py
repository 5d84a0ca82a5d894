"""Which faults does `make test` notice? Lines of the kit drawn at random, each changed a little, one at a time.

    python -m benchmarks.mutants --tests after            # with this checkout's tests; goes on
    python -m benchmarks.mutants --tests before --checkout ../old --missed-by after
    python -m benchmarks.mutants --table

Three lines in each of the 20 largest rooms, by seed: a comparison turned, a term dropped, a default changed. A mutant
meets the tests of its room (tests/ROOM and the files that name its module), until one fails; with --whole, those that
live then meet all other tests together, in one tree, and each alone what failed there. Of another checkout, an older
one with its own tests, only what the first suite missed is asked: none of it noticed there, and nothing was lost. A
line that the older kit does not have stays out. Writes results/mutants.json.
"""

from __future__ import annotations

import ast
import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.result import RESULTS, ROOT, command_line, origin, read_result, write_result

PATH = RESULTS / "mutants.json"
ROOMS, EACH, SEED = 20, 3, 0
TURNED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
TURNED |= {ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
LIBRARIES = ("datasets", "pandas", "peft", "torch", "transformers.models.llama.modeling_llama")
SECONDS = 600  # of a mutant in the tests of its room; one that takes longer counts as noticed


@dataclass(frozen=True)
class Mutant:
    """file: below grpo_kit. line: its first, from 1. old, new: the text there and what takes its place."""

    file: str
    line: int
    kind: str
    old: str
    new: str
    start: int  # place in the file, in characters

    @property
    def room(self) -> str:
        return self.file.split("/")[0].removesuffix(".py")

    def apply(self, tree: Path, back: bool = False) -> None:
        """Changes the file in a copy of the checkout, or changes it back."""
        path = tree / "grpo_kit" / self.file
        text = path.read_text(encoding="utf-8")
        old, new = (self.new, self.old) if back else (self.old, self.new)
        assert text[self.start :].startswith(old), self
        path.write_text(
            text[: self.start] + new + text[self.start + len(old) :], encoding="utf-8"
        )


def sites(path: Path) -> list[Mutant]:
    """All that can be changed in a file."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        whole = text[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(whole.encode()[:column].decode())

    def mutant(kind: str, begin: ast.AST, end: ast.AST, new: str) -> Mutant:
        first = place(begin.lineno, begin.col_offset)
        old = text[first : place(end.end_lineno, end.end_col_offset)]
        return Mutant(
            path.relative_to(ROOT / "grpo_kit").as_posix(), begin.lineno, kind, old, new, first
        )

    mutants = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
            sides = [
                ast.get_source_segment(text, side) for side in (node.left, node.comparators[0])
            ]
            turned = f"{sides[0]} {TURNED[type(node.ops[0])]} {sides[1]}"
            mutants.append(mutant("a comparison turned", node, node, turned))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            mutants.append(
                mutant("a term dropped", node, node, ast.get_source_segment(text, node.left))
            )
        elif isinstance(node, ast.BoolOp):
            mutants.append(
                mutant(
                    "a term dropped", node, node, ast.get_source_segment(text, node.values[0])
                )
            )
        elif isinstance(node, ast.FunctionDef):
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                if isinstance(default, ast.Constant) and isinstance(
                    default.value, bool | int | float
                ):
                    value = (
                        not default.value
                        if isinstance(default.value, bool)
                        else default.value + 1
                    )
                    mutants.append(mutant("a default changed", default, default, repr(value)))
    return mutants


def drawn() -> list[Mutant]:
    """Three of each of the largest rooms, by the seed; the kinds in turn where a room has them."""
    lines: Counter[str] = Counter()
    found: dict[str, list[Mutant]] = {}
    for path in sorted((ROOT / "grpo_kit").rglob("*.py")):
        room = path.relative_to(ROOT / "grpo_kit").parts[0].removesuffix(".py")
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
        found.setdefault(room, []).extend(sites(path))
    draw = random.Random(SEED)
    chosen = []
    for room, _ in lines.most_common(ROOMS):
        for kind in ("a comparison turned", "a term dropped", "a default changed"):
            choices = [mutant for mutant in found[room] if mutant.kind == kind] or found[room]
            chosen.append(draw.choice(choices))
    return chosen


def near(mutant: Mutant, tree: Path) -> list[str]:
    """The test files of a mutant's room, and those that name its module."""
    module = mutant.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    tests = tree / "tests"
    files = sorted((tests / mutant.room).rglob("test_*.py")) + sorted(
        tests.glob(f"test_{mutant.room}*.py")
    )
    named = re.compile(rf"grpo_kit\.{re.escape(module)}\b")
    files += [
        path
        for path in sorted(tests.rglob("test_*.py"))
        if named.search(path.read_text(encoding="utf-8"))
    ]
    return [
        path.relative_to(tree).as_posix()
        for path in dict.fromkeys(files)
        if "pretend_card" not in path.parts
    ]


def moved(mutant: Mutant, checkout: Path) -> Mutant | None:
    """The same change in another checkout; None where its line is not there, or there twice."""
    here, there = ((root / "grpo_kit" / mutant.file) for root in (ROOT, checkout))
    if not there.exists():
        return None
    text, other = here.read_text(encoding="utf-8"), there.read_text(encoding="utf-8")
    begin = text.rfind("\n", 0, mutant.start) + 1
    line = text[begin : text.index("\n", mutant.start + len(mutant.old))]
    if other.count(line) != 1:
        return None
    return replace(mutant, start=other.index(line) + mutant.start - begin)


def copy(checkout: Path, folder: Path) -> Path:
    """The checkout without its environment, runs and history."""
    tree = folder / "tree"
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (checkout / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, tree / name)
    return tree


def failing(tree: Path, tests: list[str], seconds: float, *more: str) -> list[str]:
    """The tests that fail, or "too slow"; in a fork that has imported the libraries, not the kit."""
    record = tree / "failures.txt"
    record.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree), "KIT_PROFILE": "smoke", "OMP_NUM_THREADS": "1"}
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        sys.path[:] = [
            str(tree),
            *(path for path in sys.path if Path(path or ".").resolve() != ROOT),
        ]
        for name in [
            name for name in sys.modules if name.split(".")[0] in ("grpo_kit", "benchmarks")
        ]:
            del sys.modules[name]
        import pytest

        class Failures:
            def pytest_runtest_logreport(self, report):
                if report.failed:
                    with record.open("a") as file:
                        file.write(f"{report.nodeid}\n")

            pytest_collectreport = pytest_runtest_logreport

        words = ["-q", "-p", "no:cacheprovider", "--timeout", "200", *more, *tests]
        os._exit(pytest.main(words, plugins=[Failures()]))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, _ = os.waitpid(child, os.WNOHANG)
        if ended:
            return record.read_text().splitlines() if record.exists() else []
        time.sleep(0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return ["too slow"]


def noticed(
    mutants: dict[int, Mutant],
    tree: Path,
    known: dict[str, str | None],
    keep: Callable,
    whole: bool,
) -> None:
    """Fills known: number -> the test that noticed it, None where none did. keep(): saves it."""
    for number, mutant in mutants.items():
        if str(number) not in known:
            known[str(number)] = _first_notice(mutant, tree, near(mutant, tree))
            print(
                number,
                mutant.file,
                mutant.line,
                mutant.kind,
                "->",
                known[str(number)],
                flush=True,
            )
            keep()
    if not whole:
        return
    # The text of one line may move another's place: all of a file are put in from its end.
    alive = [number for number in mutants if known[str(number)] is None]
    alive.sort(key=lambda number: (mutants[number].file, -mutants[number].start))
    for number in alive:
        mutants[number].apply(tree)
    tests = failing(tree, ["tests"], 7200) if alive else []
    for number in reversed(alive):
        mutants[number].apply(tree, back=True)
    print(
        len(alive),
        "live;",
        len(tests),
        "other tests fail with all of them together",
        flush=True,
    )
    tests = [test for test in tests if not failing(tree, [test], SECONDS)]
    for number in alive if tests else []:
        known[str(number)] = _first_notice(mutants[number], tree, tests)
        print(number, mutants[number].file, "->", known[str(number)], flush=True)
        keep()


def _first_notice(mutant: Mutant, tree: Path, tests: list[str]) -> str | None:
    """The first of the tests that fails with the mutant and not without."""
    spared: list[str] = []
    while True:
        mutant.apply(tree)
        failures = failing(
            tree, tests, SECONDS, "-x", *(f"--deselect={name}" for name in spared)
        )
        mutant.apply(tree, back=True)
        if (
            not failures
            or failures[0] == "too slow"
            or not failing(tree, failures[:1], SECONDS)
        ):
            return failures[0] if failures else None
        spared.append(failures[0])


def table(result: dict) -> str:
    """One row a mutant, then how many each suite noticed."""
    suites = list(result["noticed"])
    lines = [
        "| file, line | change | " + " | ".join(suites) + " |",
        "|---|---|" + "---|" * len(suites),
    ]
    for number, mutant in enumerate(result["mutants"]):
        tests = [result["noticed"][suite].get(str(number), "") for suite in suites]
        said = {None: "not noticed", "": "not asked"}
        shown = " | ".join(said.get(test, f"`{str(test).split('[')[0]}`") for test in tests)
        lines.append(f"| {mutant['file']}, {mutant['line']} | {mutant['kind']} | {shown} |")
    counts = [
        f"{suite} {sum(map(bool, tests.values()))} of {len(tests)}"
        for suite, tests in result["noticed"].items()
    ]
    return "\n".join([*lines, "", "Noticed: " + ", ".join(counts)])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tests", help="the name that these tests get in the results")
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, help="where kit and tests are; default: this one"
    )
    parser.add_argument(
        "--missed-by", help="ask only for mutants that these tests did not notice"
    )
    parser.add_argument(
        "--whole", action="store_true", help="what lives meets all other tests, too: an hour"
    )
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    result = read_result(PATH) if PATH.exists() else {}
    if args.table or not args.tests:
        print(table(result))
        return
    for name in LIBRARIES:  # before the forks
        importlib.import_module(name)

    mutants = [Mutant(**mutant) for mutant in result["mutants"]] if result else drawn()
    known = result.get("noticed", {}).get(args.tests, {})
    everything = result.get("noticed", {}) | {args.tests: known}
    missed = everything.get(args.missed_by)
    asked = {
        n: mutant
        for n, mutant in enumerate(mutants)
        if missed is None or missed[str(n)] is None
    }
    if args.checkout != ROOT:
        asked = {
            n: there for n, mutant in asked.items() if (there := moved(mutant, args.checkout))
        }

    def keep() -> None:
        about = origin(f"python -m benchmarks.mutants --tests {args.tests}", "torch", "pytest")
        about |= {"seed": SEED, "mutants": [asdict(mutant) for mutant in mutants]}
        write_result(PATH, about | {"noticed": everything})

    with tempfile.TemporaryDirectory() as folder:
        noticed(asked, copy(args.checkout, Path(folder)), known, keep, args.whole)
    keep()
    print(table(read_result(PATH)))


if __name__ == "__main__":
    main()
