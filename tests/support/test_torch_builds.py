"""A torchvision of another torch is named; one that fits, or that loads all the same, is not."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_kit._support import lazy as torch_builds

HERE = torch.__version__.split("+")[0]


def installed(folder, name, version, asks, code=""):
    """A package as pip leaves it, on a path of its own."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (about / "METADATA").write_text(text + "".join(f"Requires-Dist: {one}\n" for one in asks))


BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')"


@pytest.mark.parametrize(
    ("name", "version", "asks", "code", "named"),
    [
        ("torchvision", "0.26.0", ["numpy", "torch (==2.5.0)"], BROKEN, True),
        ("torchvision", "0.26.0", ["numpy", "torch (==2.5.0)"], "", False),
        ("torchvision", "0.26.0", ["numpy", f"torch (=={HERE})"], BROKEN, False),
        ("torchaudio", "2.5.0", [], BROKEN, True),
        ("torchaudio", HERE, [], BROKEN, False),
    ],
)
def test_what_was_built_for_another_torch_and_does_not_load_is_named(
    name, version, asks, code, named, tmp_path, monkeypatch
):
    installed(tmp_path, name, version, asks, code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert bool(torch_builds.misfits()) is named
    if named:
        with pytest.raises(
            ImportError, match=rf"{name} {version} .*pip install -U {name} torch=={HERE}"
        ):
            torch_builds.check_builds()


def test_the_kit_says_it_before_transformers_names_something_else(tmp_path):
    installed(tmp_path, "torchvision", "0.26.0", ["torch (==2.5.0)"], BROKEN)
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import grpo_kit; grpo_kit.GRPOTrainer"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: torchvision 0.26.0 was built for another torch"), last


def test_nothing_is_said_here():
    assert torch_builds.misfits() == []
