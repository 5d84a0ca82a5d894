"""A recipe under several processes, as torchrun starts them: all train, the first one speaks and writes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from recipe_file import written
from safetensors.torch import load_file

import grpo_kit as kit
from grpo_kit.recipe import Recipe
from grpo_kit.record.files import read_completions, read_metrics

ROOT = Path(kit.__file__).parents[1]


def train(*words, cwd, code=0):
    """grpo-kit train by torchrun, in a process group of its own: what hangs is ended whole. Returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    process = subprocess.Popen(
        [*torchrun, "-m", "--", "grpo_kit", "train", *map(str, words)],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
        raise AssertionError(out[-2000:] + errors[-2000:]) from None
    assert process.returncode == code, out[-2000:] + errors[-4000:]
    return out if code == 0 else errors


def far(a, b):
    """The largest relative distance of two models' weights."""
    return max(float((a[name] - b[name]).norm() / a[name].norm()) for name in a)


def test_two_processes_train_the_weights_of_one(tmp_path):
    """Up to the rounding of sums; a run that is done is done under several too, and none is overwritten."""
    Recipe.of(written(tmp_path)).run(tmp_path / "alone", live=None)
    alone = load_file(tmp_path / "alone/model/model.safetensors")
    out, folder = train("my_recipe.py", cwd=tmp_path), tmp_path / "runs/words"
    assert out.count("The model is in runs/words/model") == 1 and out.count("Before: ") == 1
    assert out.count("step 4/4") == 1 and out.count("best constant completion, always") == 1, "one speaks"
    assert read_metrics(folder)["step"].tolist() == [0, 1, 2, 3, 4]
    assert read_completions(folder).groupby("step").size().tolist() == [8] * 4, "as many as in one process"
    assert (folder / "README.md").is_file() and (folder / "recipe.json").is_file()
    tuned = load_file(folder / "model/model.safetensors")
    base = kit.load_policy("tiny-random", quiet=True)[0].state_dict()
    assert far({name: base[name] for name in tuned}, tuned) > 1e-3
    assert far(alone, tuned) < 1e-4
    assert train("--resume", "runs/words", cwd=tmp_path).count("The model is in runs/words/model") == 1


def test_a_red_flag_ends_all_of_them_and_the_first_one_says_it(tmp_path):
    words = ["--profile", "smoke", "--steps", 20, "--on-flag", "stop", "--held-out-every", 0]
    errors, folder = train(*words, cwd=tmp_path, code=1), tmp_path / "runs/largest"
    assert (
        errors.count("A red flag ended it. Stopped after step") == 1
        and "Traceback" not in errors.split("E1")[0]
    )
    assert 0 < (step := read_metrics(folder)["step"].max()) < 20 and (folder / f"checkpoint-{step}").is_dir()
    assert (folder / "README.md").is_file() and not (folder / "control").exists(), "its hooks have ended"
