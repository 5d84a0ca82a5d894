"""The house: rooms in order, imports only downwards, no circle; what a reader can learn from without TRL needs none."""

import ast
import functools
import importlib
import io
import re
import subprocess
import sys
import tokenize
from operator import attrgetter
from pathlib import Path

import forked
import pytest

import grpo_kit
from grpo_kit._support import lazy

ROOT = Path(grpo_kit.__file__).parent
# A room imports from those before it only.
ROOMS = [
    "_support", "schedules", "objectives", "prompts", "record", "models", "verdicts", "rewards", "engine.optim",
    "tasks", "loop", "watch", "trainer.presets", "engine", "evaluation", "trainer",
    "more.code", "more.episodes", "more.tasks", "more.lab", "more.export", "more.bridges", "more.memory", "more.doctor",
    "more",
]  # fmt: skip
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in FILES
}
FRONT_DOOR = "grpo_kit"
COMMAND_LINE = ("grpo_kit.__main__", "grpo_kit.more.commands")  # in public names, as a script
USE_TRL = {"more.bridges"}


@functools.cache
def imports(path):
    """Modules that the file imports in any form, inside functions and under TYPE_CHECKING too."""
    return [*imports_of(ast.parse(path.read_text()), path)]


def imports_of(tree, path):
    package = [*path.relative_to(ROOT.parent).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base


@functools.cache
def graph():
    """module -> modules of the kit that it imports; a package's list of names loads nothing of more/ by itself."""
    return {
        name: {
            found
            for found in imports(path)
            if found in MODULES
            and found != name
            and not (path.name == "__init__.py" and beyond(found))
        }
        for name, path in MODULES.items()
    }


def beyond(module):
    """Does it go beyond the mission?"""
    return module.startswith("grpo_kit.more.")


def room(module):
    """The room of a module; a package's __init__ belongs to its own, the command line to the front door."""
    if module == FRONT_DOOR or module.startswith(COMMAND_LINE):
        return FRONT_DOOR
    parts = module.split(".")[1:]
    fenced = ".".join(parts[:2])
    return fenced if fenced in ROOMS else parts[0]


def circle(edges):
    """One circle as a list of names, [] where there is none."""
    seen, trail = set(), []

    def visit(name):
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in seen:
            return []
        seen.add(name)
        trail.append(name)
        found = next((c for c in map(visit, sorted(edges.get(name, ()))) if c), [])
        trail.pop()
        return found

    return next((c for c in map(visit, sorted(edges)) if c), [])


def test_no_two_test_files_share_a_name():
    """Folders of tests are no packages: in one process pytest refuses the second file of a name."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_rooms_are_those_of_the_list():
    assert {room(name) for name in MODULES} == {FRONT_DOOR, *ROOMS}


def test_imports_go_down_only():
    order = {r: place for place, r in enumerate([*ROOMS, FRONT_DOOR])}
    upwards = [
        f"{name} imports {imported}, which lies above it"
        for name in MODULES
        for imported in graph()[name]
        if order[room(imported)] > order[room(name)]
    ]
    assert not upwards


def test_there_is_no_circle_and_the_house_in_numbers(capsys):
    edges = graph()
    assert not circle(edges)
    between = {
        r: {room(m) for n in edges if room(n) == r for m in edges[n]} - {r}
        for r in [FRONT_DOOR, *ROOMS]
    }
    assert not circle(between)

    def floor(r):
        return 1 + max(map(floor, between[r]), default=0)

    arrows = sum(map(len, between.values()))
    lines = sum(len(path.read_text().splitlines()) for path in FILES)
    with capsys.disabled():
        print(
            f"\nthe house: {len(between)} rooms, {max(map(floor, between))} floors, {arrows} arrows, none upwards, "
            f"no circle; {len(FILES)} files, {lines} lines"
        )


def test_the_circle_finder_finds_circles():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_room_is_hidden_by_a_name():
    """`import grpo_kit.evaluation` gives the package, whatever functions the front door names."""
    for name in ROOMS:
        module = importlib.import_module(f"{FRONT_DOOR}.{name}")
        assert functools.reduce(getattr, name.split("."), grpo_kit) is module, name
    hidden = [
        name
        for name in MODULES
        if name.count(".") == 2
        and room(name) != "tasks"  # a task's file has its function's name, and little else
        if importlib.import_module(name)
        if not isinstance(
            getattr(getattr(grpo_kit, name.split(".")[1]), name.split(".")[2]), type(re)
        )
    ]
    assert not hidden


def python(code):
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_the_front_door_loads_nothing_heavy():
    heavy = {
        "torch",
        "transformers",
        "trl",
        "peft",
        "bitsandbytes",
        "datasets",
        "pandas",
        "numpy",
        "matplotlib",
    }
    said = f"print(*[name for name in sorted({heavy}) if name in sys.modules])"
    looked_at = "import sys, grpo_kit; grpo_kit.__version__; dir(grpo_kit); "
    assert python(looked_at + said) == []
    assert python("import sys; from grpo_kit import linear, cosine; " + said) == []
    assert "pandas" in python("import sys; from grpo_kit import read_metrics; " + said), (
        "the test can fail"
    )


def test_what_trains_or_asks_loads_torch_and_transformers_alone():
    """An adapter is looked for where peft is loaded already; a table of datasets is made where one is asked for. In a
    notebook, which has ipykernel loaded, one line says what takes its seconds."""
    names = "GRPOTrainer evaluate export chat load_policy readiness preset scored_samples tasks.largest tasks.from_rows"
    touched = "; ".join(f"kit.{name}" for name in names.split())
    unneeded = {
        "peft",
        "bitsandbytes",
        "datasets",
        "trl",
        "matplotlib",
        "IPython",
        "gguf",
        "resvg_py",
        "typer",
    }
    said = f"print(*[name for name in sorted({unneeded}) if name in sys.modules])"
    notebook = "import sys, grpo_kit as kit; sys.modules['ipykernel'] = sys; kit.linear"
    assert (
        python(f"{notebook}; {touched}; {said}")
        == "Loading torch and transformers: some seconds.".split()
    )


def test_what_loads_is_said_once(capsys, monkeypatch):
    """torch may come with one module, and transformers with the next."""
    monkeypatch.setattr(lazy, "_UNSAID", ["Loading"])
    lazy._say_what_loads()
    lazy._say_what_loads()
    assert capsys.readouterr().out == "Loading\n"


def test_the_front_door_names_the_same_everywhere():
    """What editors read, which is what is imported at run time, and __all__."""
    (block,) = [
        node
        for node in ast.parse(MODULES[FRONT_DOOR].read_text()).body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    read = {alias.name: node.module for node in block.body for alias in node.names}
    rooms = {name for name, module in read.items() if module == FRONT_DOOR}
    assert sorted(grpo_kit.__all__) == sorted(read) and set(read) <= set(dir(grpo_kit))
    for name, module in read.items():
        found = getattr(grpo_kit, name)
        wanted = f"grpo_kit.{name}" if name in rooms else module
        assert found is (
            sys.modules[wanted] if name in rooms else getattr(sys.modules[wanted], name)
        )


def test_the_front_door_refuses_what_it_has_not():
    for name in ("brows", "_repr_html_"):
        with pytest.raises(AttributeError, match=name):
            getattr(grpo_kit, name)
    with pytest.raises(ImportError, match="brows"):
        exec("from grpo_kit import brows")


@pytest.mark.parametrize("package", ["grpo_kit", "grpo_kit.more.lab"])
def test_a_name_that_moved_is_named_where_it_is_now(package):
    package = importlib.import_module(package)
    assert package._MOVED
    for name, place in package._MOVED.items():
        assert name not in package.__all__
        with pytest.raises(AttributeError, match=f"{name} is called {place} now"):
            getattr(package, name)
        attrgetter(place.removeprefix("kit."))(grpo_kit)
    assert len(grpo_kit.__all__) <= 50, "the front door is small"


def test_threads_that_wait_for_each_other_sleep_unless_somebody_said_otherwise():
    said = (
        "import os, sys, grpo_kit; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    )
    assert python(said) == ["1000", "False"]
    assert python("import os; os.environ['GOMP_SPINCOUNT'] = '7'; " + said) == ["7", "False"]


def test_garbage_is_collected_again_after_a_name_is_loaded():
    said = "print(gc.isenabled()); "
    on_and_off = f"grpo_kit.linear; {said} gc.disable(); grpo_kit.rewards; {said}"
    assert python("import gc, grpo_kit; " + on_and_off) == ["True", "False"]
    fails = f"import gc, grpo_kit\ntry: grpo_kit._support.lazy._load('grpo_kit.nowhere')\nexcept ImportError: {said}"
    assert python(fails) == ["True"]


def test_a_file_is_read_in_one_sitting():
    texts = {path.relative_to(ROOT): path.read_text() for path in FILES}
    # 300 lines of 110 columns, as they were before the formatter kept code at 96, are some 340.
    long = [path for path, text in texts.items() if len(text.splitlines()) > 340]
    unexplained = [
        str(path) for path in long if "Longer than 300 lines" not in texts[path][:2000]
    ]
    assert not unexplained, "say why at its head, or split it"


# The core: the loop and what it stands on. It knows no engine, no chart, no episode and no tool of another kind.
CORE = {
    "_support", "schedules", "objectives", "prompts", "models", "record", "verdicts", "rewards", "engine.optim",
    "tasks", "loop",
}  # fmt: skip


def run_time_imports(path):
    """Modules of the kit that a file imports when it runs, inside functions too: not those for editors alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    return {found for found in imports_of(tree, path) if found in MODULES}


def test_the_loop_stands_on_the_core_alone():
    """By import statements of any form, from file to file, and by what one loads; a task is given to it."""
    found = {
        *python(
            f"import sys, grpo_kit.loop.grpo; print(*[n for n in sys.modules if n in {[*MODULES]}])"
        )
    }
    waiting = [name for name in MODULES if room(name) == "loop"]
    assert {*waiting} > {"grpo_kit.loop.grpo"} <= found
    seen = set()
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += run_time_imports(MODULES[name])
    # packages that hold a room of the core
    found = (found | seen) - {FRONT_DOOR, "grpo_kit.engine"}
    above = {name for name in found if room(name) not in CORE - {"verdicts", "prompts"}}
    assert not above, "the loop reaches these rooms"


def test_a_plain_run_loads_no_engine():
    code = "import sys, grpo_kit.loop.grpo, grpo_kit.models, grpo_kit.tasks.largest; "
    said = "print(*{n for n in sys.modules if n.startswith('grpo_kit.')}, 'trl' in sys.modules)"
    *rooms, trl = python(code + said)
    assert not {*rooms} & {"watch", "trainer", "evaluation", "more"}
    assert trl == "False"


def test_the_kit_does_not_import_what_goes_beyond_it():
    """The lists of public names name it; every other file does without."""
    kit = {
        name: path for name, path in MODULES.items() if room(name) not in (FRONT_DOOR, "more")
    }
    kit = {
        name: path
        for name, path in kit.items()
        if not beyond(name) and path.name != "__init__.py"
    }
    above = {
        name: [other for other in imports(path) if beyond(f"{other}.")]
        for name, path in kit.items()
    }
    assert len(above) > 100 and not {name: others for name, others in above.items() if others}


# What only files of more/ ask.
ASKS = re.compile(
    r"\bEpisodeTask|\bhas_episodes|read_answer is (?:not )?None|hasattr\(\w*\.?sample\b"
)
# The task's own way, or the plain one: each is asked for in one place (docs/architecture.md).
ASKED = {
    "seams": "trainer/grpo_trainer.py",
    "play": "evaluation/generate_and_score.py",
    "made_of": "tasks/_same_task.py",
}


def test_no_room_knows_which_kind_of_task_it_has(tmp_path):
    """By names, and by what a step of the standard trainer on a plain task loads."""
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in FILES
        if path.name[:2] != "__"
    }
    plain = {name: text for name, text in texts.items() if not name.startswith("more/")}
    assert len(plain) > 120 and any(
        ASKS.search(texts[name]) for name in texts.keys() - plain.keys()
    )
    assert not {name: asked for name, text in plain.items() if (asked := ASKS.findall(text))}
    for method, place in ASKED.items():
        assert [
            name
            for name, text in plain.items()
            if re.search(rf"\btask\.{method}\(|getattr\(task, .{method}", text)
        ] == [place]
    code = (
        "import sys; from standard_runs import make; import grpo_kit as kit; kit.GRPOTrainer; "
        f"make({str(tmp_path / 'run')!r}, steps=1, live=True).train(); print(*sys.modules)"
    )
    done = forked.bare().run("-c", code, cwd=ROOT.parent)
    assert not done.returncode, done.stderr
    loaded = [name for name in done.stdout.split() if beyond(name)]
    assert "grpo_kit.trainer.grpo_trainer" in done.stdout.split() and not loaded


