"""Who makes completions, how far sampler and trainer are apart, and which optimizer the weights get."""

import json

import pytest
import torch
from tiny_run import difference, interrupted_once, letters, make, weights

from grpo_kit.models import load_policy
from grpo_kit.optim.split_adamw import SplitAdamW8bit


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_sampler_and_trainer_agree_and_the_gap_is_logged(tuning, tmp_path, capsys):
    lora = {"init_lora_weights": False} if tuning == "lora" else None
    trainer = make("kit", tmp_path, tuning=tuning, lora=lora, temperature=0.8, num_iterations=2)
    trainer.train()
    assert trainer.rollout == "kit"
    assert len(logged(trainer, "rollout/logprob_gap")) == 4
    assert max(logged(trainer, "rollout/logprob_gap")) < 1e-5
    assert "differ by" not in capsys.readouterr().out


def test_the_gap_compares_like_with_like_under_top_k(tmp_path):
    """The trainer scores the whole distribution; cutting it off while sampling is no disagreement of the two."""
    trainer = make("kit", tmp_path, top_k=5, repetition_penalty=1.3)
    trainer.train()
    assert max(logged(trainer, "rollout/logprob_gap")) < 1e-5


def test_a_gap_is_said_once(tmp_path, capsys):
    """Dropout in training and none while sampling: two different policies."""
    lora = {"lora_dropout": 0.5, "init_lora_weights": False}
    torch.manual_seed(0)
    model = load_policy("tiny-random", tuning="lora", lora=lora, quiet=True)[0]
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data *= 5
    trainer = make("kit", tmp_path, model=model)
    trainer.train()
    assert max(logged(trainer, "rollout/logprob_gap")) > 0.05
    assert capsys.readouterr().out.count("sampler and trainer differ by") == 1


def test_skipping_changes_neither_weights_nor_metrics(tmp_path):
    def half(completions, answer, **columns):
        """Every second question scores all its completions alike."""
        return [0.5 if int(a) % 2 else s for a, s in zip(answer, letters(completions), strict=True)]

    runs = []
    for skip in (True, False):
        trainer = make(
            "kit",
            tmp_path / str(skip),
            rewards=half,
            kit={"skip_zero_advantage": skip},
            optim="sgd",
            learning_rate=1.0,
        )
        trainer.train()
        runs.append(trainer)
    skipping, whole = runs
    assert sum(logged(skipping, "update/skipped")) > 0 and sum(logged(whole, "update/skipped")) == 0
    assert difference(weights(skipping), weights(whole)) < 1e-5
    for name in ("entropy", "clip_ratio/region_mean", "loss", "grad_norm"):
        assert logged(skipping, name) == pytest.approx(logged(whole, name), rel=1e-3, abs=1e-6), name


def test_hf_is_trls_own_path(tmp_path):
    trainer = make("kit", tmp_path, kit={"rollout": "hf"}, max_steps=1)
    called = []
    inner = trainer.model.generate
    trainer.model.generate = lambda *a, **k: called.append(1) or inner(*a, **k)
    trainer.train()
    assert called and not logged(trainer, "rollout/logprob_gap")


def test_what_the_engine_cannot_do_falls_back_and_says_so(tmp_path, capsys):
    trainer = make("kit", tmp_path, max_steps=2, generation_kwargs={"typical_p": 0.9})
    trainer.train()
    assert trainer.rollout == "hf" and trainer.state.global_step == 2
    assert capsys.readouterr().out.count("rollouts are trl's own") == 1


def test_continuous_is_set_by_name(tmp_path):
    trainer = make("kit", tmp_path, kit={"rollout": "continuous"}, max_steps=1)
    assert trainer.use_transformers_continuous_batching and trainer.rollout == "continuous"


@pytest.mark.parametrize(
    ("rollout", "args", "message"),
    [
        ("turbo", {}, "rollout='turbo' is not known"),
        ("kit", {"use_transformers_continuous_batching": True}, "args ask for 'continuous'"),
        ("vllm", {}, "vllm is not installed"),
    ],
)
def test_refuses(rollout, args, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make("kit", tmp_path, kit={"rollout": rollout}, **args)


def test_bfloat16_weights_get_an_optimizer_that_moves_them(tmp_path, capsys):
    model = load_policy("tiny-random", dtype="bfloat16", quiet=True)[0]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = make("kit", tmp_path, model=model, learning_rate=1e-6, max_steps=3)
    trainer.train()
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert isinstance(inner, SplitAdamW8bit)
    assert capsys.readouterr().out.count("bfloat16 weights: optimizer 'adamw-8bit-split'") == 1
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    masters = {n: inner.master(p) for n, p in trainer.model.named_parameters()}
    assert any((masters[n] - before[n].float()).abs().max() > 1e-7 for n in before)


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_bfloat16_weights_go_on_after_an_interrupt_as_if_there_had_been_none(where, tmp_path):
    """The 16 bits that the optimizer keeps come back with the checkpoint."""

    def trainer(name):
        model = load_policy("tiny-random", dtype="bfloat16", quiet=True)[0]
        return make("kit", tmp_path / name, model=model, learning_rate=1e-5)

    untouched = trainer("a")
    untouched.train()
    stopped = trainer("b")
    assert interrupted_once(stopped, where, at_step=2) == []
    stopped.train(on_stop="return")
    assert stopped.interrupted
    stopped.train(on_stop="return")
    masters = []
    for done in (untouched, stopped):
        inner = getattr(done.optimizer, "optimizer", done.optimizer)
        masters.append([inner.master(p) for p in done.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*masters, strict=True))


def test_float32_weights_and_adapters_keep_the_optimizer_of_args(tmp_path):
    for tuning in ("full", "lora"):
        trainer = make("kit", tmp_path / tuning, tuning=tuning, max_steps=1)
        trainer.train()
        assert isinstance(getattr(trainer.optimizer, "optimizer", trainer.optimizer), torch.optim.AdamW)


def test_two_optimizers_are_refused(tmp_path):
    model = load_policy("tiny-random", quiet=True)[0]
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="both given"):
        make("kit", tmp_path, model=model, kit={"optimizer": "adamw", "optimizers": (mine, None)})


def test_the_run_folder_says_who_sampled_and_which_optimizer(tmp_path):
    make("kit", tmp_path, max_steps=1, kit={"optimizer": "adamw-8bit"}).train()
    config = json.loads((tmp_path / "run.json").read_text())
    assert (config["rollout"], config["optimizer"]) == ("kit", "adamw-8bit")
    make("kit", tmp_path / "b", max_steps=1, optim="sgd").train()
    assert json.loads((tmp_path / "b" / "run.json").read_text())["optimizer"] == "sgd"


def test_an_unknown_optimizer_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="optimizer='adam9' is not known"):
        make("kit", tmp_path, kit={"optimizer": "adam9"})
