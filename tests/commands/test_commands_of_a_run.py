"""evaluate, readiness, export, chat and watch, on runs of a tiny model: what they print is what the library finds."""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import few_words
import pytest
from task_file import COOLING, TRAINED, written

import grpo_kit as kit
from grpo_kit.__main__ import main
from grpo_kit.evaluation.accuracy import Evaluation
from grpo_kit.models import load_policy
from grpo_kit.more.lab._job import Job, model_in
from grpo_kit.record._run_folder import GOING, MARK, alone
from grpo_kit.record.files import read_metrics
from grpo_kit.watch._run_state import RunState
from grpo_kit.watch.terminal import Lines, where_it_is


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs `full` and `lora`."""
    folder = tmp_path_factory.mktemp("runs")
    words = [
        "train",
        str(written(folder)),
        *TRAINED,
        *COOLING,
        "--set",
        "learning_rate=0.1",
        "--folder",
    ]
    assert main([*words, str(folder / "full")]) == 0
    assert (
        main(
            [
                *words,
                str(folder / "lora"),
                "--tuning",
                "lora",
                "--rank",
                "2",
                "--set",
                "steps=2",
            ]
        )
        == 0
    )
    return folder


@pytest.fixture
def here(runs, monkeypatch, tmp_path):
    monkeypatch.chdir(runs)
    monkeypatch.delenv("KIT_PROFILE", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["full", "lora"])
def test_evaluate_asks_base_and_tuned(name, here, capsys):
    assert main(["evaluate", name, "--samples", "2", "--examples", "1"]) == 0
    out = capsys.readouterr().out
    before, after = (
        Evaluation.load(Path(name) / which) for which in ("before.json", "after.json")
    )
    assert kit.compare(before, after).sentence in out and "pass@2" in out and "of each" in out
    assert before.rows["completion"].tolist() != after.rows["completion"].tolist(), (
        "else nobody sees them swapped"
    )
    assert main(["evaluate", name, "--rows", "2"]) == 0
    assert ", n = 2, " in capsys.readouterr().out


def test_readiness_ends_in_1_where_something_has_to_change(here, capsys):
    file = written(here)
    text = file.read_text()
    file.write_text(text.replace("reward=letters", "reward=kit.rewards.ExactAnswer()"))
    smoke = ["--preset", "smoke"]
    assert main(["readiness", str(file), *smoke, "--rows", "4", "--samples", "4"]) == 1
    out = capsys.readouterr().out
    assert "CHANGE SOMETHING FIRST  format first" in out and out.count("So: ") == 1
    assert (
        main(
            [
                "readiness",
                str(file),
                *smoke,
                "--rows",
                "6",
                "--samples",
                "4",
                "--seconds",
                "0.001",
            ]
        )
        == 1
    )
    assert "Only 2 of 6 rows were asked" in capsys.readouterr().out
    file.write_text(text)
    assert main(["readiness", str(file), *smoke, "--rows", "4", "--samples", "4"]) == 0
    assert "GO  ready: the mean reward is" in capsys.readouterr().out, (
        "its reward differs, whatever is exact"
    )
    file.write_text(text.replace('max_completion_tokens=6', 'max_completion_tokens=6, correct=sometimes').replace(
        "def is_even(text, row):\n    return bool(text)", "def sometimes(text, row):\n    return len(text) % 2 == 0"
    ) + "\nfrom dataclasses import replace\ntask = replace(task, read_answer=lambda text, prefill: text)\n"
    )  # fmt: skip
    assert main(["readiness", str(file), *smoke, "--rows", "8"]) == 0
    assert "tiny-random on words: GO  ready" in capsys.readouterr().out


def test_export_writes_what_was_trained_and_chat_asks_it(here, capsys, read_here):
    assert main(["export", "lora", str(here / "merged"), "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "merged, f16" in out and "as in training" in out
    report = json.loads((here / "merged" / "export.json").read_text())
    assert report["sampling"]["temperature"] == pytest.approx(0.8), "the schedule's last"
    assert "Before and after" in (here / "merged" / "README.md").read_text()
    assert main(["export", "lora", str(here / "merged")]) == 1
    assert "not empty" in capsys.readouterr().err
    assert main(["export", "full", str(here / "adapter"), "--format", "adapter"]) == 1
    assert "all its weights were trained" in capsys.readouterr().err

    assert main(["chat", "full", "Say 3 words", "--base"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    said = dict(line.split(": ", 1) for line in lines)
    assert (
        first
        == f"full is the trained model: full/model, trained from {few_words.folder()} on words."
    )
    task = Job.of_run(Path("full")).task
    model, tokenizer = load_policy("full/model", quiet=True)
    expected = kit.chat(model, tokenizer, task=task).ask("Say 3 words")["tuned"]
    assert said["tuned"] == expected and said["base"].startswith("<answer>")
    assert main(["chat", str(here / "merged"), "Say 3 words", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("<answer>")


def test_chat_asks_line_by_line(here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say 3 words\n\n"))
    assert main(["chat", "full", "--tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert "at most 2 tokens" in out and out.count("<answer>") == 1


def test_a_notebooks_run_says_its_task_itself(here, capsys, tmp_path):
    cfg = kit.preset("smoke", steps=1)
    model, tokenizer = load_policy("tiny-random", quiet=True)
    short = cfg.make_task()
    trainer = kit.GRPOTrainer(
        model, short, cfg, tokenizer=tokenizer, folder=tmp_path / "notebook", live=None
    )
    trainer.train()
    run = str(tmp_path / "notebook")
    assert main(["evaluate", run]) == 2
    assert "no model and no checkpoint" in capsys.readouterr().err
    trainer.save_model(f"{run}/model")
    assert main(["evaluate", run]) == 0
    assert "on largest" in capsys.readouterr().out
    told = json.loads((tmp_path / "notebook" / "run.json").read_text())
    told["config"]["task"] = None  # one that was made by hand
    (tmp_path / "notebook" / "run.json").write_text(json.dumps(told))
    assert main(["evaluate", run]) == 2
    assert "is nowhere in its run.json: give --task my_task.py" in capsys.readouterr().err
    assert main(["evaluate", run, "--task", "largest"]) == 0
    del told["notes"]
    (tmp_path / "notebook" / "run.json").write_text(json.dumps(told))
    assert main(["evaluate", run, "--task", "largest"]) == 2
    assert "cannot be read (it has no 'notes')" in capsys.readouterr().err


def test_a_reward_that_changes_the_working_directory_moves_no_file(
    tmp_path, monkeypatch, capsys
):
    """Relative names, and every call of the reward leaves the folder: all files lie where they were asked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    file = written(tmp_path)
    leaves = f"    __import__('os').chdir({str(tmp_path / 'elsewhere')!r})\n    return ["
    file.write_text(file.read_text().replace("    return [", leaves, 1))
    assert main(["train", "my_task.py", *TRAINED, "--folder", "runs/mine"]) == 0
    assert "Try it: grpo-kit chat runs/mine" in capsys.readouterr().out
    assert Path.cwd().name == "elsewhere" and not list(Path.cwd().iterdir())
    there = {path.name for path in (tmp_path / "runs/mine").iterdir()}
    assert {
        "before.json",
        "after.json",
        "results.json",
        "model",
        "README.md",
        "metrics.jsonl",
    } <= there
    for words in (
        ["evaluate", "runs/mine", "--rows", "2"],
        ["export", "runs/mine", "made", "--rows", "2"],
    ):
        monkeypatch.chdir(tmp_path)
        assert main(words) == 0, capsys.readouterr().err
    assert "Before and after" in (tmp_path / "made/README.md").read_text()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_damaged_model_of_a_run_is_refused_by_every_command(here, runs, tmp_path, capsys):
    """One changed byte of the weights, which load all the same."""
    run = shutil.copytree(runs / "full", tmp_path / "run")
    path = run / "model/model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-99] + bytes([data[-99] ^ 64]) + data[-98:])
    for words in (
        ["evaluate", str(run)],
        ["export", str(run), "made"],
        ["chat", str(run), "hello"],
    ):
        assert main(words) == 2
        assert (
            "model.safetensors holds other bytes than were written" in capsys.readouterr().err
        )