# Run in a fresh process: what importing the trainer loads, then the second step of a tiny run.
COUNT_A_STEP = """
import sys
import grpo_kit.trainer.grpo_trainer
from grpo_kit.engine import fast

modules = sum(name.startswith("grpo_kit") for name in sys.modules)
fast._ROOM_ON_A_CPU = 0  # whatever memory is free, the engine keeps its keys and values
from standard_runs import make

kit = grpo_kit.__path__[0]
functions, running, deepest = set(), 0, 0


def note(frame, event, _):
    global running, deepest
    code = frame.f_code
    if not code.co_filename.startswith(kit) or code.co_name.startswith("<"):
        return
    if event == "call":
        functions.add((code.co_filename, code.co_firstlineno))
        running += 1
        deepest = max(deepest, running)
    elif event == "return":
        running -= 1


def counted():
    if trainer.step == 1:
        sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)


import few_words
from transformers import LlamaForCausalLM

config = few_words.policy()[0].config
config.head_dim = 16  # fills registers, as the default model's 64 do
trainer = make(sys.argv[1], model=LlamaForCausalLM(config), steps=2, live=False)
step, trainer.one_step = trainer.one_step, counted
trainer.train()
files = {file for file, _ in functions}
print(len(functions), len(files), deepest, modules)
"""
# Two or three functions more or less are asked by another system, or where peft is loaded.
MOST_OF_A_STEP = {"functions": 300, "files": 45, "deep": 14, "modules": 91}


