"""What a newcomer meets: a cell that fails, an engine that is not there, steps without a signal, a missing template."""

import json
import shutil

import pytest
import torch
from accelerate.state import AcceleratorState
from tiny_run import make, settings, tiny

from grpo_kit.exports.template import render
from grpo_kit.prompts import NO_TEMPLATE, PromptError, build_prompt
from grpo_kit.recipe import Recipe
from grpo_kit.record.files import read_metrics
from grpo_kit.rewards import NumericAnswer
from grpo_kit.tasks import from_rows, gsm8k
from grpo_kit.training import checkpoints

WORKED = [{"question": f"{n} and 1?", "answer": f"Add <<{n}+1={n + 1}>>.\n#### {n + 1}"} for n in range(10)]


def test_a_cell_that_fails_leaves_the_trainer_before_it_whole(tmp_path):
    trainer = make("kit", tmp_path / "first", max_steps=1)
    settings(tmp_path / "second").device  # noqa: B018  empties accelerate's state
    with pytest.raises(ValueError, match="keep='nothing'"):
        make("kit", tmp_path / "second", kit={"keep": "nothing"})
    assert not AcceleratorState._shared_state
    trainer.train()
    assert trainer.state.global_step == 1
    settings(tmp_path / "third").device  # noqa: B018
    trainer.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("pack", [True, False])
def test_a_step_without_a_signal_has_its_entropy(tmp_path, pack):
    same = lambda completions, **_: [0.5] * len(completions)  # noqa: E731
    trainer = make(
        "kit",
        tmp_path / "run",
        rewards=same,
        max_steps=1,
        kit={"rollout": "hf", "pack": pack},
        temperature=0.7,
    )
    kept, inner = [], trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (kept.append(inputs), inner(model, inputs))[1]
    trainer.train()
    batch = kept[0]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():  # the weights have not moved: no signal
        logits = trainer.model.eval()(input_ids=ids, attention_mask=mask).logits
    width = batch["completion_ids"].size(1)
    logp = (logits[:, -width - 1 : -1] / 0.7).log_softmax(-1)
    by_hand = (-(logp.exp() * logp).sum(-1) * batch["completion_mask"]).sum() / batch["completion_mask"].sum()
    assert read_metrics(tmp_path / "run")["entropy"].iloc[0] == pytest.approx(by_hand.item(), abs=2e-3)
    assert by_hand > 1


@pytest.mark.parametrize("given", [{"kit": {"rollout": "vllm"}}, {"use_vllm": True}])
def test_vllm_that_is_not_there_is_said_alike(tmp_path, given, monkeypatch):
    monkeypatch.setattr("grpo_kit.training.checks.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vllm is not installed; `pip install \"grpo-kit\[vllm\]\"`"):
        make("kit", tmp_path / "run", **given)


def test_a_recipe_refuses_an_engine_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr("grpo_kit.training.checks.find_spec", lambda name: None)
    for given in ({"options": {"rollout": "vllm"}}, {"config": {"use_vllm": True}}):
        with pytest.raises(ValueError, match="vllm is not installed"):
            Recipe("largest", profile="smoke", **given)
    with pytest.raises(ValueError, match="torch_compile=True .* rollout='hf' and pack=False"):
        Recipe("largest", profile="smoke", config={"torch_compile": True})


def test_torch_compile_is_refused_beside_the_kits_own_ways(tmp_path):
    for kit in ({}, {"rollout": "hf"}, {"rollout": "kit", "pack": False}):
        with pytest.raises(ValueError, match="torch_compile=True"):
            make("kit", tmp_path / "run", torch_compile=True, kit=kit)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.timeout(300)  # 40 s where nothing is in torch's cache of compiled code, else 5 s
def test_what_the_refusal_recommends_trains_as_without_torch_compile(tmp_path):
    found, kinds = {}, []
    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        how = {"rollout": "hf", "pack": False}
        trainer = make("kit", folder, max_steps=2, torch_compile=compiled, kit=how)
        trainer.train()
        kinds.append(type(trainer.model_wrapped).__name__)
        found[compiled] = read_metrics(folder)[["loss", "grad_norm", "entropy", "reward"]].to_numpy()
    assert kinds == ["LlamaForCausalLM", "OptimizedModule"], "else nothing was compiled"
    assert found[True].shape == (2, 4) and found[True] == pytest.approx(found[False], abs=1e-3)
    assert (found[True][:, 1] > 0.1).all(), "there was something to learn"


def test_one_message_for_a_tokenizer_without_a_template(tmp_path):
    tokenizer = tiny()[1]
    tokenizer.chat_template = None
    for ask in (lambda: build_prompt(tokenizer, "1 + 1?"), lambda: render(tokenizer, "1 + 1?")):
        with pytest.raises(PromptError) as error:
            ask()
        assert str(error.value) == NO_TEMPLATE
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(8)]
    with pytest.raises(ValueError) as error:
        make("kit", tmp_path / "run", dataset=rows, chat_template=None)
    assert str(error.value) == f"train_dataset row 0: {NO_TEMPLATE}"


def test_a_checkpoint_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    part, target, seen = tmp_path / ".saving" / "checkpoint-1", tmp_path / "checkpoint-1", []
    part.mkdir(parents=True)
    (part / "weights").write_text("w")
    sync = checkpoints._sync
    monkeypatch.setattr(
        checkpoints, "_sync", lambda path: (seen.append((path.name, target.exists())), sync(path))
    )
    checkpoints._move(part, target)
    assert seen == [("weights", False), ("checkpoint-1", False), (tmp_path.name, True)]


@pytest.mark.parametrize(("number", "raises"), [(22, False), (13, False), (5, True), (28, True)])
def test_a_file_system_that_refuses_to_sync_is_no_error_and_a_full_disk_is(
    tmp_path, monkeypatch, number, raises
):
    def refuse(handle):
        raise OSError(number, "refused")

    monkeypatch.setattr(checkpoints.os, "fsync", refuse)
    if raises:
        with pytest.raises(OSError, match="refused"):
            checkpoints._sync(tmp_path)
    else:
        checkpoints._sync(tmp_path)


def test_worked_solutions_as_answers_are_said_with_what_reads_them():
    with pytest.raises(ValueError, match="answer_after='####'"):
        from_rows("mine", WORKED, reward=NumericAnswer())
    task = from_rows("mine", WORKED, reward=NumericAnswer(), answer_after="####")
    assert task.train[0]["answer"] == "1" and task.train[0]["solution"] == "Add <<0+1=1>>."
    with pytest.raises(ValueError, match=r"train row 0.*nothing stands behind answer_after='@@'"):
        from_rows("mine", WORKED, reward=NumericAnswer(), answer_after="@@")


def test_gsm8k_of_one_file(tmp_path):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text("\n".join(map(json.dumps, WORKED)))
    other.write_text("\n".join(map(json.dumps, WORKED[8:])))
    with pytest.raises(ValueError, match="all of its 10 questions are in held_out=.*held_out='train'"):
        gsm8k(train=one, held_out=one)
    task = gsm8k(train=one, held_out="train")
    assert [row["answer"] for row in task.held_out] == ["5", "10"] and len(task.train) == 8
    with pytest.warns(UserWarning, match="2 of 10 train questions are left out"):
        assert len(gsm8k(train=one, held_out=other).train) == 8
