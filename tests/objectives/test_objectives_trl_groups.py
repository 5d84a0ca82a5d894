"""Group losses, RLOO and advantages against trl's own trainers on the same batch."""

import few_words
import pytest
import torch
from datasets import Dataset
from loop_runs import letters
from parity import assert_parity, logprobs_of, sharp_model
from plain_trl import make_plain, ragged_batch, settings
from trl import RLOOConfig, RLOOTrainer
from trl.trainer.utils import split_tensor_dict

from grpo_kit.objectives import (
    bnpo,
    cispo,
    clip_fraction,
    dapo,
    dr_grpo,
    group_advantages,
    grpo,
    gspo,
    gspo_token,
    k1,
    k3,
    masked_mean,
    overlong_filter,
    rloo,
    rloo_advantages,
    sequence_ratio,
    token_ratio,
    token_rewards,
    weigh_advantages,
)

EPSILON, EPSILON_HIGH, LONGEST = 0.1, 0.15, 7


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    options = dict(
        per_device_train_batch_size=6, gradient_accumulation_steps=2, num_generations=4
    )
    options |= dict(
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        max_completion_length=LONGEST,
        temperature=0.8,
    )
    return make_plain(folder, model=sharp_model(0), **options)


def score(trainer, micro):
    ids = torch.cat([micro["prompt_ids"], micro["completion_ids"]], 1)
    mask = torch.cat([micro["prompt_mask"], micro["completion_mask"]], 1)
    width = micro["completion_ids"].size(1)
    return logprobs_of(trainer.model, ids, mask, width, temperature=trainer.temperature)


