"""Does the first cell of a notebook leave a hosted image's torch alone, and what does it change there?

tests/hosted holds what images have (.ci/hosted_images.py wrote it). By their metadata and without a network: what an
image has and the kit takes stays, as with pip; the rest comes in the versions of this environment.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LISTS = ROOT / "tests" / "hosted"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOSTED = runpy.run_path(str(ROOT / ".ci" / "hosted.py"))
PLAIN = re.search(r"\[([a-z,]+)\]", HOSTED["install_cell"]("05_train_full.ipynb"))[1]
WITH_TRL = re.search(r"\[([a-z,]+)\]", HOSTED["install_cell"]("07_warm_start.ipynb"))[1]
OURS_TO_LEAVE = {"torch", "torchvision", "torchaudio", "numpy", "pandas"}
BY_TRL = {"datasets", "pyarrow", "huggingface-hub"}  # trl 1.16 wants newer ones than Colab has


def image(name):
    """(python, {package: version}) of an image."""
    text = (LISTS / f"{name}.txt").read_text()
    return re.search(r"^# python (\S+)", text, re.M)[1], dict(
        re.findall(r"^([^#=\s]+)==(\S+)$", text, re.M)
    )


def wanted(extras):
    lists = [PROJECT["optional-dependencies"][extra] for extra in extras.split(",")]
    return [*PROJECT["dependencies"], *sum(lists, [])]


def resolved(requirements, has, python):
    """{package: version} that pip adds or changes there. AssertionError if two want what excludes each other."""
    values = {
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "extra": "",
    }
    values |= {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    installed, waiting = {}, [(text, "the kit") for text in requirements]
    for text, by in waiting:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate(values):
            continue
        there = installed.get(name) or has.get(name)
        if there and requirement.specifier.contains(there, prereleases=True):
            continue
        assert name not in installed, (
            f"{by} wants {requirement}, and {installed[name]} is chosen"
        )
        installed[name] = metadata.version(name)
        assert requirement.specifier.contains(installed[name], prereleases=True), (
            f"{by} wants {requirement}"
        )
        waiting += [(one, name) for one in metadata.requires(name) or ()]
    return installed


@pytest.mark.parametrize("extras", [PLAIN, WITH_TRL])
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("colab", set()),
        ("kaggle", set()),
        # Its transformers is 4.57; hub and tokenizers follow.
        ("sagemaker", {"transformers", "huggingface-hub", "tokenizers", "click", "hf-xet"}),
        ("runpod", set()),
    ],
)
def test_an_image_keeps_what_it_has(name, changed, extras):
    python, has = image(name)
    assert python.startswith(tuple(re.findall(r"3\.\d+", "3.11 3.12 3.13 3.14")))
    installed = resolved(wanted(extras), has, python)
    assert not OURS_TO_LEAVE & set(installed) & set(has)
    found = set(installed) & set(has)
    if extras == PLAIN:
        assert found == changed
    else:
        assert found <= changed | BY_TRL | {"click", "hf-xet", "idna"}, (
            "trl comes with notebooks that call it"
        )


@pytest.mark.parametrize(
    ("torch", "stays"), [("2.9.1", True), ("2.9.0", True), ("2.7.1", False), ("2.6.0", False)]
)
def test_other_torches_of_runpods_template_stay_or_are_refused(torch, stays):
    """Below the floor the cell's `torch==` and the kit's `torch>=` exclude each other: pip installs nothing."""
    assert torch in (LISTS / "runpod.txt").read_text()
    (floor,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch"]
    assert floor.specifier.contains(torch) is stays
    assert ("torch" in resolved(wanted(PLAIN), {"torch": torch}, "3.12.0")) is not stays


def test_lists_say_where_and_when_they_are_from():
    assert {path.stem for path in LISTS.glob("*.txt")} == {
        "colab",
        "kaggle",
        "sagemaker",
        "runpod",
    }
    for path in LISTS.glob("*.txt"):
        assert re.match(
            r"# [\w-]+/[\w-]+ \S+ [0-9a-f]{7,} 2026-\d\d-\d\d\n", path.read_text()
        ), path
        names = re.findall(r"^([^#=\s]+)==", path.read_text(), re.M)
        assert names == sorted(set(map(canonicalize_name, names))), "one line a package"


@pytest.mark.skipif(
    not os.environ.get("KIT_SLOW_TESTS"), reason="asks PyPI; KIT_SLOW_TESTS=1 runs it"
)
@pytest.mark.parametrize("name", ["colab", "kaggle", "sagemaker", "runpod"])
def test_pip_itself_leaves_them(name, tmp_path):
    """pip resolves the first cell's line among packages that stand there by name and version alone."""
    python, has = image(name)
    minor = ".".join(python.split(".")[:2])
    interpreter = f"python{minor}"
    if subprocess.run([interpreter, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no {interpreter} on PATH")
    subprocess.run([interpreter, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for package, version in has.items():
        if package not in ("pip", "setuptools"):
            about = packages / f"{package.replace('-', '_')}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            )
            (about / "INSTALLER").write_text("pip\n")
    report = tmp_path / "report.json"
    command = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--dry-run",
        "--report",
        report,
        f"{ROOT}[{PLAIN}]",
    ]
    subprocess.run([*command, f"torch=={has['torch']}"], check=True)
    about = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    found = {canonicalize_name(one["name"]): one["version"] for one in about}
    changed = {package: version for package, version in found.items() if package in has}
    print(name, len(found) - len(changed), "added; changed:", changed)
    assert not OURS_TO_LEAVE & set(changed)
    if name in ("colab", "kaggle", "runpod"):
        assert not changed


@pytest.mark.skipif(
    not os.environ.get("KIT_SLOW_TESTS"), reason="installs 1 GB; KIT_SLOW_TESTS=1 runs it"
)
def test_the_first_cell_then_notebook_05_among_colabs_versions(tmp_path):
    """Every package that the kit needs in Colab's version, but Python and torch: those of this environment."""
    _, has = image("colab")
    others = {
        name: version
        for name, version in has.items()
        if not name.startswith(("torch", "nvidia", "triton", "setuptools"))
    }
    (tmp_path / "has.txt").write_text(
        "".join(f"{name}=={version}\n" for name, version in others.items())
    )
    names = {canonicalize_name(Requirement(text).name) for text in wanted(PLAIN)} & set(others)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    torch = f"torch=={metadata.version('torch').split('+')[0]}"
    install = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        tmp_path / "has.txt",
        torch,
        *sorted(names),
    ]
    subprocess.run(
        [*install, "ipykernel", "ipywidgets", "pip==24.1.2", "setuptools"], check=True
    )
    before, size = versions(python), megabytes(tmp_path / "venv")

    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n")
    for file in filter(None, files):
        (tmp_path / "clone" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / "clone" / file)
    kernel = [
        python,
        "-m",
        "ipykernel",
        "install",
        "--prefix",
        tmp_path / "kernels",
        "--name",
        "colab",
    ]
    subprocess.run(kernel, check=True, capture_output=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "KIT_PROFILE": "smoke",
        "JUPYTER_PATH": str(tmp_path / "kernels" / "share" / "jupyter"),
    }
    out = tmp_path / "out.ipynb"
    run = [
        sys.executable,
        "-m",
        "papermill",
        "05_train_full.ipynb",
        out,
        "--kernel",
        "colab",
        "--no-progress-bar",
    ]
    subprocess.run(run, cwd=tmp_path / "clone" / "notebooks", env=environment, check=True)

    after = versions(python)
    changed = {
        name: (version, after.get(name))
        for name, version in before.items()
        if after.get(name) != version
    }
    cell = next(
        cell for cell in json.loads(out.read_text())["cells"] if cell["id"] == "install"
    )
    seconds, added = (
        cell["metadata"]["papermill"]["duration"],
        megabytes(tmp_path / "venv") - size,
    )
    print(
        f"first cell: {seconds:.0f} s, {added} MB, {len(set(after) - set(before))} packages added, changed: {changed}"
    )
    assert not changed and "grpo-kit" in after


def versions(python):
    done = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"],
        check=True,
        capture_output=True,
        text=True,
    )
    return {canonicalize_name(one["name"]): one["version"] for one in json.loads(done.stdout)}


def megabytes(folder):
    return (
        sum(
            path.stat().st_size
            for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        )
        >> 20
    )
