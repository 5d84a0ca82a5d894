"""Run folders and exports that an earlier version of the kit left are opened, read and gone on with."""

import shutil
import tarfile
from dataclasses import replace
from importlib.metadata import version
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


def goes_on(folder, task, steps):
    """The trainer of a run's make.py, with today's names."""
    task = replace(task, rewards=[letters], reward_weights=[1.0])
    sizes = {"n_train": 8, "n_held_out": 8}
    cfg = kit.profile("smoke", task=task.name, task_options=sizes, steps=steps, max_completion_tokens=12)
    lora = {"r": 2, "target_modules": ["q_proj"]}
    model, tokenizer = kit.load_policy("tiny-random", tuning="lora", lora=lora, quiet=True)
    args = cfg.grpo_config(str(folder), task=task, tuning="lora")
    args.save_steps, args.save_strategy = 1, "steps"
    options = {"processing_class": tokenizer, "live": None, "temperature": kit.linear(1.2, 0.8)}
    return kit.GRPOTrainer(model, task, args, **options)


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


def test_it_goes_on_to_where_the_old_code_got(old, tmp_path):
    folder = Path(shutil.copytree(old / "runs" / "largest_lora", tmp_path / "run"))
    trainer = goes_on(folder, kit.tasks.largest(n_train=8, n_held_out=8), 3)
    trainer.train(resume_from_checkpoint=True)
    trainer.model.save_pretrained(tmp_path / "end")
    got = load_file(tmp_path / "end" / "adapter_model.safetensors")
    wanted = load_file(old / "runs" / "largest_lora_at_step_3.safetensors")
    before = load_file(old / "runs" / "largest_lora" / "checkpoint-2" / "adapter_model.safetensors")
    assert got.keys() == wanted.keys()
    moved = max((wanted[name] - before[name]).abs().max() for name in wanted)
    apart = max((got[name] - wanted[name]).abs().max() for name in wanted)
    assert moved > 1e-3 and kit.read_metrics(folder)["step"].tolist() == [1, 2, 3]
    # Other versions draw other tokens; these are those that the runs were made with.
    made_with = run_settings(old / "runs" / "largest_lora")["versions"]
    if all(version(name) == made_with[name] for name in ("torch", "transformers", "trl")):
        assert apart < 1e-6


def test_a_task_under_its_old_name_goes_on(old, tmp_path):
    folder = Path(shutil.copytree(old / "runs" / "events_lora", tmp_path / "run"))
    task = kit.tasks.events(n_train=8, n_held_out=8)  # a task file of before says so
    assert task.name == "interval_scheduling" and kit.profile("smoke", task="events").task == task.name
    trainer = goes_on(folder, task, 3)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


def test_its_export_is_loaded_and_talked_to(old):
    folder = old / "exports" / "largest_adapter"
    model, _ = kit.load_policy(str(folder), quiet=True)
    trained = load_file(old / "runs" / "largest_lora" / "checkpoint-2" / "adapter_model.safetensors")
    saved = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], trained[name]) for name in trained) and model is not None
    assert isinstance(kit.chat(str(folder)).ask("Which number is the largest: 4, 19, 7?"), dict)
