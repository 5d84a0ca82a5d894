"""The packed update against TRL's own on the same micro-batches: loss, gradient of every parameter, metrics."""

import math

import pytest
import torch
from tiny_run import letters, make, ragged_batch, weights
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations.flex_attention import WrappedFlexAttention
from trl.trainer.utils import split_tensor_dict

from grpo_kit.engine.packing import rows_of
from grpo_kit.models import base_model, load_policy
from grpo_kit.models.renamed import NAME as CHECKPOINTING

LOSSES = ["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(kit, plain) trainers on the same weights, one pair for each tuning and beta; tests set the loss on both."""
    made = {}

    def pair(tuning, beta, **overrides):
        key = (tuning, beta, *overrides.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("pair")
            load_policy("tiny-random", quiet=True)[0].save_pretrained(folder / "model")  # TRL's reference
            made[key] = []
            for which in ("kit", "plain"):
                torch.manual_seed(0)
                lora = {"init_lora_weights": False} if tuning == "lora" else None
                model = load_policy("tiny-random", tuning=tuning, lora=lora, quiet=True)[0]
                model.config._name_or_path = str(folder / "model")
                options = (
                    dict(beta=beta, gradient_accumulation_steps=2, per_device_train_batch_size=6) | overrides
                )
                options.setdefault("num_generations", 4)
                made[key].append(make(which, folder / which, model=model, **options))
        return made[key]

    return pair


def micro_batches(count=2, *, zero=(), **options):
    """A ragged buffer of 12 completions, shuffled and cut as TRL does: groups are split over micro-batches."""
    batch = ragged_batch(**options)
    for row in zero:
        batch["advantages"][row] = 0.0
    return split_tensor_dict(batch, count)


def trl_step(trainer, window):
    trainer.current_gradient_accumulation_steps = len(window)
    trainer.model.train(), trainer.model.zero_grad(), trainer._metrics["train"].clear()
    total = 0.0
    for i, micro in enumerate(window):
        trainer.accelerator.gradient_state._set_sync_gradients(i == len(window) - 1)
        loss = trainer._compute_loss(trainer.model, dict(micro))
        loss.backward()
        total += loss.item()
    return total, gradients_of(trainer), {k: v for k, v in trainer._metrics["train"].items()}


def kit_step(trainer, window):
    trainer.current_gradient_accumulation_steps = len(window)
    trainer.model.train(), trainer.model.zero_grad(), trainer._metrics["train"].clear()
    total = 0.0
    for i, micro in enumerate(window):
        trainer.accelerator.gradient_state._set_sync_gradients(i == len(window) - 1)
        loss = trainer.compute_loss(trainer.model, micro)
        loss.backward()
        total += loss.item()
    return total, gradients_of(trainer), {k: v for k, v in trainer._metrics["train"].items()}


def gradients_of(trainer):
    return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def assert_same(kit, plain, *, metrics=True):
    loss, gradients, logged = kit
    wanted_loss, wanted, wanted_logged = plain
    assert math.isclose(loss, wanted_loss, rel_tol=1e-4, abs_tol=1e-6)
    assert gradients.keys() == wanted.keys() and len(wanted) > 2
    for name, gradient in wanted.items():
        error = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-8)
        assert error < 1e-4, (name, error)
    if metrics:
        for name, values in wanted_logged.items():
            assert logged[name] == pytest.approx(values, rel=1e-3, abs=1e-5, nan_ok=True), name


@pytest.mark.parametrize("old", [False, True], ids=["iteration 1", "iteration 2"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_gradient_and_metrics_are_trls(pairs, loss_type, level, tuning, beta, old):
    """Ragged lengths, a masked truncated completion, groups split over micro-batches and over chunks."""
    kit, plain = pairs(tuning, beta)
    for trainer in (kit, plain):
        trainer.loss_type, trainer.importance_sampling_level = loss_type, level
    kit.update.memory.chunk_tokens = 24  # several chunks, no group whole
    window = micro_batches(with_old=old, with_ref=beta > 0)
    wanted = trl_step(plain, window)
    assert_same(kit_step(kit, window), wanted)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_who_differentiates_trls_loss_itself_has_trls_graph(pairs, checkpointing):
    """A subclass that calls _compute_loss and its own backward or autograd.grad: outside of the packed step."""
    kit, plain = pairs("full", 0.0)
    window = micro_batches()
    wanted = trl_step(plain, window)
    if checkpointing:
        getattr(kit.model, f"{CHECKPOINTING}_enable")({"use_reentrant": False})
    try:
        assert_same(trl_step(kit, window), wanted)
        kit.model.zero_grad()
        weight = kit.model.get_output_embeddings().weight
        (gradient,) = torch.autograd.grad(kit._compute_loss(kit.model, dict(window[0])), [weight])
        assert weight.grad is None and gradient.norm() > 0
    finally:
        getattr(kit.model, f"{CHECKPOINTING}_disable")()


@pytest.mark.parametrize("chunk_tokens", [1, 40, None])
def test_any_chunk_size_gives_the_same_gradient(pairs, chunk_tokens):
    kit, plain = pairs("full", 0.0)
    for trainer in (kit, plain):
        trainer.loss_type, trainer.importance_sampling_level = "bnpo", "token"
    kit.update.memory.chunk_tokens = chunk_tokens
    window = micro_batches()
    assert_same(kit_step(kit, window), trl_step(plain, window))


@pytest.mark.parametrize(
    "options",
    [
        {"entropy_coef": 0.3},
        {"top_entropy_quantile": 0.5},
        {"use_adaptive_entropy": True, "entropy_target": 20.0, "entropy_coef": 0.1},
        {"delta": 1.5, "mask_truncated_completions": True},
        {"off_policy_mask_threshold": 0.01},
        {"temperature": 0.7},
    ],
    ids=lambda o: next(iter(o)),
)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_other_terms_of_the_loss(pairs, options, loss_type):
    kit, plain = pairs("full", 0.0, **options)
    for trainer in (kit, plain):
        trainer.loss_type = loss_type
        if "entropy_coef" in options:
            trainer._last_world_entropy, trainer.entropy_coef = 1.0, options["entropy_coef"]
    kit.update.memory.chunk_tokens = 24
    window = micro_batches(with_old=True)
    wanted = trl_step(plain, window)
    assert_same(kit_step(kit, window), wanted)
    if options.get("use_adaptive_entropy"):
        assert kit.entropy_coef == plain.entropy_coef != options["entropy_coef"]
        assert kit._last_world_entropy == pytest.approx(plain._last_world_entropy)


def test_two_passes_draw_the_same_dropout(tmp_path):
    """With an entropy bonus the scores are computed twice: adapters must drop the same values both times."""
    torch.manual_seed(0)
    lora = {"lora_dropout": 0.5, "init_lora_weights": False}
    model = load_policy("tiny-random", tuning="lora", lora=lora, quiet=True)[0]
    kit = make("kit", tmp_path, model=model, entropy_coef=0.3, per_device_train_batch_size=12)
    kit._last_world_entropy = 1.0
    (micro,) = micro_batches(1)
    torch.manual_seed(5)
    got = kit_step(kit, [micro])[1]
    torch.manual_seed(5)
    kit.model.zero_grad()
    ids, mask = (
        torch.cat([micro[f"prompt_{what}"], micro[f"completion_{what}"]], 1) for what in ("ids", "mask")
    )
    width = micro["completion_ids"].size(1)
    with kit.update.memory.attention_of(kit.model):  # one pass: everything in one graph
        known = kit.update._forward(kit.model, rows_of(ids, mask, width), width)
        kit.update.loss(kit.model, micro, *known).backward()
    assert_same((0.0, got, {}), (0.0, gradients_of(kit), {}))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_zero_advantages_are_skipped_and_change_nothing(pairs, loss_type):
    kit, plain = pairs("full", 0.0)
    for trainer in (kit, plain):
        trainer.loss_type, trainer.importance_sampling_level = loss_type, "token"
    kit.update.memory.chunk_tokens = None
    window = micro_batches(zero=(0, 3, 4, 9), with_old=True)
    seen = count_tokens(kit)
    assert_same(kit_step(kit, window), trl_step(plain, window), metrics=False)
    assert kit.update.skipped == pytest.approx(4 / 12)
    rows = [int(m["completion_mask"][i].sum()) for m in window for i in range(6) if m["advantages"][i] != 0]
    assert sum(seen) == sum(rows)


def count_tokens(trainer):
    """Scored tokens of every packed forward from now on."""
    seen, inner = [], trainer.update._label_logprobs

    def label_logprobs(model, ids, mask, positions, labels):
        seen.append(int((labels != -100).sum()))
        return inner(model, ids, mask, positions, labels)

    trainer.update._label_logprobs = label_logprobs
    return seen


@pytest.mark.parametrize(
    "options",
    [{"beta": 0.1}, {"entropy_coef": 0.3}, {"top_entropy_quantile": 0.5}],
    ids=lambda o: next(iter(o)),
)
def test_nothing_is_skipped_where_it_would_change_the_gradient(pairs, options):
    kit, plain = pairs("full", options.get("beta", 0.0), **{k: v for k, v in options.items() if k != "beta"})
    for trainer in (kit, plain):
        trainer.loss_type, trainer.importance_sampling_level = "grpo", "token"
        trainer._last_world_entropy = 1.0
    window = micro_batches(zero=(0, 3, 4, 9), with_ref="beta" in options)
    assert_same(kit_step(kit, window), trl_step(plain, window))
    assert kit.update.skipped == 0


def test_a_step_without_any_advantage_still_moves_the_weights_by_momentum(tmp_path):
    """TRL's gradient is then zero, not missing: Adam's momentum and weight decay act."""
    flat = lambda completions, **_: [1.0] * len(completions)  # noqa: E731

    def switching(completions, trainer_state=None, **columns):
        return letters(completions) if trainer_state.global_step == 0 else flat(completions)

    ends = []
    for which in ("kit", "plain"):
        options = {"kit": {"rollout": "hf"}} if which == "kit" else {}
        trainer = make(which, tmp_path / which, rewards=switching, max_steps=3, weight_decay=0.1, **options)
        trainer.train()
        ends.append(weights(trainer))
    start = weights(make("plain", tmp_path / "start"))
    moved = max((ends[0][n] - start[n]).abs().max().item() for n in start)
    apart = max((ends[0][n] - ends[1][n]).abs().max().item() for n in start)
    assert moved > 0.02 and apart < 0.1 * moved


def test_one_forward_gives_the_old_scores_of_the_second_iteration(tmp_path):
    """num_iterations 2 without a pass for the old log-probabilities; the weights are those of plain TRL."""
    common = dict(optim="sgd", learning_rate=1.0, max_steps=4, num_iterations=2)
    trainers = {}
    for which in ("kit", "plain"):
        options = {"kit": {"rollout": "hf"}} if which == "kit" else {}
        trainers[which] = make(which, tmp_path / which, **common, **options)
        if which == "kit":
            forwards = count_tokens(trainers[which])
        trainers[which].train()
    kit, plain = trainers["kit"], trainers["plain"]
    assert len(forwards) == 4, "one forward a step and none besides"
    for (name, a), b in zip(kit.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_halves_the_chunk_and_loses_nothing(pairs, where, capsys):
    kit, plain = pairs("full", 0.0)
    for trainer in (kit, plain):
        trainer.loss_type, trainer.importance_sampling_level = "dapo", "token"
    kit.update.memory.chunk_tokens = None
    window = micro_batches()
    limit, inner = 40, kit.update._label_logprobs

    def small_card(model, ids, mask, positions, labels):
        logprobs, entropies = inner(model, ids, mask, positions, labels)
        full = torch.OutOfMemoryError("CUDA out of memory")
        if ids.numel() > limit:
            if where == "forward":
                raise full
            kit.model.model.embed_tokens.weight.grad = torch.ones_like(kit.model.model.embed_tokens.weight)

            def fail(gradient):
                raise full

            logprobs.register_hook(fail)
        return logprobs, entropies

    kit.update._label_logprobs = small_card
    try:
        got = kit_step(kit, window)
    finally:
        kit.update._label_logprobs = inner
    assert_same(got, trl_step(plain, window))
    assert "the step starts over" in capsys.readouterr().out
    assert kit.update.memory.chunk_tokens <= limit


def test_out_of_memory_at_the_smallest_chunk_says_what_to_do(pairs, monkeypatch):
    kit, _ = pairs("lora", 0.0)

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kit.update, "_label_logprobs", full)
    with pytest.raises(torch.OutOfMemoryError, match="plan_memory"):
        kit_step(kit, micro_batches())
    assert kit.update.memory.checkpointed_layers == 2  # it tried that first


def test_checkpointing_some_layers_changes_nothing(pairs):
    kit, plain = pairs("full", 0.0)
    for trainer in (kit, plain):
        trainer.loss_type, trainer.importance_sampling_level = "dapo", "token"
    kit.update.memory.chunk_tokens = None
    window = micro_batches()
    calls, layers = [], base_model(kit.model).model.layers
    for layer in layers:
        inner = layer.mlp.forward
        layer.mlp.forward = lambda x, inner=inner: calls.append(1) or inner(x)
    budget = kit.update.memory._budget

    def one_layer(*sizes):
        return budget(*sizes)[0], 1

    kit.update.memory._budget = one_layer
    try:
        got = kit_step(kit, window)
    finally:
        del kit.update.memory._budget
        for layer in layers:
            del layer.mlp.forward
    assert_same(got, trl_step(plain, window))
    assert len(calls) == len(layers) + 1, "one layer was computed again"


def test_training_ends_in_the_same_weights_as_plain_trl(tmp_path):
    """On trl's own rollouts, so that both draw the same tokens."""
    # At Adam's first steps a rounding error can flip the sign of a tiny gradient, so plain SGD.
    common = dict(optim="sgd", learning_rate=1.0, max_steps=3)
    trainers = []
    for which in ("kit", "plain"):
        options = {"kit": {"rollout": "hf"}} if which == "kit" else {}
        trainers.append(make(which, tmp_path / which, **common, **options))
        trainers[-1].train()
    kit, plain = trainers
    for (name, a), b in zip(kit.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name
    rewards = [[r["reward"] for r in t.state.log_history if "reward" in r] for t in (kit, plain)]
    assert rewards[0] == rewards[1]


def test_flex_attention_gives_the_same_gradient(pairs, monkeypatch):
    """All groups in one row under a block mask, by FlexAttention's reference (its CUDA kernel is not run here)."""
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    kit, plain = pairs("full", 0.0)
    for trainer in (kit, plain):
        trainer.loss_type, trainer.importance_sampling_level = "dapo", "token"
    kit.update.memory.chunk_tokens = 60
    monkeypatch.setattr(kit.update.memory, "attention", "flex_attention")
    window = micro_batches()
    assert_same(kit_step(kit, window), trl_step(plain, window))
    assert kit.update.memory.attention == "flex_attention"
    assert base_model(kit.model).config._attn_implementation == "sdpa"


def test_where_flex_attention_fails_the_dense_mask_takes_over(pairs, monkeypatch, capsys):
    kit, plain = pairs("full", 0.0)
    for trainer in (kit, plain):
        trainer.loss_type, trainer.importance_sampling_level = "dapo", "token"
    kit.update.memory.chunk_tokens = None
    monkeypatch.setattr(kit.update.memory, "attention", "flex_attention")  # has no backward on a CPU
    window = micro_batches()
    assert_same(kit_step(kit, window), trl_step(plain, window))
    assert kit.update.memory.attention == "sdpa" and "using SDPA" in capsys.readouterr().out