def micro_batches(trainer):
    """Twelve completions of 0 to 7 tokens in two micro-batches; old and reference policies are others."""
    batch, generator = ragged_batch(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        now = score(trainer, batch)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        batch[name] = now + 0.3 * torch.randn(now.shape, generator=generator)
    return split_tensor_dict(batch, 2)


def theirs(trainer, window, loss_type, level, beta, correct_kl=False):
    trainer.args.use_bias_correction_kl = correct_kl
    trainer.loss_type, trainer.importance_sampling_level, trainer.beta = loss_type, level, beta
    trainer.epsilon_high = 1.2 if loss_type == "cispo" else EPSILON_HIGH
    trainer.current_gradient_accumulation_steps = len(window)
    trainer.model.train()
    trainer._metrics["train"].clear()
    return sum(trainer._compute_loss(trainer.model, dict(micro)) for micro in window)


def ours(trainer, window, loss, beta, correct_kl=False, **options):
    total = 0.0
    for micro in window:
        arguments = micro["old_per_token_logps"], micro["advantages"], micro["completion_mask"]
        options |= dict(
            beta=beta, ref_logprobs=micro["ref_per_token_logps"], correct_kl=correct_kl
        )
        total = total + loss(score(trainer, micro), *arguments, **options)
    return total


CLIP = dict(epsilon=EPSILON, epsilon_high=EPSILON_HIGH)
# ours; trl's loss_type and level; options of the two micro-batches; what remains of their sum
CASES = {
    "grpo": (grpo, "grpo", "token", CLIP, 1 / 2),
    "bnpo": (bnpo, "bnpo", "token", CLIP, 1 / 2),
    "dr_grpo": (dr_grpo, "dr_grpo", "token", CLIP | dict(max_completion_tokens=LONGEST), 1 / 2),
    "dapo": (dapo, "dapo", "token", CLIP | dict(num_tokens="all"), 1),
    "cispo": (cispo, "cispo", "token", dict(max_ratio=1.2, num_tokens="all"), 1),
    "gspo": (gspo, "grpo", "sequence", CLIP, 1 / 2),
    # with one advantage a row, gspo's gradient
    "gspo_token": (gspo_token, "grpo", "sequence", CLIP, 1 / 2),
}


@pytest.mark.parametrize(
    ("beta", "correct_kl"),
    [(0.0, False), (0.3, False), (0.3, True)],
    ids=["no KL", "k3", "k3 corrected"],
)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_trls(trainer, name, beta, correct_kl):
    if name == "gspo_token" and correct_kl:
        pytest.skip("trl weighs the KL by gspo's ratio, whose gradient goes to every token")
    loss, loss_type, level, options, share = CASES[name]
    window = micro_batches(trainer)
    if "num_tokens" in options:
        options = options | dict(num_tokens=window[0]["num_items_in_batch"])
    assert_parity(
        trainer.model,
        lambda: theirs(trainer, window, loss_type, level, beta, correct_kl),
        lambda: share * ours(trainer, window, loss, beta, correct_kl, **options),
    )


def test_positives_are_trls_loss_on_weighed_advantages(trainer):
    window = micro_batches(trainer)

    def weighed_grpo(logprobs, old, advantages, mask, **options):
        return grpo(logprobs, old, weigh_advantages(advantages, 3.0, 1.0), mask, **options)

    weighed = [
        m | {"advantages": m["advantages"] * (1 + 2 * (m["advantages"] > 0))} for m in window
    ]
    assert_parity(
        trainer.model,
        lambda: theirs(trainer, weighed, "grpo", "token", 0.0),
        lambda: ours(trainer, window, weighed_grpo, 0.0, **CLIP) / 2,
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clip_fractions_and_kl_are_trls_metrics(trainer, level):
    (micro,) = split_tensor_dict(
        {k: torch.cat([m[k] for m in micro_batches(trainer)]) for k in KEYS}
        | {"num_items_in_batch": torch.tensor(1)},
        1,
    )
    theirs(trainer, [micro], "grpo", level, 0.3)
    logged = {name: values[0] for name, values in trainer._metrics["train"].items()}
    with torch.no_grad():
        now, old, mask = (
            score(trainer, micro),
            micro["old_per_token_logps"],
            micro["completion_mask"],
        )
        ratio = token_ratio(now, old) if level == "token" else sequence_ratio(now, old, mask)
        counted = mask if level == "token" else torch.ones(12, 1)
        low, high = clip_fraction(ratio, micro["advantages"], counted, **CLIP)
    assert 0 < low < 1 and 0 < high < 1
    assert logged["clip_ratio/low_mean"] == pytest.approx(low.item())
    assert logged["clip_ratio/high_mean"] == pytest.approx(high.item())
    assert logged["kl"] == pytest.approx(
        masked_mean(k3(now, micro["ref_per_token_logps"]), mask).item(), rel=1e-5
    )


KEYS = [
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "old_per_token_logps",
    "ref_per_token_logps",
]  # fmt: skip


# ---- advantages, from trl's own rollouts ----------------------------------------------------------------------


def rollout(trainer):
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def remembered(values):
    """letters(), and what it gave."""

    def reward(completions, **columns):
        values.append(letters(completions))
        return values[-1]

    return reward


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_trls(scale, tmp_path):
    given = []
    trainer = make_plain(
        tmp_path, rewards=remembered(given), scale_rewards=scale, model=sharp_model(0)
    )
    got = rollout(trainer)["advantages"]
    assert torch.allclose(
        group_advantages(torch.tensor(given[0]), 4, scale=scale), got, rtol=1e-5, atol=1e-6
    )
    assert got.abs().max() > 0.05


def test_the_overlong_filter_is_trls(tmp_path):
    masks = {}
    for masked in (False, True):
        torch.manual_seed(0)
        trainer = make_plain(tmp_path, mask_truncated_completions=masked, model=sharp_model(0))
        masks[masked] = rollout(trainer)["completion_mask"]
    truncated = torch.tensor([True] * 8)  # six tokens of 49152 hold no end, so all are cut off
    assert masks[False].sum() == 48 and torch.equal(
        overlong_filter(masks[False], truncated), masks[True]
    )


def test_rloo_is_trls_from_the_rewards_to_the_gradient(tmp_path):
    """The KL in the reward by k1, leave-one-out, and the clipped ratio of whole completions."""
    given, beta = [], 0.5
    # trl reloads the reference from where the model came
    sharp_model(0).save_pretrained(tmp_path / "ref")
    model, tokenizer = sharp_model(1), few_words.policy()[1]
    model.config._name_or_path = str(tmp_path / "ref")
    shared = settings(tmp_path).to_dict()
    names = "per_device_train_batch_size max_completion_length output_dir report_to use_cpu bf16 seed".split()
    config = RLOOConfig(
        **{n: shared[n] for n in names}, beta=beta, num_generations=4, epsilon=0.2
    )
    trainer = RLOOTrainer(
        model=model,
        reward_funcs=remembered(given),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"Say {i}:" for i in range(8)]}),
        processing_class=tokenizer,
    )
    batch = rollout(trainer)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    mask, width = batch["completion_mask"], batch["completion_ids"].size(1)
    with torch.no_grad():
        now, ref = (
            logprobs_of(m, ids, attention, width) for m in (trainer.model, trainer.ref_model)
        )
    shaped = token_rewards(torch.tensor(given[0]), k1(now, ref), mask, beta=beta).sum(1)
    advantages = rloo_advantages(shaped, 4)
    assert (shaped - torch.tensor(given[0])).abs().max() > 0.1, "a KL worth the name"
    assert torch.allclose(advantages, batch["advantages"], rtol=1e-5, atol=1e-5)

    old = now + 0.1 * torch.randn(now.shape, generator=torch.Generator().manual_seed(2))
    batch["old_logps"] = (old * mask).sum(1)  # trl's name
    ratio = torch.exp(((now - old) * mask).sum(1))
    assert (ratio > 1.2).any() or (ratio < 0.8).any(), "something is clipped"
    trainer.model.train()
    assert_parity(
        trainer.model,
        lambda: trainer._compute_loss(trainer.model, dict(batch)),
        lambda: rloo(
            logprobs_of(trainer.model, ids, attention, width), old, batch["advantages"], mask
        ),
        terms=batch["advantages"].abs().mean().item(),
    )