def test_the_default_step_stays_short(tmp_path, capsys):
    """Functions with a name: a comprehension is a function of its own in Python 3.11 only."""
    done = forked.bare().run("-c", COUNT_A_STEP, str(tmp_path / "run"), cwd=ROOT.parent)
    assert not done.returncode, done.stderr
    counts = dict(zip(MOST_OF_A_STEP, map(int, done.stdout.split()[-4:]), strict=True))
    with capsys.disabled():
        print(f"\na step of the default trainer: {counts}")
    assert all(counts[name] <= most for name, most in MOST_OF_A_STEP.items()), counts


def test_only_integrations_import_trl():
    importers = {
        name
        for name, path in MODULES.items()
        if any(module.split(".")[0] == "trl" for module in imports(path))
    }
    assert importers and {room(name) for name in importers} <= USE_TRL, importers


def test_objectives_know_torch_and_themselves_alone():
    names = {
        name for m, path in MODULES.items() if room(m) == "objectives" for name in imports(path)
    }
    allowed = {"__future__", "typing", "torch", "torch.nn.functional", "grpo_kit._support.lazy"}
    assert not [
        n for n in names if n not in allowed and not n.startswith("grpo_kit.objectives")
    ]


def test_nobody_touches_trl_internals():
    assert not [p.name for p in FILES if any(n.startswith("trl.trainer") for n in imports(p))]


