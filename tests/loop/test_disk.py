"""A disk too small for a run's checkpoints is said before the first step; a checkpoint takes what is said."""

import warnings
from types import SimpleNamespace

import pytest
from loop_runs import make, task

from grpo_kit.loop import run_checks
from grpo_kit.loop.protocols import Hook
from grpo_kit.loop.run_checks import checkpoint_bytes
from grpo_kit.models import load_policy


@pytest.mark.parametrize(
    ("tuning", "dtype", "optimizer"),
    [
        ("full", "bfloat16", "adamw-8bit-split"),
        ("full", "float32", "adamw"),
        ("full", "float32", "adamw-8bit"),
        ("lora", "bfloat16", "adamw"),
    ],
)
def test_a_checkpoint_takes_what_is_said(tmp_path, tuning, dtype, optimizer):
    model = load_policy("tiny-random", tuning=tuning, dtype=dtype, quiet=True)[0]
    trainer = make(tmp_path / "run", model=model, optimizer=optimizer, steps=1, save_steps=1)
    trainer.train()
    saved = tmp_path / "run/checkpoint-1"
    files = [
        file
        for file in saved.iterdir()
        if file.suffix == ".safetensors" or file.stem == "optimizer"
    ]
    size = sum(file.stat().st_size for file in files)
    said = checkpoint_bytes(trainer.model, trainer.optimizer_name)
    # and what names the tensors
    assert len(files) == 2 and said == pytest.approx(size, rel=0.02, abs=60_000)


@pytest.mark.parametrize(
    ("free", "save_steps", "limit", "more"),
    [
        (1.9, 1, 1, 2),  # the next is written before the last goes
        (2.0, 1, 1, None),
        (3.9, 1, 9, 4),
        (0.9, 0, 1, 1),  # where it is stopped
        (1.0, 0, 1, None),
        (1.0, 4, 1, None),
    ],
)
def test_a_small_disk_is_said_before_the_first_step(
    tmp_path, monkeypatch, free, save_steps, limit, more
):
    """Of 4 steps; free: in checkpoints, each 4 bytes of weight and 8 of moments a parameter."""
    trainer = make(tmp_path / "run", task=task(), save_steps=save_steps, save_total_limit=limit)
    one = checkpoint_bytes(trainer.model, "adamw")
    assert one == 12 * trainer.model.num_parameters()
    monkeypatch.setattr(
        run_checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free * one))
    )
    found = []

    class Look(Hook):
        def before_step(self, trainer):
            found.append(
                [str(one.message) for one in caught if "The disk of" in str(one.message)]
            )

    trainer.hooks.append(Look())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert len(found[0]) == len(found[-1]) == (more is not None)
    assert all(f"{more} more will lie there at a time" in line for line in found[0])
