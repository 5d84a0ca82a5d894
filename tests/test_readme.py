"""What README and docs say is so: the example runs, links lead somewhere, and every name and command exists."""

import functools
import importlib
import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
from test_house import ROOMS

import grpo_kit as kit

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "AGENTS.md", ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", ROOT / "examples" / "README.md",
]  # fmt: skip
PRESET, STEPS = '"cpu"', "steps=24"


def name(page):
    return str(page.relative_to(ROOT))


def found(pattern):
    """(page, match) of every match on every page, each once."""
    return sorted(
        {(name(page), m) for page in PAGES for m in re.findall(pattern, page.read_text())}
    )


def run_example(folder, monkeypatch, *changes, page=README):
    """The page's Python, executed in `folder`; changes: (old, new) texts, each of which must be there once."""
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    for old, new in changes:
        assert code.count(old) == 1, (
            f"the example of {page.name} has {code.count(old)} times {old}"
        )
        code = code.replace(old, new)
    monkeypatch.chdir(folder)
    names = {}
    exec(compile(code, page.name, "exec"), names)
    return names


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


def test_the_example_has_fourteen_lines():
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    assert len([line for line in code.splitlines() if line.strip()]) == 14


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    names = run_example(tmp_path, monkeypatch, (PRESET, '"smoke"'), (STEPS, "steps=2"))
    trainer, task = names["trainer"], names["task"]
    assert trainer.folder == tmp_path / "runs" / "smallest"
    metrics = kit.read_metrics(trainer.folder)
    assert metrics.step.tolist() == [1, 2] and metrics.temperature.nunique() == 2
    assert trainer.config.max_completion_tokens == task.max_completion_tokens
    assert trainer.reward_weights == task.reward_weights
    assert "strict" in capsys.readouterr().out


def test_the_program_for_a_csv_runs(tmp_path, monkeypatch, capsys):
    """Each label is held out by the same share and trained as often; accuracy by label is printed."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = ROOT / "docs" / "your_csv.md"
    names = run_example(
        tmp_path, monkeypatch, (PRESET, '"smoke"'), ("steps=32", "steps=2"), page=page
    )
    task, table = names["task"], names["table"]
    shares = names["held_out"]["label"].value_counts() / table["label"].value_counts()
    assert shares.between(0.39, 0.41).all() and len(shares) == 3
    assert {row["question"] for row in task.train}.isdisjoint(
        row["question"] for row in task.held_out
    )
    assert len({names["train"]["label"].value_counts()[label] for label in shares.index}) == 1
    printed = capsys.readouterr().out
    assert all(re.search(rf"^{label} .* \d+$", printed, re.M) for label in shares.index)
    assert (tmp_path / "runs" / "tickets_export" / "export.json").is_file()


@pytest.mark.skipif(
    not os.environ.get("KIT_SLOW_TESTS"), reason="minutes; KIT_SLOW_TESTS=1 runs it"
)
def test_the_example_learns(tmp_path, monkeypatch):
    """As it stands: rewarded from the first step, and right more often at the end, beyond doubt."""
    names = run_example(tmp_path, monkeypatch)
    model, tokenizer, task = names["model"], names["tokenizer"], names["task"]
    metrics = kit.read_metrics(names["trainer"].folder)
    assert metrics["reward"].iloc[0] > 0 and metrics["reward/exact_answer"].iloc[:3].max() > 0
    assert metrics["completion_cut_off"].tail(8).mean() < 0.05
    comparison = kit.compare(names["before"], kit.evaluate(model, tokenizer, task))
    assert comparison.difference["strict"].low > 0.2, str(comparison)
    assert comparison.tuned.strict.low > task.best_constant()[1], str(comparison)
    assert kit.rewards.check_rewards(task.rewards, task)["total"][0] == 1.0
    assert kit.watch.read_flags(names["trainer"].folder) == []


def slug(heading):
    """A heading's anchor, as GitHub makes it."""
    text = re.sub(r"[^\w\- ]", "", re.sub(r"\]\(.*?\)", "", heading).lower())
    return text.strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} is not there"
        if anchor:
            text = file.read_text()
            # in a notebook's JSON the quote is escaped
            marks = re.findall(r'<a id=\\?"([\w-]+)', text)
            assert anchor in {*map(slug, re.findall(r"^#+ (.*)$", text, re.M)), *marks}, (
                f"{target}: no such heading"
            )