def test_no_file_names_a_folder_of_one_machine():
    """Models are named by name; only the attacks on the sandbox ask for real homes, and documents for examples."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT.parent, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    home = re.compile(rb"(?<![\w.])/(?:root|Users|work|home/\w+)/[\w.]")
    found = {}
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT.parent / name
        if path.is_file() and name not in ("tests/code/sandbox_attacks.py",):
            hits = home.findall(path.read_bytes())
            if hits:
                found[name] = hits[:3]
    assert not found


# Files of a user, of a run folder, and the one that the rules forbid.
EXAMPLES = {
    "my_task.py", "train_mine.py", "FILE.py", "file.py", "cluster/train.py", "utils.py",
}  # fmt: skip
CITED = re.compile(r"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.py\b")
DOTTED = re.compile(r"(?<![\w.])(?:grpo_kit\.)?([a-z]\w*)\.([a-z]\w*)(?![\w(])")


@functools.cache
def prose(path):
    """Docstrings and comments of a Python file; all of another."""
    text = path.read_text()
    if path.suffix != ".py":
        return [text]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        ast.get_docstring(n) or ""
        for n in ast.walk(ast.parse(text))
        if isinstance(n, documented)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return found + [token.string for token in tokens if token.type == tokenize.COMMENT]


def missing(texts, files):
    """Python files that a text names by their name, or by the last folders of their path, and that are not there."""
    ends = {
        "/".join(parts[i:])
        for parts in (f.split("/") for f in files)
        for i in range(len(parts))
    }
    return sorted({cited for text in texts for cited in CITED.findall(text)} - ends - EXAMPLES)


@functools.cache
def python_files():
    root = ROOT.parent
    found = [
        p
        for d in ("grpo_kit", "tests", "benchmarks", "examples", ".ci", "docs", "scripts")
        for p in (root / d).rglob("*.py")
    ]
    return frozenset(p.relative_to(root).as_posix() for p in [*found, *root.glob("*.py")])


def test_no_citation_of_a_file_that_is_not_there():
    pages = [*FILES, *sorted((ROOT.parent / "docs").glob("*.md"))]
    absent = {
        str(path.relative_to(ROOT.parent)): missing(prose(path), python_files())
        for path in pages
    }
    assert not {path: names for path, names in absent.items() if names}


def test_no_citation_of_a_module_that_is_not_there():
    """`rewards.scoring` in a docstring or comment: a room that is a package, and what it holds."""
    packages = {name.split(".")[1] for name in MODULES if name.count(".") > 1}
    packages.remove("trainer")  # also what a variable is called: trainer.config
    absent = []
    for path in FILES:
        lines = [
            line for text in prose(path) for line in text.splitlines() if ">>>" not in line
        ]
        for first, second in DOTTED.findall("\n".join(lines)):
            if first not in packages or second in ("py", "json", "csv"):
                continue
            if f"grpo_kit.{first}.{second}" not in MODULES:
                if not hasattr(importlib.import_module(f"grpo_kit.{first}"), second):
                    absent.append(f"{path.relative_to(ROOT)}: {first}.{second}")
    assert not absent


def test_the_finder_of_citations_finds_them():
    files = {"grpo_kit/rewards/scoring.py", "grpo_kit/_support/lazy.py"}
    text = "see scoring.py, rewards/scoring.py (judge.py), training/lazy.py and my_task.py; a.python, x.pyc"
    assert missing([text], files) == ["judge.py", "training/lazy.py"]


def test_the_stages_of_a_step_name_every_file_of_the_loop():
    """docs/architecture.md, in order; test_no_citation_of_a_file_that_is_not_there has the other direction."""
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    text = page.split("## What one step of training looks like")[1].split("\n## ")[0]
    assert re.findall(r"^(\d)\. \*\*", text, re.MULTILINE) == [str(n) for n in range(1, 10)]
    files = {path.name for path in (ROOT / "loop").glob("*.py")} - {"__init__.py"}
    assert files <= set(re.findall(r"`loop/(\w+\.py)`", text))
