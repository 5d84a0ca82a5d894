"""Unsloth beside the kit: what it would change silently is seen, said, or undone.

The last tests run Unsloth itself, in an environment of its own: KIT_UNSLOTH_PYTHON names that environment's Python.
"""

import json
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
from loop_runs import make, record
from transformers.models.llama.modeling_llama import LlamaAttention

import grpo_kit.unsloth as unsloths
from grpo_kit.engine.fast import fast
from grpo_kit.loop import Config
from grpo_kit.models import load_policy
from grpo_kit.tasks import largest
from grpo_kit.unsloth import replaced_layers

ROOT = Path(__file__).parent.parent
THEIRS = os.environ.get("KIT_UNSLOTH_PYTHON")


# ---- imported too late ----------------------------------------------------------------------------------------------


ORDERS = {
    "import unsloth, grpo_kit; grpo_kit.load_policy('tiny-random', quiet=True)": False,
    "import grpo_kit, unsloth; grpo_kit.load_policy('tiny-random', quiet=True)": False,
    "from grpo_kit import load_policy; import unsloth; load_policy('tiny-random', quiet=True)": True,
}
EACH = """
import os, sys
import peft, torch  # what takes long to load is there; nothing of the kit is
from transformers import AutoTokenizer, LlamaForCausalLM
for number, code in enumerate(sys.argv[2:]):
    if not os.fork():
        os.dup2(os.open(f"{sys.argv[1]}/{number}.txt", os.O_CREAT | os.O_WRONLY), 2)
        exec(code)
        os._exit(0)
    assert os.wait()[1] == 0, open(f"{sys.argv[1]}/{number}.txt").read()
"""


def test_it_is_said_where_unsloth_comes_after_what_the_kit_loads(tmp_path):
    (tmp_path / "unsloth.py").write_text("")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", EACH, str(tmp_path), *ORDERS], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    for number, (code, said) in enumerate(ORDERS.items()):
        errors = (tmp_path / f"{number}.txt").read_text()
        assert ("unsloth was imported after grpo_kit" in errors) is said, code + errors


def test_data_say_it_too(monkeypatch, smol_tokenizer):
    monkeypatch.setitem(sys.modules, "unsloth", types.ModuleType("unsloth"))
    task = largest(n_train=4, n_held_out=1)
    with pytest.warns(RuntimeWarning, match="imported after grpo_kit.*`import unsloth` as its first line"):
        task.dataset(smol_tokenizer)
    monkeypatch.setattr(unsloths, "_CAME_FIRST", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task.dataset(smol_tokenizer)


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


def test_such_a_model_trains_by_the_plain_ways_and_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(LlamaAttention, "forward", as_unsloths(LlamaAttention.forward))
    rows = {}
    for seams in ("plain", "fast"):
        trainer = make(tmp_path / seams, seams=seams, steps=2)
        trainer.train()
        rows[seams] = record(trainer.folder)
    assert rows["plain"] == rows["fast"]
    assert (
        "the engine cannot sample: Unsloth replaced its LlamaAttention"
        in fast(trainer.model, Config()).why_not
    )


# ---- Unsloth itself, in its own environment -------------------------------------------------------------------------


@pytest.mark.skipif(not THEIRS, reason="KIT_UNSLOTH_PYTHON names the Python of an environment with Unsloth")
@pytest.mark.parametrize("order, generate", [("first", False), ("late", False), ("first", True)])
def test_tasks_and_rewards_train_beside_unsloth(order, generate, tmp_path):
    """On a CPU: Unsloth's models and imports, TRL's trainer or the one Unsloth generates, two steps on a tiny model."""
    script = [THEIRS, str(Path(__file__).with_name("unsloth_run.py")), order, *["generate"] * generate]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("FOUND "))
    assert bool(found["late"]) is (order == "late"), found
    assert found["trainer"] == ("UnslothGRPOTrainer" if generate else "GRPOTrainer")
    assert found["replaced"] and found["loop_steps"] == 2, found
    assert found["steps"] == 2 and found["grad_norm"] > 0, found
    assert {"rewards/exact_answer/mean", "rewards/soft_format/mean"} <= set(found["rewards"])
    assert found["rewards"]["rewards/soft_format/mean"] == 0.25
