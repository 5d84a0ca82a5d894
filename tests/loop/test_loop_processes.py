"""Several processes end in the weights of one: rows by rank, gradients added up, the main one writes."""

import json
import os
from pathlib import Path

import few_words
import forked
import pytest
import torch
from loop_runs import make, record, weights

from grpo_kit.loop.processes import Processes

CODE = """
import sys, json
sys.path.insert(0, {tests!r})
import torch; torch.set_num_threads(1)
from loop_runs import make, weights
trainer = make({folder!r}, seams="fast", prompts_per_step=4, **{options!r})
for steps in {lengths!r}:
    trainer.config.steps = steps
    trainer.train()
if trainer.processes.is_main:
    torch.save(weights(trainer), {folder!r} + ".weights")
assert all(torch.equal(a, b) for a, b in [(p, q) for p, q in zip(
    *[[w.float() for w in one.values()] for one in trainer.processes.gather(weights(trainer))])])
"""


def two(folder, lengths=(4,), count=2, **options):
    """Two processes as torchrun starts them; the first's weights."""
    code = CODE.format(
        tests=str(Path(__file__).parents[1]),
        folder=str(folder),
        options=options,
        lengths=lengths,
    )
    started(code, count)
    return torch.load(f"{folder}.weights")


def started(code, count=2):
    """Run the code in so many processes, to a good end."""
    port = str(29500 + os.getpid() % 2000)
    many = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    children = [
        forked.start("-c", code, environment=os.environ | many | {"RANK": str(rank)})
        for rank in range(count)
    ]
    assert [child.wait(timeout=180) for child in children] == [0] * count, [
        c.text("err") for c in children
    ]


def close(one, other):
    """Up to the order in which gradients are added: Adam turns the rounding of a tiny gradient into a step."""
    far = [
        (one[name].double() - other[name].double()).abs().max().item()
        for name in other
        if "/" not in name
    ]
    return max(far)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": "batch", "iterations": 2, "beta": 0.04, "loss": "grpo"},
        {"older": {"sync_every": 3}},
    ],
)
def test_two_processes_end_in_the_weights_of_one(tmp_path, options):
    one = make(tmp_path / "one", seams="fast", prompts_per_step=4, **options)
    one.train()
    found = two(tmp_path / "two", **options)
    moved = close(weights(make(tmp_path / "none")), weights(one))
    assert close(found, weights(one)) < 0.02 * moved
    rows, completions = record(tmp_path / "two")
    assert [c["completion"] for c in completions] == [
        c["completion"] for c in record(one.folder)[1]
    ]
    for row, wanted in zip(rows, record(one.folder)[0], strict=True):
        assert row.keys() == wanted.keys()
        for name in (
            "reward",
            "reward_std",
            "loss",
            "grad_norm",
            "num_tokens",
            "entropy",
            "clip_ratio",
        ):
            assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), name


def test_two_processes_go_on_after_all_steps_and_save_once(tmp_path):
    two(tmp_path / "run", lengths=(2, 4), save_steps=2)
    rows, _ = record(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[2]["changes"] == {
        "steps": [2, 4]
    }
    assert json.loads((tmp_path / "run/checkpoint-4/run_state.json").read_text())["step"] == 4


def test_alone_everything_is_its_own_and_a_step_that_cannot_be_shared_is_refused(monkeypatch):
    alone = Processes(3, torch.device("cpu"))
    assert (
        alone.is_main
        and alone.share([1, 2, 3]) == [1, 2, 3]
        and alone.sums({"a": 2.0}) == {"a": 2.0}
    )
    assert alone.gather("x") == ["x"] and alone.from_main(lambda: 7) == 7
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    assert Processes(4, torch.device("cpu")).share([1, 2, 3, 4]) == [3, 4]
    with pytest.raises(
        ValueError, match="prompts_per_step=3 must be a multiple of the 2 processes"
    ):
        Processes(3, torch.device("cpu"))


@pytest.mark.parametrize(
    "options, says",
    [
        ({"minibatches": 2}, "minibatches with 2 processes is another run"),
        ({"minibatches": 4, "iterations": 2}, "minibatches with 2 .* give minibatches=1"),
        ({"dynamic_sampling": 1}, "dynamic_sampling with 2 processes is another run"),
        (
            {"dynamic_sampling": 3, "seams": "fast"},
            "dynamic_sampling with 2 .* dynamic_sampling=0 .* or start one process",
        ),
        ({"lora": {"lora_dropout": 0.1}}, "dropout with 2 processes is another run"),
        (
            {"minibatches": 2, "dynamic_sampling": 1},
            "minibatches, dynamic_sampling with 2 processes",
        ),
        ({"attention_dropout": 0.2}, "dropout with 2 .* dropouts of 0"),
    ],
)
def test_what_would_be_another_run_is_refused_before_the_first_step(
    options, says, tmp_path, monkeypatch
):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    lora, dropout = options.pop("lora", None), options.pop("attention_dropout", 0.0)
    model = few_words.policy("lora" if lora else "full", **(lora or {}))[0]
    model.config.attention_dropout = dropout
    with pytest.raises(ValueError, match=says):
        make(tmp_path / "run", model=model, prompts_per_step=4, **options)
    assert not (tmp_path / "run").exists()


STANDARD = """
import sys
sys.path.insert(0, {tests!r})
import torch; torch.set_num_threads(1)
import grpo_kit as kit
from loop_runs import letters, task
model, tokenizer = kit.load_policy("tiny-random", quiet=True)
seen = []
class See(kit.Hook):
    def after_step(self, trainer, row, batch):
        seen.append(len(batch))
        trainer.save()
config = kit.Config(steps=2, prompts_per_step=2, group_size=4)
trainer = kit.GRPOTrainer(model, task(), config, tokenizer=tokenizer, folder={folder!r}, live=None, hooks=[See()])
trainer.train()
assert seen == ([8, 8] if trainer.processes.is_main else [])
"""


def test_hooks_of_two_processes_see_the_whole_step_and_may_save(tmp_path):
    """The standard trainer with its measures and red flags; a button or a clock asks for a checkpoint."""
    code = STANDARD.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path / "run"))
    started(code)
    assert "diversity/distinct_2" in record(tmp_path / "run")[0][-1]
    assert (tmp_path / "run/checkpoint-2/run_state.json").exists()
