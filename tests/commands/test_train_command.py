"""grpo-kit train, as a person types it: in a process of its own, stopped, killed, gone on with, asked wrongly."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from recipe_file import written
from safetensors.torch import load_file

import grpo_kit
from grpo_kit.__main__ import _COMMANDS, main
from grpo_kit.recipe import Recipe
from grpo_kit.record.files import has_metrics, read_metrics

ROOT = Path(grpo_kit.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
ENVIRONMENT.pop("KIT_PROFILE", None)


STEPS = 24


def begun(*words, cwd):
    """The command, running; a process group of its own, as a terminal gives it."""
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_kit", *map(str, words)],
        cwd=cwd, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def ended(process):
    out, errors = process.communicate(timeout=240)
    return process.returncode, out, errors


def until_step(folder, step, process):
    for _ in range(2400):
        if has_metrics(folder) and (read_metrics(folder)["step"] >= step).any():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("it does not get there")


def weights(folder):
    return load_file(Path(folder) / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The file's run, without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Recipe.of(written(folder), steps=STEPS).run(folder / "run", live=None)
    torch.set_num_threads(threads)
    return weights(folder / "run")


def test_ctrl_c_saves_and_says_how_to_go_on_and_a_kill_loses_nothing(tmp_path, whole):
    written(tmp_path)
    run = tmp_path / "runs" / "mine"
    options = ("--steps", STEPS, "--run", "runs/mine", "--save-every", 3)
    process = begun("train", "my_recipe.py", *options, cwd=tmp_path)
    until_step(run, 4, process)
    os.killpg(process.pid, signal.SIGINT)
    code, out, errors = ended(process)
    assert code == 130, (out, errors)
    assert "Stopped after step" in errors and "grpo-kit train --resume runs/mine" in errors
    assert "Traceback" not in errors and not (run / "model").exists()

    (tmp_path / "my_recipe.py").unlink()
    stopped_at = read_metrics(run)["step"].max()
    process = begun("train", "--resume", "runs/mine", cwd=tmp_path)
    until_step(run, stopped_at + 8, process)
    os.killpg(process.pid, signal.SIGKILL)
    ended(process)

    process = begun("train", "--resume", "runs/mine", cwd=tmp_path)
    code, out, errors = ended(process)
    assert code == 0, (out, errors)
    assert "The model is in runs/mine/model" in out and "grpo-kit chat runs/mine" in out and "-> " in out
    found = weights(run)
    assert all(torch.equal(whole[name], found[name]) for name in whole)
    assert read_metrics(run)["step"].tolist() == list(range(STEPS + 1))


def test_a_command_says_what_it_does_with_an_example_and_loads_nothing_for_it():
    for name in _COMMANDS:
        code = f"import sys; from grpo_kit.__main__ import main\ntry: main([{name!r}, '--help'])\nexcept SystemExit: "
        code += "print('loaded', *(m for m in ('torch', 'numpy', 'pandas', 'trl') if m in sys.modules))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.rstrip().endswith("loaded"), done.stdout[-300:] + done.stderr
        assert name == "doctor" or f"  grpo-kit {name} " in done.stdout
        assert all(len(line) <= 120 for line in done.stdout.splitlines())


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KIT_PROFILE", raising=False)
    written(tmp_path)
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "words, said",
    [
        ("train none.py", "none.py is no file"),
        ("train empty.py", "defines neither `recipe` nor `task`"),
        ("train my_recipe.py:rows", "is a list"),
        ("train folder", "folder holds no run"),
        ("train my_recipe.py --task largest", "leave --task largest out"),
        ("train --profile tpu", "preset 'tpu' is not known; use auto, smoke"),
        ("train --profile smoke --task smallest", "task='smallest' is not known"),
        ("train --profile smoke --temperature hot", "START:END such as 1.2:0.8"),
        ("train --profile smoke --temperature 0", "temperature=0.0 must be"),
        ("train --profile smoke --steps 0", "steps=0 must be"),
        ("train --profile smoke --rank 4", "no effect with tuning='full'"),
        ("train --profile smoke --tuning qlora --run x", "qlora"),
        ("train --profile smoke --set group_size", "write it as NAME=VALUE"),
        ("train --profile smoke --set steps=4", "use --steps"),
        ("train --profile smoke --set nothing=4", "nothing is no field of kit.Config ("),
        ("train --profile smoke --set num_iterations=2", "num_iterations is no field of kit.Config ("),
        ("train --profile smoke --set iterations=0", "iterations=0 must be"),
        ("train --profile smoke --set group_size=1", "group_size=1 must be"),
        ("train --profile smoke --optimizer rocket --run x", "optimizer='rocket'"),
        ("train --profile smoke --model ./nowhere --run x", "no such folder"),
        ("train --resume folder", "folder holds no run"),
        ("train --resume none", "--resume none is no folder"),
        ("train --resume folder --seed 2", "--seed is for a new run"),
        ("train --resume folder --rank 2", "--rank is for a new run"),
        ("train --resume folder --set beta=1", "--set is for a new run"),
        ("train --resume folder --run x", "--run x: a run goes on in its own folder"),
        ("evaluate none.py", "none.py is no file"),
        ("evaluate my_recipe.py --rows 0", "--rows 0 must be at least 1"),
        ("evaluate my_recipe.py --samples -1", "--samples -1 must be at least 0"),
        ("readiness my_recipe.py --samples 2", "at least a group's 4"),
        ("export folder out", "folder holds no run"),
        ("export none out", "none is no folder"),
        ("chat folder", "holds no config.json"),
        ("chat my_recipe.py --base", "--base is for run folders"),
        ("watch none", "RUN none is no folder"),
        ("watch folder --every 0", "--every 0 above 0"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_and_2_and_leaves_nothing(words, said, here, capsys):
    before = {path.name for path in here.iterdir()}
    assert main(words.split()) == 2
    errors = capsys.readouterr().err
    assert said in errors and errors.startswith(f"grpo-kit {words.split()[0]}: "), errors
    assert len(errors.strip().splitlines()) == 1
    assert {path.name for path in here.iterdir()} <= before | {"__pycache__"}


def test_a_reward_that_fails_is_a_failed_run(here, capsys):
    text = (here / "my_recipe.py").read_text()
    (here / "bad.py").write_text(text.replace("return [sum(c", "return 1 / 0 or [sum(c"))
    assert main(["train", "bad.py", "--run", "runs/bad"]) in (1, 2)
    errors = capsys.readouterr().err
    assert "letters" in errors and "ZeroDivisionError" in errors and "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_run_is_not_trained_twice_and_another_seed_takes_its_recipe(here, capsys):
    assert main("train my_recipe.py --steps 1 --held-out-every 0 --run runs/a".split()) == 0
    assert main("train my_recipe.py --run runs/a".split()) == 2
    assert "runs/a-2" in capsys.readouterr().err
    assert (
        main("train runs/a --seed 7 --tuning lora --rank 2 --set micro_batch=4 --set iterations=2".split())
        == 0
    )
    other = Recipe.of("runs/words")
    assert (other.cfg.seed, other.cfg.steps, other.lora["r"]) == (7, 1, 2)
    assert other.held_out_every is None and other.config == {"iterations": 2} and other.cfg.micro_batch == 4
    assert other.make_task().name == "words" and other.schedule is not None
    out = capsys.readouterr().out
    assert "Training into runs/words" in out and "grpo-kit export runs/words exports/words" in out


def test_a_red_flag_that_ends_a_run_is_a_failure_that_can_be_gone_on_with(here, capsys):
    assert main("train --profile smoke --steps 6 --on-flag stop --held-out-every 0 --run runs/a".split()) == 1
    out, errors = capsys.readouterr()
    assert "Red flag: " in out and len(errors.strip().splitlines()) == 1
    assert "A red flag ended it. Stopped after step" in errors and "--resume runs/a" in errors
    assert not (here / "runs/a/model").exists()
    assert main("train --resume runs/a --on-flag warn".split()) == 0


def test_a_run_goes_on_longer_and_with_another_rate(here):
    assert main("train my_recipe.py --steps 2 --save-every 1 --run runs/a".split()) == 0
    assert main("train --resume runs/a --steps 4 --learning-rate 0.003 --temperature 0.7".split()) == 0
    rows = read_metrics("runs/a").set_index("step")
    assert rows.index.tolist() == [0, 1, 2, 3, 4]
    assert rows["learning_rate"][4] == pytest.approx(0.003) and rows["temperature"][4] == pytest.approx(0.7)
    assert Recipe.of("runs/a").cfg.steps == 4
