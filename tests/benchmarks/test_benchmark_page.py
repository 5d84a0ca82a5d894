"""benchmarks/README.md says which command makes which number: its commands run, its files exist, none is left out."""

import contextlib
import io
import json
import re
import runpy
import sys
from functools import cache

import pytest

from benchmarks.result import RESULTS, ROOT

PAGE = ROOT / "benchmarks" / "README.md"
OF_HAND = {"verdicts_unseen.json"}  # asked once by hand: no command made it
COMMAND = re.compile(r"python -m (benchmarks(?:\.\w+)+)([^`|\n#]*)")


def texts():
    """Every page and every notebook's sources, by name."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        PAGE,
        ROOT / "benchmarks" / "oracle" / "README.md",
    ]
    found = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found[path.name] = "\n\n".join("".join(cell["source"]) for cell in cells)
    return found


COMMANDS = sorted(
    {
        (module, rest.strip())
        for text in texts().values()
        for module, rest in COMMAND.findall(text)
    }
)
LINKED = [
    (PAGE.parent / target).resolve()
    for target in re.findall(r"\]\((results/[^)]+)\)", PAGE.read_text())
]
FOLDERS = [PAGE.parent / folder for folder in re.findall(r"`(results/\w+/)`", PAGE.read_text())]
FILES = sorted(p for p in RESULTS.rglob("*") if p.is_file() and not p.name.startswith("."))


def source_of(module):
    """The file that `python -m module` runs, whether it exists or not."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def help_of(module):
    """What `python -m module --help` prints. Fails unless it ends with 0, and before it runs what has no parser."""
    assert source_of(module).exists(), f"{module} is not there"
    assert "command_line(" in source_of(module).read_text(), f"{module} takes no --help"
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [module, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
    assert not ended.value.code
    return said.getvalue()


def missing(module, rest):
    """What of the command does not exist: the module, or options; "" where all does."""
    if not source_of(module).exists():
        return module
    asked = re.findall(r"--[\w-]+", rest)
    return " ".join(
        option for option in asked if not re.search(rf"{option}(?![\w-])", help_of(module))
    )


def rows_of(path):
    """The page's rows that link to a result."""
    name = path.relative_to(RESULTS)
    return [line for line in PAGE.read_text().splitlines() if f"(results/{name})" in line]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(("module", "rest"), COMMANDS)
def test_commands_that_are_named_run(module, rest):
    help_of(module)
    assert not missing(module, rest)


def test_every_benchmark_that_is_a_command_is_on_the_page():
    named = {module for module, _ in COMMAND.findall(PAGE.read_text())}
    sources = (ROOT / "benchmarks").rglob("*.py")
    commands = {
        path
        for path in sources
        if "command_line(" in path.read_text() and path.name != "result.py"
    }
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for path in commands
    }
    assert modules == named


def test_raw_files_that_are_named_exist():
    assert LINKED and [path.name for path in LINKED if not path.is_file()] == []
    assert len(FOLDERS) == 3 and all(folder.is_dir() for folder in FOLDERS)


def test_every_result_is_named():
    assert len(FILES) > 1000
    inside = [path for path in FILES if any(folder in path.parents for folder in FOLDERS)]
    assert sorted({*FILES} - {*inside, *LINKED}) == []


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    "path", [p for p in LINKED if p.suffix == ".json"], ids=lambda path: path.stem
)
def test_a_result_says_its_command_and_where_that_is_gone_the_page_says_the_commit(path):
    if path.name in OF_HAND:
        return
    saved = json.loads(path.read_text())
    jobs = saved.get("jobs", {})
    made_by = (
        saved.get("command")
        or saved.get("commands")
        or [job["command"] for job in jobs.values()]
    )
    assert made_by, "by which command?"
    for command in [made_by] if isinstance(made_by, str) else made_by:
        for module, rest in COMMAND.findall(command):
            if gone := missing(module, rest):
                assert any(re.search(r"commit [0-9a-f]{7}\b", row) for row in rows_of(path)), (
                    gone
                )


def test_a_command_that_is_gone_is_named_without_python():
    """Such a one is `benchmarks.x ...`, and its row says the commit that has it."""
    lines = PAGE.read_text().splitlines()
    rows = [
        line
        for line in lines
        if line.startswith("|") and re.search(r"`benchmarks\.\w+[ `]", line)
    ]
    assert len(rows) >= 3
    for row in rows:
        assert re.search(r"commit [0-9a-f]{7}\b", row), row
    for module, rest in re.findall(r"`(benchmarks\.\w+)([^`]*)`", "\n".join(rows)):
        assert missing(module, rest), f"{module}{rest} is there: write python -m before it"
