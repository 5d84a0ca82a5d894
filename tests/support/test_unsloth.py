"""Unsloth beside the kit: what it would change silently is seen, said, or undone.

The last tests run Unsloth itself, in an environment of its own: KIT_UNSLOTH_PYTHON names that environment's Python.
"""

import dataclasses
import json
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import forked
import pytest
import trl
from loop_runs import make, same, task, weights
from transformers.models.llama.modeling_llama import LlamaAttention

import grpo_kit as kit
import grpo_kit._support.unsloth as unsloths
from grpo_kit._support.unsloth import changed_defaults, replaced_layers
from grpo_kit.models import load_policy
from grpo_kit.tasks import largest

ROOT = Path(__file__).parents[2]
THEIRS = os.environ.get("KIT_UNSLOTH_PYTHON")


# ---- imported too late ----------------------------------------------------------------------------------------------


ORDERS = {
    "import unsloth, grpo_kit; grpo_kit.load_policy('tiny-random', quiet=True)": False,
    "import grpo_kit, unsloth; grpo_kit.load_policy('tiny-random', quiet=True)": False,
    "from grpo_kit import load_policy; import unsloth; load_policy('tiny-random', quiet=True)": True,
}


def test_it_is_said_where_unsloth_comes_after_what_the_kit_loads(tmp_path):
    (tmp_path / "unsloth.py").write_text("")
    for code, said in ORDERS.items():
        done = forked.bare().run(
            "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"
        )
        assert not done.returncode, done.stderr
        assert ("unsloth was imported after grpo_kit" in done.stderr) is said, (
            code + done.stderr
        )


def test_data_and_models_say_it_too(monkeypatch, smol_tokenizer):
    monkeypatch.setitem(sys.modules, "unsloth", types.ModuleType("unsloth"))
    with pytest.warns(RuntimeWarning, match="`import unsloth` as its first line"):
        largest(n_train=4, n_held_out=1).dataset(smol_tokenizer)
    with pytest.warns(RuntimeWarning, match="imported after grpo_kit"):
        load_policy("tiny-random", quiet=True)
    monkeypatch.setattr(unsloths, "_CAME_FIRST", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        largest(n_train=4, n_held_out=1).dataset(smol_tokenizer)


# ---- a model whose layers it replaced -------------------------------------------------------------------------------


def as_unsloths(function, module="unsloth.models.llama"):
    def forward(*args, **kwargs):
        return function(*args, **kwargs)

    forward.__module__ = module
    return forward


def test_replaced_layers_are_found_in_classes_instances_and_its_compiled_modules(monkeypatch):
    model = load_policy("tiny-random", tuning="lora", quiet=True)[0]
    assert replaced_layers(model) is None
    with monkeypatch.context() as patch:
        patch.setattr(LlamaAttention, "forward", as_unsloths(LlamaAttention.forward))
        assert replaced_layers(model) == "LlamaAttention"
    layer = model.get_base_model().model.layers[1].mlp
    for module in ("unsloth.kernels.fast_lora", "unsloth_compiled_module_llama"):
        layer.forward = as_unsloths(type(layer).forward.__get__(layer), module)
        assert replaced_layers(model) == "LlamaMLP"


def test_such_a_model_trains_the_plain_way_and_a_line_says_so(
    monkeypatch, tmp_path, capsys, tiny
):
    plain = make(tmp_path / "plain", steps=2)
    plain.train()
    monkeypatch.setattr(LlamaAttention, "forward", as_unsloths(LlamaAttention.forward))
    config = kit.Config(**plain.config.values())
    model, tokenizer = tiny
    trainer = kit.GRPOTrainer(
        model, task(), config, tokenizer=tokenizer, folder=tmp_path / "kit", live=False
    )
    trainer.train()
    assert (
        "plain way is taken, since the engine cannot sample: Unsloth replaced its LlamaAttention"
        in (capsys.readouterr().out)
    )
    assert same(weights(trainer), weights(plain))


# ---- its config -----------------------------------------------------------------------------------------------------


def unsloths_config():
    """As Unsloth makes it: a subclass of the same name, with an __init__ of its own defaults."""

    @dataclasses.dataclass
    class Unsloths(trl.GRPOConfig):
        def __init__(
            self,
            output_dir=None,
            weight_decay=0.001,
            seed=3407,
            beta=None,
            max_grad_norm=1.0,
            chunks=-1,
            **rest,
        ):
            given = {"weight_decay": weight_decay, "seed": seed, "max_grad_norm": max_grad_norm}
            super().__init__(output_dir, beta=0.001 if beta is None else beta, **given, **rest)

    Unsloths.__name__ = "GRPOConfig"
    return Unsloths


def test_defaults_that_were_changed_are_trls_again(monkeypatch, tmp_path, tiny):
    assert changed_defaults(trl.GRPOConfig) == {}
    config = unsloths_config()
    own = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    changed = {"weight_decay": own.weight_decay, "seed": own.seed, "beta": own.beta}
    assert changed_defaults(config) == changed, "and nothing that is the same in both"
    silent = config(str(tmp_path), use_cpu=True, bf16=False)
    assert (silent.weight_decay, silent.beta, silent.seed) == (0.001, 0.001, 3407)
    monkeypatch.setattr("grpo_kit.more.bridges.trl.GRPOConfig", config)
    model, tokenizer = tiny
    made = kit.to_trl(
        task(), kit.Config(steps=1, seed=5), model, tokenizer, tmp_path, use_cpu=True
    ).args
    assert type(made) is config and (made.weight_decay, made.beta, made.seed) == (
        own.weight_decay,
        0.0,
        5,
    )
    assert made.max_grad_norm == 1.0 and made.vllm_mode == own.vllm_mode
    given = {"weight_decay": 0.1, "use_cpu": True}
    made = kit.to_trl(task(), kit.Config(steps=1), model, tokenizer, tmp_path, **given).args
    assert made.weight_decay == 0.1


# ---- Unsloth itself, in its own environment -------------------------------------------------------------------------


@pytest.mark.skipif(
    not THEIRS, reason="KIT_UNSLOTH_PYTHON names the Python of an environment with Unsloth"
)
@pytest.mark.parametrize(
    "order, generate", [("first", False), ("late", False), ("first", True)]
)
def test_tasks_and_rewards_train_beside_unsloth(order, generate, tmp_path):
    """On a CPU: Unsloth's model in the loop, and by to_trl in TRL's trainer or in Unsloth's; two steps each."""
    script = [
        THEIRS,
        str(ROOT / "tests" / "unsloth_run.py"),
        order,
        *["generate"] * generate,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("FOUND "))
    assert bool(found["late"]) is (order == "late"), found
    assert found["trainer"] == ("UnslothGRPOTrainer" if generate else "GRPOTrainer")
    assert (
        found["loop"]["steps"] == 2 and found["loop"]["grad_norm"] > 0 and found["replaced"]
    ), found
    assert found["steps"] == 2 and found["grad_norm"] > 0 and found["kept"] == [], found
    assert {"rewards/exact_answer/mean", "rewards/soft_format/mean"} <= set(found["rewards"])
    assert found["rewards"]["rewards/soft_format/mean"] == 0.25
    if generate:
        assert {
            "seed",
            "weight_decay",
            "optim",
            "beta",
            "vllm_importance_sampling_correction",
        } <= set(found["changed"])
