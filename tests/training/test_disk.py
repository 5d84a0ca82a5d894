"""A disk too small for a run's checkpoints is said before the first step; a checkpoint takes what is said."""

from types import SimpleNamespace

import pytest
from tiny_run import make

from grpo_kit.models import load_policy
from grpo_kit.training import disk
from grpo_kit.training.disk import checkpoint_bytes


@pytest.mark.parametrize(
    ("tuning", "dtype", "optimizer"),
    [
        ("full", "bfloat16", "adamw-8bit-split"),
        ("full", "float32", "adamw"),
        ("full", "float32", "adamw-8bit"),
        ("full", "float32", None),
        ("lora", "bfloat16", None),
    ],
)
def test_a_checkpoint_takes_what_is_said(tmp_path, tuning, dtype, optimizer):
    model = load_policy("tiny-random", tuning=tuning, dtype=dtype, quiet=True)[0]
    how = dict(max_steps=1, save_strategy="steps", save_steps=1)
    trainer = make("kit", tmp_path, model=model, kit={"optimizer": optimizer} if optimizer else None, **how)
    trainer.train()
    saved = tmp_path / "checkpoint-1"
    files = [file for file in saved.iterdir() if file.suffix == ".safetensors" or file.stem == "optimizer"]
    size = sum(file.stat().st_size for file in files)
    said = checkpoint_bytes(trainer.model, trainer.optimizer_name, trainer.args.optim.value)
    assert len(files) == 2 and said == pytest.approx(size, rel=0.02, abs=60_000)  # and what names the tensors


@pytest.mark.parametrize(
    ("free", "save_steps", "limit", "more"),
    [
        (1.9, 1, 1, 2),  # the next is written before the last goes
        (2.0, 1, 1, None),
        (3.9, 1, None, 4),
        (0.9, 0, None, 1),  # where it is stopped
        (1.0, 0, None, None),
        (1.0, 4, None, None),
    ],
)
def test_a_small_disk_is_said_before_the_first_step(tmp_path, monkeypatch, free, save_steps, limit, more):
    """Of 4 steps; free: in checkpoints, each 4 bytes of weight and 8 of moments a parameter."""
    how = {"save_strategy": "steps", "save_steps": save_steps} if save_steps else {}
    heard = []

    def letters(completions, **columns):
        heard.append(len(completions))
        return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]

    trainer = make("kit", tmp_path, rewards=letters, save_total_limit=limit, **how)
    one = checkpoint_bytes(trainer.model, None, "adamw_torch")
    assert one == 12 * trainer.model.num_parameters()
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free * one)))
    lines = []
    monkeypatch.setattr(trainer.session.recorder, "say", lambda line: lines.append((line, len(heard))))
    trainer.train()
    found = [(line, when) for line, when in lines if line.startswith("The disk of")]
    assert len(found) == (more is not None)
    for line, when in found:
        assert f"{more} more will lie there at a time" in line and when == 0
