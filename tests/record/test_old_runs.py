"""Run folders and exports that an earlier version of the kit left are opened and read; their weights train on."""

import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import grpo_kit as kit
from grpo_kit.record.files import run_settings

OLD = Path(__file__).parent.parent / "fixtures" / "runs_of_a4fe91f.tar.xz"


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(OLD) as archive:
        archive.extractall(folder, filter="data")
    return folder


def letters(completions, **columns):
    """The share of letters: the runs' one reward."""
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]


@pytest.mark.parametrize("name", ["largest_lora", "events_lora"])
def test_its_records_are_read(old, name):
    folder = old / "runs" / name
    metrics, completions = kit.read_metrics(folder), kit.read_completions(folder)
    assert metrics["step"].tolist() == [1, 2] and metrics["temperature"].tolist() == [1.2, 0.8]
    assert completions.groupby("step").size().tolist() == [8, 8]
    assert completions["reward"].groupby(completions["step"]).mean().tolist() == pytest.approx(
        metrics["reward"].tolist(), abs=1e-6
    )
    assert run_settings(folder)["reward_parts"] == ["letters"]
    kit.plot_run(folder)
    assert "tiny-random" in kit.model_card(folder).read_text()


def test_its_weights_train_on_in_a_new_folder(old, tmp_path):
    folder = Path(shutil.copytree(old / "runs" / "largest_lora", tmp_path / "run"))
    task = kit.tasks.largest(n_train=8, n_held_out=8)
    task = replace(task, rewards=[letters], reward_weights=[1.0])
    small = {"prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 12}
    config = kit.Config(steps=1, learning_rate=1e-2, warmup=0, **small)
    last = folder / "checkpoint-2"
    model, tokenizer = kit.load_policy(last, tuning="lora", quiet=True)
    here = kit.GRPOTrainer(model, task, config, tokenizer=tokenizer, folder=folder, live=None)
    with pytest.raises(ValueError, match="by an earlier version of the kit.*from its weights: load_policy"):
        here.train(resume=True)
    with pytest.raises(ValueError, match="already holds a run"):
        here.train()
    trained = load_file(last / "adapter_model.safetensors")
    assert all(torch.equal(p, trained[name.replace(".default", "")]) for name, p in here.trained.items())
    new = kit.GRPOTrainer(model, task, config, tokenizer=tokenizer, folder=tmp_path / "new", live=None)
    new.train()
    moved = max((p - trained[name.replace(".default", "")]).abs().max() for name, p in new.trained.items())
    assert new.step == 1 and moved > 1e-3 and kit.read_metrics(folder)["step"].tolist() == [1, 2]


def test_a_task_under_its_old_name_is_todays():
    task = kit.tasks.events(n_train=8, n_held_out=8)  # a task file of before says so
    assert task.name == "interval_scheduling" and kit.preset("smoke", task="events").task == task.name


def test_its_export_is_loaded_and_talked_to(old):
    folder = old / "exports" / "largest_adapter"
    model, _ = kit.load_policy(str(folder), quiet=True)
    trained = load_file(old / "runs" / "largest_lora" / "checkpoint-2" / "adapter_model.safetensors")
    saved = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], trained[name]) for name in trained) and model is not None
    assert isinstance(kit.chat(str(folder)).ask("Which number is the largest: 4, 19, 7?"), dict)
