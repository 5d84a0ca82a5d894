"""grpo-kit train, as a person types it: in a process of its own, stopped, killed, gone on with, asked wrongly."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import forked
import pytest
import torch
from safetensors.torch import load_file
from task_file import COOLING, TRAINED, written

import grpo_kit
from grpo_kit.__main__ import app, main
from grpo_kit.loop import run_settings
from grpo_kit.loop.config import FIELDS
from grpo_kit.more.commands import Preset
from grpo_kit.more.lab._job import Job, settings_of
from grpo_kit.record.files import read_metrics, steps_done
from grpo_kit.trainer.presets import NAMES

ROOT = Path(grpo_kit.__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
ENVIRONMENT.pop("KIT_PROFILE", None)


def begun(*words, cwd):
    """The command, running; a process group of its own, as a terminal gives it."""
    return forked.start("-m", "grpo_kit", *words, cwd=cwd, environment=ENVIRONMENT)


def ended(process):
    out, errors = process.communicate(timeout=240)
    return process.returncode, out, errors


def until_step(folder, step, process):
    for _ in range(2400):
        if folder.is_dir() and steps_done(folder) >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("it does not get there")


def weights(folder):
    return load_file(Path(folder) / "model" / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


LONG = [*TRAINED, *COOLING, "--set", "steps=24", "--set", "save_steps=3"]


def test_ctrl_c_saves_and_says_how_to_go_on_and_a_kill_loses_nothing(tmp_path):
    written(tmp_path)
    assert (
        ended(begun("train", "my_task.py", *LONG, "--folder", "runs/whole", cwd=tmp_path))[0]
        == 0
    )
    whole, run = weights(tmp_path / "runs/whole"), tmp_path / "runs" / "mine"
    process = begun("train", "my_task.py", *LONG, "--folder", "runs/mine", cwd=tmp_path)
    until_step(run, 4, process)
    os.killpg(process.pid, signal.SIGINT)
    code, out, errors = ended(process)
    assert code == 130, (out, errors)
    assert "Stopped after step" in errors and "grpo-kit train --resume runs/mine" in errors
    assert (
        "Traceback" not in errors
        and len(errors.strip().splitlines()) == 1
        and not (run / "model").exists()
    )

    stopped_at = steps_done(run)
    # the file is found from elsewhere too
    process = begun("train", "--resume", "mine", cwd=tmp_path / "runs")
    until_step(run, stopped_at + 8, process)
    os.killpg(process.pid, signal.SIGKILL)
    ended(process)

    process = begun("train", "--resume", "runs/mine", cwd=tmp_path)
    code, out, errors = ended(process)
    assert code == 0, (out, errors)
    assert (
        "The model is in runs/mine/model" in out
        and "grpo-kit chat runs/mine" in out
        and "-> " in out
    )
    assert same(weights(run), whole)
    assert read_metrics(run)["step"].tolist() == list(range(25))


def test_a_command_says_what_it_does_with_an_example_and_loads_nothing_for_it():
    for name in [command.callback.__name__ for command in app.registered_commands]:
        code = f"import sys; from grpo_kit.__main__ import main\nmain([{name!r}, '--help'])\n"
        code += "print('loaded', *(m for m in ('torch', 'numpy', 'pandas', 'trl') if m in sys.modules))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=60,
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
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("[1")
    return tmp_path


SMOKE = "train --preset smoke"


@pytest.mark.parametrize(
    "words, said",
    [
        ("train none.py", "none.py is no file"),
        ("train empty.py", "defines no `task`"),
        ("train my_task.py:rows", "has a list called `rows`"),
        ("train smallest --preset smoke", "task='smallest' is not known; use 'largest'"),
        (f"{SMOKE} --set temperature=hot", "schedule 'hot' cannot be read"),
        (f"{SMOKE} --set temperature=0", "temperature=0 must be"),
        (f"{SMOKE} --set steps=0", "steps=0 must be"),
        (f"{SMOKE} --set group_size=1", "group_size=1 must be"),
        (f"{SMOKE} --set iterations=0", "iterations=0 must be"),
        (f"{SMOKE} --set group_size", "write it as NAME=VALUE"),
        (f"{SMOKE} --set step=4", "Config has no such field; did you mean 'steps'?"),
        (f"{SMOKE} --set num_iterations=2", "here it is iterations"),
        (f"{SMOKE} --set optimizer=rocket --folder x", "optimizer='rocket'"),
        (f"{SMOKE} --set model=./nowhere --folder x", "no such folder"),
        (f"{SMOKE} --rank 4 --folder x", "--rank 4 is of adapters, which are trained with --tuning lora"),
        (f"{SMOKE} --tuning qlora --folder x", "qlora"),
        (f"{SMOKE} --report-to mlflow --folder x", "tracker='mlflow' is not known; use 'tensorboard'"),
        ("train --resume folder", "folder holds no run"),
        ("train --resume none", "none holds no run; give a run's folder"),
        ("evaluate none", "none holds no run"),
        ("evaluate my_task.py", "my_task.py holds no run"),
        ("readiness my_task.py --preset smoke --samples 2", "group_size=4 must lie in 2..samples=2"),
        ("export folder out", "folder holds no run"),
        ("chat folder", "holds no config.json"),
        ("chat my_task.py --base", "--base is for run folders"),
        ("watch none", "none is no folder"),
        ("train --preset smoke --folder my_task.py", "my_task.py is no folder that can be written; name another"),
        ("train --resume torn", "torn/run.json cannot be read"),
        ("watch torn --once", "torn/run.json cannot be read"),
        ("watch folder --every 0", "every=0 above 0"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_and_2_and_leaves_nothing(words, said, here, capsys):
    before = {path.name for path in here.iterdir()}
    assert main(words.split()) == 2
    errors = capsys.readouterr().err
    assert said in errors and errors.startswith(f"grpo-kit {words.split()[0]}: "), errors
    assert len(errors.strip().splitlines()) == 1
    assert {path.name for path in here.iterdir()} <= before | {"__pycache__"}


@pytest.mark.parametrize(
    "words, names",
    [
        ("evaluate folder --rows -1", ["--rows"]),
        ("readiness --samples 0", ["--samples"]),
        ("chat x --tokens 0", ["--tokens"]),
        ("train --rank many", ["--rank"]),
        ("train --preset tpu", ["--preset", "tpu", "gpu24"]),
        ("train --resume", ["--resume"]),
        ("train --folders x", ["--folders", "--folder"]),
    ],
)
def test_what_does_not_parse_ends_in_2_and_is_named(words, names, capsys):
    assert main(words.split()) == 2
    errors = capsys.readouterr().err
    assert {*names} <= {*re.findall(r"[\w-]+", errors)} and "Traceback" not in errors, errors


def test_the_presets_that_can_be_asked_for_are_all():
    assert {*get_args(Preset)[0].__args__} == {"auto", *NAMES}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_options_and_choices(shell):
    """As the shell asks: the words so far in the environment."""
    for so_far, offered in (
        ("tra", "train"),
        ("train --held", "--held-out-every"),
        ("train --preset gp", "gpu24"),
    ):
        # bash
        words = {"COMP_WORDS": f"grpo-kit {so_far}", "COMP_CWORD": str(len(so_far.split()))}
        words |= {
            "_TYPER_COMPLETE_ARGS": f"grpo-kit {so_far}",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        code = "from grpo_kit.__main__ import main; main([])"
        environment = ENVIRONMENT | words | {"_GRPO_KIT_COMPLETE": f"complete_{shell}"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert offered in done.stdout, (shell, so_far, done)


def test_every_field_of_config_and_of_the_preset_is_a_setting():
    values = settings_of(
        [
            "learning_rate=cosine(1e-5, 1e-6)",
            "loss_options={'a': 1}",
            "model=tiny-random",
            "held_out=4",
        ]
    )
    assert values["learning_rate"] == grpo_kit.cosine(1e-5, 1e-6) and values[
        "loss_options"
    ] == {"a": 1}
    assert (values["model"], values["held_out"]) == ("tiny-random", 4)
    for name in FIELDS:
        assert name in settings_of([f"{name}=1"])
    job = Job.asked(
        None, settings_of(["preset=smoke", "held_out=4", "max_completion_tokens=5", "beta=0.1"])
    )
    assert (
        len(job.task.held_out) == 4
        and job.task.max_completion_tokens == 5
        and job.config.beta == 0.1
    )
    assert (
        Job.asked(None, {"preset": "smoke", "tuning": "lora"}).config.learning_rate
        == grpo_kit.preset("smoke", tuning="lora").learning_rate
    ), "the preset's, for adapters"


@pytest.mark.parametrize("preset, task", [("t4", None), ("gpu24", None), ("cpu", "countdown")])
def test_what_a_folder_keeps_makes_the_same_job(preset, task, tmp_path):
    asked = settings_of(["temperature=linear(1.2, 0.8)", "seed=3", "tuning=lora"])
    job = Job.asked(task, {"preset": preset, "rank": 4} | asked)
    model, _ = grpo_kit.load_policy("tiny-random", quiet=True)
    config = job.config.with_task(job.task)
    kept = run_settings.settings_of(model, job.task, config, [1.0], "adamw", None) | {
        "notes": job.options
    }
    (tmp_path / "run.json").write_text(json.dumps(kept))
    found = Job.of_run(tmp_path)
    assert found.config.values() == job.config.values() and found.options == job.options
    assert found.task.train == job.task.train


def test_a_reward_that_fails_is_a_failed_run(here, capsys):
    text = (here / "my_task.py").read_text()
    (here / "bad.py").write_text(text.replace("return [sum(c", "return 1 / 0 or [sum(c"))
    assert main(["train", "bad.py", *TRAINED, "--folder", "runs/bad"]) == 1
    errors = capsys.readouterr().err
    assert "letters" in errors and "ZeroDivisionError" in errors and "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_run_is_not_trained_twice_and_its_options_are_kept(here, capsys):
    words = [
        "train",
        "my_task.py",
        *TRAINED,
        "--set",
        "steps=1",
        "--tuning",
        "lora",
        "--rank",
        "2",
    ]
    assert main([*words, "--held-out-every", "0"]) == 0
    out = capsys.readouterr().out
    assert (
        "Training into runs/words" in out and "grpo-kit export runs/words exports/words" in out
    )
    kept = json.loads(Path("runs/words/model/adapter_config.json").read_text())
    assert (kept["r"], kept["lora_alpha"]) == (2, 4)
    assert main([*words, "--folder", "runs/words"]) == 2
    assert (
        "runs/words holds a run, and none is overwritten: give another --folder"
        in capsys.readouterr().err
    )
    assert read_metrics("runs/words")["step"].tolist() == [1], "no look at held-out rows"
    before = {
        path: path.read_bytes() for path in Path("runs/words").rglob("*") if path.is_file()
    }
    for more, said in (
        ("--tuning full", "tuning='full'"),
        ("--set seed=2", "seed=2"),
        ("--set model=x", "model='x'"),
        ("--folder x", "folder='x'"),
    ):
        assert main(["train", "--resume", "runs/words", *more.split()]) == 2
        assert f"{said} is for a new run; what can change: steps," in capsys.readouterr().err
    assert main(["train", "--resume", "runs/words", "--set", "steps=5"]) == 2
    assert "without a checkpoint to go on from" in capsys.readouterr().err
    assert before == {
        path: path.read_bytes() for path in Path("runs/words").rglob("*") if path.is_file()
    }
    assert main(["train", "--resume", "runs/words"]) == 0, "a run that is done is done"


def test_a_red_flag_that_ends_a_run_is_a_failure_that_can_be_gone_on_with(here, capsys):
    assert (
        main(f"{SMOKE} --set steps=6 --on-flag stop --held-out-every 0 --folder runs/a".split())
        == 1
    )
    out, errors = capsys.readouterr()
    assert "Red flag: " in out and len(errors.strip().splitlines()) == 1
    assert "red flag: cut off" in errors and "--resume runs/a" in errors
    assert not (here / "runs/a/model").exists()
    assert main("train --resume runs/a --on-flag warn".split()) == 0
    assert read_metrics("runs/a")["step"].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_run_goes_on_longer_and_with_another_rate(here):
    assert (
        main(
            [
                "train",
                "my_task.py",
                *TRAINED,
                "--set",
                "steps=2",
                "--set",
                "save_steps=1",
                "--folder",
                "runs/a",
            ]
        )
        == 0
    )
    shorter = weights("runs/a")
    more = "--set steps=4 --set learning_rate=0.003 --set temperature=0.7"
    assert main(f"train --resume runs/a {more}".split()) == 0
    rows = read_metrics("runs/a").set_index("step")
    assert rows.index.tolist() == [0, 1, 2, 3, 4]
    assert rows["learning_rate"][4] == pytest.approx(0.003) and rows["temperature"][
        4
    ] == pytest.approx(0.7)
    assert not same(weights("runs/a"), shorter)
    assert same(load_file("runs/a/redone/model/model.safetensors"), shorter), "nothing is lost"
    assert json.loads(Path("runs/a/results.json").read_text())["steps"] == 4


def test_a_task_that_is_gone_or_another_is_asked_for(here, capsys):
    assert (
        main(["train", "my_task.py", *TRAINED, "--set", "steps=1", "--folder", "runs/a"]) == 0
    )
    text = Path("my_task.py").read_text()
    os.rename("my_task.py", "moved.py")
    for words in (
        "evaluate runs/a",
        "chat runs/a hello",
        "export runs/a out",
        "train --resume runs/a",
    ):
        assert main(words.split()) == 2
        assert "which is not there: give --task my_task.py" in capsys.readouterr().err
    assert main("evaluate runs/a --task moved.py".split()) == 0
    assert main("train moved.py --resume runs/a".split()) == 0
    Path("my_task.py").write_text(text.replace("Speak.", "Speak up."))
    assert main("evaluate runs/a".split()) == 2
    assert "is not the one that runs/a was begun with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "where, act",
    [
        ("task.py", None),  # as it was: it is run
        ("run/task.py", None),
        ("run/below/task.py", None),
        ("other/task.py", None),  # another's run folder
        ("task.py", lambda path, known: path.write_text(path.read_text() + "\n# another")),
        ("task.py", lambda path, known: known.pop("sha256")),
        ("task.py", lambda path, known: known.update(sha256=None)),
        ("task.py", lambda path, known: known.update(file=["no text"])),
        ("task.py", lambda path, known: path.rename(path.with_name("elsewhere.py"))),
        (
            "run/link.py",
            lambda path, known: (
                path.rename("out.py") and path.symlink_to(Path("out.py").absolute())
            ),
        ),
        (
            "link.py",
            lambda path, known: (
                path.rename("run/out.py") and path.symlink_to(Path("run/out.py").absolute())
            ),
        ),
    ],
)
def test_a_file_is_run_only_where_the_run_noted_it_and_in_no_run_folder(
    where, act, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "other"):
        Path(name).mkdir()
        Path(name, "run.json").write_text("{}")
    path = tmp_path / where
    path.parent.mkdir(exist_ok=True)
    made = "import grpo_kit as kit\nopen('ran', 'a').close()\ntask = kit.tasks.largest(n_train=4, n_held_out=2)\n"
    path.write_text(made)
    task = grpo_kit.tasks.from_file(path)
    model, _ = grpo_kit.load_policy("tiny-random", quiet=True)
    config = grpo_kit.preset("smoke").with_task(task)
    kept = run_settings.settings_of(model, task, config, [1.0], "adamw", None) | {"notes": {}}
    if act:
        act(path, kept["task"])
    Path("run/run.json").write_text(json.dumps(kept))
    Path("ran").unlink()
    if (where, act) == ("task.py", None):
        assert Job.of_run(Path("run")).task.train == task.train and Path("ran").exists()
        return
    with pytest.raises(
        ValueError, match="the task of run was made by .*: give --task my_task.py"
    ):
        Job.of_run(Path("run"))
    assert not Path("ran").exists()
    Path("given.py").write_text(made)
    assert Job.of_run(Path("run"), "given.py").task.train == task.train


def test_a_stop_before_the_first_step_is_done_begins_it_again(here, monkeypatch, capsys):
    from grpo_kit.loop.grpo import Loop

    plain = Loop.roll_out
    monkeypatch.setattr(
        Loop, "roll_out", lambda *given: os.kill(os.getpid(), signal.SIGINT) or plain(*given)
    )
    assert main(["train", "my_task.py", *TRAINED, "--folder", "runs/a"]) == 130
    assert "Stopped before the first step" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert main("train --resume runs/a".split()) == 0
    assert main(["train", "my_task.py", *TRAINED, "--folder", "runs/b"]) == 0
    assert same(weights("runs/a"), weights("runs/b"))


def test_a_stop_after_the_training_is_made_up(here, monkeypatch, capsys):
    plain, calls = grpo_kit.evaluate, []

    def stopped(*given, **how):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(*given, **how)

    monkeypatch.setattr(grpo_kit, "evaluate", stopped)
    assert main(["train", "my_task.py", *TRAINED, "--folder", "runs/a"]) == 130
    assert (
        "Stopped while it was evaluated. To go on: grpo-kit train --resume runs/a"
        in capsys.readouterr().err
    )
    trained = weights("runs/a")
    assert not Path("runs/a/after.json").exists()
    assert main("train --resume runs/a".split()) == 0
    assert same(weights("runs/a"), trained) and Path("runs/a/results.json").is_file()


def test_one_process_at_a_time_trains_into_a_folder(here, capsys):
    from grpo_kit.record._run_folder import GOING, is_locked

    assert (
        main(["train", "my_task.py", *TRAINED, "--set", "steps=1", "--folder", "runs/a"]) == 0
    )
    code = "import pathlib; from grpo_kit.record._run_folder import alone\n"
    code += "with alone(pathlib.Path('runs/a')): print('has it', flush=True), input()"
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "env": ENVIRONMENT,
    }
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        other.stdout.readline()
        assert main("train --resume runs/a".split()) == 2
        assert "another process" in capsys.readouterr().err
        other.communicate("\n")
    assert is_locked(Path("runs/a")) is None and not Path("runs/a", GOING).exists()


def test_the_best_evaluations_weights_are_the_model(here, monkeypatch):
    values = iter([0.1, 0.7, 0.4])
    monkeypatch.setattr(
        grpo_kit.HeldOut, "measure", lambda self, *given: {self.judged_by: next(values)}
    )
    assert main(["train", "my_task.py", *TRAINED, "--keep", "best", "--folder", "runs/a"]) == 0
    assert json.loads(Path("runs/a/results.json").read_text())["weights_of_step"] == 2
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert main(["train", "my_task.py", *TRAINED, "--folder", "runs/b"]) == 0
    assert not same(weights("runs/a"), weights("runs/b"))


def test_a_tracker_sees_the_run(here):
    assert (
        main(
            [
                "train",
                "my_task.py",
                *TRAINED,
                "--report-to",
                "tensorboard",
                "--folder",
                "runs/a",
            ]
        )
        == 0
    )
    assert any(Path("runs/a").rglob("events.out.*"))
