"""A notebook's cells, `grpo-kit train` and scripts/train.py end in the same weights; the script for TRL runs."""

import os
import re
import shutil
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import load_file
from task_file import written

import grpo_kit as kit
from grpo_kit.__main__ import main
from grpo_kit.record.files import read_completions, read_metrics

ROOT = Path(kit.__file__).parents[1]
# else two small steps of a tiny model could pass for none
LEARNS = {"steps": 3, "learning_rate": 1e-2}


def weights(folder):
    return load_file(Path(folder) / "model" / "model.safetensors")


def distance(a, b):
    """The largest relative distance of two models' weights."""
    return max(float((a[name] - b[name]).norm() / a[name].norm()) for name in a)


def base():
    tuned = kit.load_policy("tiny-random", quiet=True)[0].state_dict()
    return {name: value for name, value in tuned.items() if name != "lm_head.weight"}


def changed(script, folder):
    """The script as somebody changes it: a task of their own, and two numbers."""
    text = (ROOT / "scripts" / script).read_text()
    for old, new in (
        ("task = config.make_task()", 'task = kit.tasks.from_file("my_task.py")'),
        (
            "config = kit.preset(arguments.preset, ",
            "config = kit.preset(arguments.preset, steps=3, learning_rate=1e-2, ",
        ),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    written(folder)
    (folder / script).write_text(text)


def started(*words, cwd, count=1, **environment):
    """Python in so many processes, of which each is told what torchrun tells it. Returns what they printed."""
    port = str(31500 + os.getpid() % 2000)
    many = (
        {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if count > 1
        else {}
    )
    ranks = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank)} if many else {} for rank in range(count)
    ]
    environment |= os.environ | many
    children = [forked.start(*words, cwd=cwd, environment=environment | rank) for rank in ranks]
    out, errors = map("".join, zip(*[child.communicate() for child in children], strict=True))
    assert not any(child.returncode for child in children), out[-2000:] + errors[-4000:]
    return out


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums in another order end in other weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The weights that the command ends in."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    numbers = [word for name, value in LEARNS.items() for word in ("--set", f"{name}={value}")]
    assert (
        main(["train", "my_task.py", "--preset", "smoke", *numbers, "--folder", "runs/command"])
        == 0
    )
    return weights("runs/command")


def test_the_three_doors_end_in_the_same_weights(command, tmp_path):
    # the notebook's cells
    cfg = kit.preset("smoke", seed=0, **LEARNS)
    torch.manual_seed(cfg.seed)
    task = kit.tasks.from_file("my_task.py")
    model, tokenizer = kit.load_policy(
        cfg.model, tuning=cfg.tuning, dtype=cfg.dtype, quiet=True
    )
    kit.readiness(
        model, tokenizer, task, rows=task.train[:4], samples=4, group_size=4, quiet=True
    )
    before = kit.evaluate(model, tokenizer, task, batch_size=cfg.eval_batch)
    held_out = kit.HeldOut(task, rows=min(64, len(task.held_out)), every=8)
    trainer = kit.GRPOTrainer(
        model, task, cfg, tokenizer=tokenizer, folder="runs/notebook",
        held_out=held_out, live=None,
    )  # fmt: skip
    trainer.train()
    notebook = weights(trainer.save_model("runs/notebook/model").parent)

    changed("train.py", tmp_path)
    out = started("train.py", "--preset", "smoke", "--folder", "runs/script", cwd=tmp_path)
    script = weights("runs/script")
    assert distance(base(), command) > 1e-3, "they learn"
    for name in command:
        assert torch.equal(command[name], notebook[name]) and torch.equal(
            command[name], script[name]
        ), name
    folders = ["runs/command", "runs/notebook", "runs/script"]
    texts = [read_completions(folder)["completion"].tolist() for folder in folders]
    assert texts[0] == texts[1] == texts[2]
    comparison = kit.compare(before, kit.evaluate(model, tokenizer, task))
    assert (
        comparison.sentence in out
        and comparison.sentence in Path("runs/script/README.md").read_text()
    )
    assert comparison.sentence in Path("runs/command/README.md").read_text()
    assert Path("runs/script/results.json").read_text() and "Before: " in out


