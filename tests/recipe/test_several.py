"""A recipe under several processes: the script and the config that it writes, and the command, start them and end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from recipe_file import written
from safetensors.torch import load_file

import grpo_kit as kit
from grpo_kit.recipe import Recipe
from grpo_kit.record.files import read_completions, read_metrics

ROOT = Path(kit.__file__).parents[1]


def launched(*words, cwd):
    """accelerate launch, in a process group of its own: what hangs is ended whole."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", *map(str, words)],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
        raise AssertionError(out[-2000:] + errors[-2000:]) from None
    assert process.returncode == 0, out[-2000:] + errors[-4000:]
    return out


def far(a, b):
    """The largest relative distance of two models' weights."""
    return max(float((a[name] - b[name]).norm() / a[name].norm()) for name in a)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    Recipe.of(written(folder)).run(folder / "run", live=None)
    return load_file(folder / "run" / "model" / "model.safetensors")


def check(folder, out, alone):
    assert read_metrics(folder)["step"].tolist() == [0, 1, 2, 3, 4]
    rows = read_completions(folder)
    assert rows.groupby("step").size().tolist() == [8] * 4, "a step has as many completions as in one process"
    assert out.count("step 4/4") == 1 and out.count("best constant completion, always") == 1, "one speaks"
    assert (folder / "README.md").is_file() and (folder / "recipe.json").is_file()
    model, _ = kit.load_policy(folder / "model", quiet=True)
    assert model.num_parameters() > 1e6
    tuned = load_file(folder / "model" / "model.safetensors")
    base = kit.load_policy("tiny-random", quiet=True)[0].state_dict()
    moved = far({name: base[name] for name in tuned}, tuned)
    assert moved > 1e-3
    return far(alone, tuned)


def test_the_script_under_two_processes(alone, tmp_path):
    made = Recipe.of(written(tmp_path)).to_script(tmp_path / "train.py", processes=2)
    out = launched("--config_file", made[1].name, made[0].name, cwd=tmp_path)
    print("script, two processes beside one:", check(tmp_path / "runs" / "train", out, alone))


@pytest.mark.skipif(not os.environ.get("KIT_SLOW_TESTS"), reason="a minute; KIT_SLOW_TESTS=1 runs it")
def test_the_command_under_two_processes(alone, tmp_path):
    written(tmp_path)
    words = (
        "--multi_gpu",
        "--num_processes",
        2,
        "--num_machines",
        1,
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    )
    out = launched(*words, "-m", "grpo_kit", "train", "my_recipe.py", "--run", "runs/mine", cwd=tmp_path)
    assert out.count("The model is in runs/mine/model") == 1 and out.count("Before: ") == 1
    print("command, two processes beside one:", check(tmp_path / "runs" / "mine", out, alone))
    out = launched(*words, "-m", "grpo_kit", "train", "--resume", "runs/mine", cwd=tmp_path)
    assert out.count("The model is in runs/mine/model") == 1, "one that is done is done under several too"