def test_a_half_trained_run_is_its_checkpoint(here, tmp_path, capsys):
    assert (
        main(
            [
                "train",
                "--preset",
                "smoke",
                "--set",
                "save_steps=1",
                "--folder",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    for name in ("model", "after.json", "results.json"):
        os.rename(tmp_path / "run" / name, tmp_path / name)
    place, what = model_in(tmp_path / "run")
    assert place.name == "checkpoint-2" and "half trained" in what
    assert main(["chat", str(tmp_path / "run"), "hello"]) == 0
    assert "half trained: the checkpoint of step 2" in capsys.readouterr().out


# ---- watch ----------------------------------------------------------------------------------------------------------


def test_watch_tells_a_run_that_is_done(here, capsys):
    assert main(["watch", "full", "--last", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = read_metrics("full").set_index("step")
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == [
        "step 3/4",
        "step 4/4",
    ]
    (last,) = [line for line in lines if line.startswith("step 4/4")]
    assert (
        f"reward {rows['reward'][4]:.2f} ±" in last and "held-out accuracy 0% (step 4)" in lines
    )
    assert (
        lines[-1].startswith("Done after 4 steps: ")
        and "mean reward" in lines[-1]
        and "n = 4" in lines[-1]
    )


def lines_of_steps(run):
    """The lines of metrics.jsonl of each step that was trained, as they were written."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    steps = [
        [line for line in lines if json.loads(line)["step"] == step] for step in range(1, 5)
    ]
    return ["".join(step) for step in steps]


def copied(run, folder):
    """A folder that says of itself what the run's does; its rows."""
    folder.mkdir(exist_ok=True)
    shutil.copy(run / "run.json", folder / "run.json")
    return lines_of_steps(run)


def rows_are(folder, *rows):
    """metrics.jsonl as far as a run has come."""
    (folder / "metrics.jsonl").write_text("".join(rows))


def test_watch_follows_what_is_written_and_ends_with_the_run(runs, tmp_path):
    folder = tmp_path / "run"
    rows = copied(runs / "full", folder)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(kit.__file__).parents[1]),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "grpo_kit", "watch", str(folder), "--every", "0.05"]
    said = []
    with alone(folder):
        watching = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        reading = threading.Thread(target=lambda: said.extend(watching.stdout), daemon=True)
        reading.start()

        def waits_for(what):
            for _ in range(1200):
                if any(what in line for line in said):
                    return
                assert watching.poll() is None, said
                time.sleep(0.05)
            raise AssertionError((what, said))

        rows_are(folder, rows[0], rows[1][:20])  # a row that is not whole
        waits_for("step 1/4")
        rows_are(folder, *rows[:2])
        waits_for("step 2/4")
        flag = {"name": "odd", "step": 2, "saw": "a thing", "why": "It is.", "first": "another"}
        (folder / "flags.jsonl").write_text(json.dumps(flag) + "\n")
        waits_for("Red flag: odd since step 2: a thing")
        changed = json.loads(rows[2].splitlines()[0]) | {
            "changes": {"learning_rate": [1, 0.5], "steps": [4, 6]}
        }
        changed.pop("line_crc32")  # of the line as it was
        rows_are(folder, *rows[:2], json.dumps(changed) + "\n")
        waits_for("step 3/6")
        waits_for("From step 3: learning_rate")
        assert where_it_is(folder) == ("It goes on, after step 3 of 6.", False)
    watching.wait(timeout=30)
    reading.join(timeout=10)
    assert sum("step 2/4" in line for line in said) == 1, "each step once"
    assert said[-1].startswith("Stopped after step 3 of 6. To go on: grpo-kit train --resume")


def test_where_a_run_is_in_a_sentence(runs, tmp_path):
    folder = tmp_path / "run"
    rows = copied(runs / "full", folder)
    with alone(folder):
        assert where_it_is(folder) == ("It has not done its first step yet.", False)
        rows_are(folder, *rows)
        assert where_it_is(folder) == ("Trained for 4 steps; it is being evaluated.", False)
    rows_are(folder, *rows[:2])
    (folder / GOING).write_bytes(MARK)
    killed = (
        "This run stopped when its kernel was restarted or its process killed, at step 2 of 4"
    )
    assert where_it_is(folder)[0].startswith(killed)
    for old in folder.glob("checkpoint-*"):
        shutil.rmtree(old)
    below = RunState.read(folder).stopped
    assert below.startswith(killed) and below.endswith("trainer.train(): no step was saved.")
    (folder / "checkpoint-2").mkdir()
    assert RunState.read(folder).stopped.endswith(
        f"with folder={str(folder)!r}, then trainer.train(resume=True)."
    )
    assert "This run stopped when" in kit.plot_run(folder)._repr_svg_()
    (folder / GOING).unlink()
    settings = json.loads((folder / "run.json").read_text())
    settings["task"]["file"] = None  # a task that a notebook made
    (folder / "run.json").write_text(json.dumps(settings))
    with alone(folder):
        assert where_it_is(folder) == ("It goes on, after step 2 of 4.", False)
        assert RunState.read(folder).stopped == "", "nobody killed it"
    assert where_it_is(folder) == ("Stopped after step 2 of 4.", True)
    rows_are(folder, *rows)
    assert where_it_is(folder) == ("Done after 4 steps.", True)


def test_steps_that_are_done_again_are_told_again(runs, tmp_path):
    rows, lines = copied(runs / "full", tmp_path), Lines(tmp_path, last=10)
    rows_are(tmp_path, *rows[:3])
    assert sum(line.startswith("step") for line in lines.new()) == 3
    rows_are(tmp_path, *rows[:3], '{"resumed_from": 2}\n')
    assert lines.new() == []
    rows_are(tmp_path, *rows[:3], '{"resumed_from": 2}\n', rows[2])
    assert [line.split("  ")[0] for line in lines.new()] == ["step 3/4"]