def test_the_script_goes_on_to_the_same_weights(command, tmp_path):
    changed("train.py", tmp_path)
    script = tmp_path / "train.py"
    plain = script.read_text()
    stop = "\n\nclass Stop(kit.Hook):\n    def after_step(self, trainer, row, batch):\n        if trainer.step == 1:\n"
    stop += (
        "            raise KeyboardInterrupt\n\n\ntrainer.hooks.append(Stop())\nfrom_main = "
    )
    script.write_text(plain.replace("\nfrom_main = ", stop))
    with pytest.raises(AssertionError, match="Stopped after step 1 of 3"):
        started("train.py", "--preset", "smoke", "--folder", "runs/a", cwd=tmp_path)
    script.write_text(plain)
    started("train.py", "--preset", "smoke", "--folder", "runs/a", "--resume", cwd=tmp_path)
    assert distance(command, weights("runs/a")) == 0


@pytest.mark.parametrize("door", ["command", "script"])
def test_two_processes_train_the_weights_of_one(door, command, tmp_path):
    """Up to the rounding of sums. One of them measures, writes and speaks."""
    changed("train.py", tmp_path)
    if door == "script":
        out = started(
            "train.py", "--preset", "smoke", "--folder", "runs/two", cwd=tmp_path, count=2
        )
    else:
        numbers = [
            word for name, value in LEARNS.items() for word in ("--set", f"{name}={value}")
        ]
        asked = ["train", "my_task.py", "--preset", "smoke", *numbers, "--folder", "runs/two"]
        out = started("-m", "grpo_kit", *asked, cwd=tmp_path, count=2)
        again = started(
            "-m", "grpo_kit", "train", "--resume", "runs/two", cwd=tmp_path, count=2
        )
        assert again.count("The model is in runs/two/model") == 1, (
            "a run that is done is done under several too"
        )
    assert (
        len(re.findall(r"The model is in \S*runs/two/model", out)) == 1
        and out.count("Before: ") == 1
    )
    assert out.count("step 3/3") == 1
    assert read_metrics("runs/two")["step"].tolist() == [0, 1, 2, 3]
    assert read_completions("runs/two").groupby("step").size().tolist() == [8] * 3, (
        "as many as in one process"
    )
    assert distance(base(), command) > 1e-3 and distance(command, weights("runs/two")) < 1e-4


def test_a_red_flag_ends_all_processes_and_the_first_one_says_it(tmp_path):
    words = "train --preset smoke --set steps=20 --on-flag stop --held-out-every 0 --folder runs/a".split()
    with pytest.raises(AssertionError) as stop:
        started("-m", "grpo_kit", *words, cwd=tmp_path, count=2)
    assert str(stop.value).count("grpo-kit train: ") == 1 and "red flag: cut off" in str(
        stop.value
    )
    folder = tmp_path / "runs/a"
    assert (
        0 < (step := read_metrics(folder)["step"].max()) < 20
        and (folder / f"checkpoint-{step}").is_dir()
    )
    assert (folder / "README.md").is_file() and not (folder / "control").exists(), (
        "its hooks have ended"
    )


def test_trl_trains_the_same_task_in_two_processes(tmp_path):
    """As docs/cards.md says it; each process has half of a step's completions."""
    pytest.importorskip("trl")
    changed("train_trl.py", tmp_path)
    words = ["train_trl.py", "--preset", "smoke", "--folder", "runs/trl"]
    # as accelerate's launcher says it
    out = started(*words, cwd=tmp_path, count=2, ACCELERATE_USE_CPU="true")
    assert out.count("'rewards/letters/mean'") == 3, "a line a step, of one process"
    assert distance(base(), weights(tmp_path / "runs/trl")) > 1e-3
    model, tokenizer = kit.load_policy(tmp_path / "runs/trl/model", quiet=True)
    assert kit.evaluate(model, tokenizer, kit.tasks.from_file(tmp_path / "my_task.py")).n == 4
    shutil.rmtree(tmp_path / "runs")