def test_pages_are_reached_from_the_readme():
    """By itself or by way of docs/features.md."""
    linked = re.findall(r"\]\(([^)#\s]+)", README.read_text())
    features = re.findall(r"\]\(([^)#\s]+)", (ROOT / "docs" / "features.md").read_text())
    reached = {*linked, *(f"docs/{page}" for page in features)}
    assert {name(page) for page in PAGES} - {"README.md", "AGENTS.md"} <= reached
    notebooks = {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert notebooks <= set(linked)
    assert f"[{len(notebooks)} notebooks]" in README.read_text(), "their number"


def test_names_of_the_kit_exist():
    chains = found(r"\bkit\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
    absent = []
    for page, chain in chains:
        try:
            functools.reduce(getattr, chain.split("."), kit)
        except AttributeError:
            absent.append(f"{page}: kit.{chain}")
    assert chains and not absent


def test_names_that_left_the_front_door_live_where_the_changelog_says():
    rows = re.findall(
        r"^  \| (`\w+`(?: `\w+`)*) \| `(grpo_kit[.\w]+)` \|$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.M,
    )
    assert len(rows) > 10
    for names, module in rows:
        for one in re.findall(r"\w+", names):
            assert hasattr(importlib.import_module(module), one), f"{module}.{one}"
            assert one not in kit.__all__


def test_commands_exist():
    commands = found(r"python -m (benchmarks\.\w+)")
    assert commands and not [
        command for command in commands if not importlib.util.find_spec(command[1])
    ]


def test_files_that_are_named_exist():
    named = found(r"`((?:grpo_kit|tests|benchmarks|examples|training)/[\w/.]*)`")
    tops = (ROOT, ROOT / "grpo_kit")
    assert named and not [
        entry for entry in named if not any((top / entry[1]).exists() for top in tops)
    ]


def test_make_targets_exist():
    targets = re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    named = {target for _, target in found(r"(?:\n|`|=\w+ )make ([a-z]+)")}
    assert {"train", "lab", "test"} <= named <= set(targets)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9),
    reason="an older torch has fewer kernels",
)
def test_memory_is_quoted_as_planned():
    (quoted,) = re.findall(r'"(fits: [^"]+)"', (ROOT / "docs" / "systems.md").read_text())
    assert quoted in str(kit.plan_memory("gpu24"))


def test_rooms_are_listed_in_order():
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [room.replace(".", "/") for room in ROOMS if room != "more"]
    assert re.findall(r"^\| `([\w/]+?)/?` \|", architecture, re.M) == rooms
    agents = (
        (ROOT / "AGENTS.md").read_text().split("## Rooms, in order")[1].split("## Rules")[0]
    )
    listed = re.findall(r"^`.*`$", agents, re.M)
    assert re.findall(r"`([\w/]+)`", " ".join(listed)) == rooms


def missing_parts(code, source):
    """What the code shows between its `...` and the source, from there on, has not, line for line."""
    missing, lines = [], [line.strip() for line in source.splitlines()]
    for part in re.split(r"^\.\.\.\n", code, flags=re.M):
        shown = [line.strip() for line in part.splitlines()]
        places = [n for n in range(len(lines)) if lines[n : n + len(shown)] == shown]
        missing += [] if places else [part]
        lines = lines[places[0] + len(shown) :] if places else lines
    return missing


def test_the_step_in_the_docs_is_the_loops():
    page = (ROOT / "docs" / "loop.md").read_text()
    (code,) = re.findall(r"^```py\n(.*?)^```", page, re.M | re.S)
    source = (ROOT / "grpo_kit" / "loop" / "grpo.py").read_text()
    assert 14 <= len(code.splitlines()) <= 22
    assert not missing_parts(code, source)
    assert missing_parts(code.replace("sample(", "draw("), source), (
        "a changed line is not found"
    )
    assert missing_parts("give_advantages(batch, config, everyone)\n...\n" + code, source), (
        "another order"
    )
