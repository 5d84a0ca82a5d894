"""Preference losses and the reward model against trl's own trainers on the same batch."""

import few_words
import pytest
import torch
from datasets import Dataset
from parity import assert_parity, logprobs_of, sharp_model
from transformers import LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from grpo_kit.objectives import (
    bradley_terry,
    dpo,
    hinge,
    ipo,
    kto,
    kto_reference_point,
    masked_mean,
    orpo,
    sequence_logprobs,
    simpo,
)

PAIRS = Dataset.from_dict(
    {
        "prompt": ["What is 2 + 2?", "Name a colour, please, and nothing else:", "Say", "Who?"],
        "chosen": [" Four.", " Blue", " something of some length, as one does", " You and I"],
        "rejected": [
            " It is five, I think, or six.",
            " A dog",
            " no",
            " Nobody at all was there",
        ],
    }
)


def config(kind, folder, **options):
    common = dict(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        report_to=[],
        bf16=False,
        use_cpu=True,
    )
    return kind(**common, gradient_checkpointing=False, **options)


def tokenizer():
    return few_words.policy()[1]


def batch_of(trainer):
    """What trl's collator makes of its whole tokenized dataset."""
    rows = [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]
    return {k: v for k, v in trainer.data_collator(rows).items()}


def sums(model, ids, attention_mask, completion_mask, *, average=False):
    """log pi of each row's completion, (R,)."""
    logprobs = logprobs_of(model, ids, attention_mask, ids.size(1) - 1)
    return sequence_logprobs(logprobs, completion_mask[:, 1:], average=average)


# ---- DPO, IPO -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_type", "average"), [("sigmoid", False), ("ipo", True), ("hinge", False)]
)
def test_dpo_ipo_and_hinge(loss_type, average, tmp_path):
    """trl's IPO takes means a token, where the paper has sums."""
    model, ref = sharp_model(0), sharp_model(1)
    args = config(DPOConfig, tmp_path, loss_type=[loss_type], beta=0.3)
    trainer = DPOTrainer(
        model, ref, args=args, train_dataset=PAIRS, processing_class=tokenizer()
    )
    batch = batch_of(trainer)
    inputs = batch["input_ids"], batch["attention_mask"], batch["completion_mask"]

    def ours():
        with torch.no_grad():
            reference = sums(trainer.ref_model, *inputs, average=average).chunk(2)
        loss = {"sigmoid": dpo, "ipo": ipo, "hinge": hinge}[loss_type]
        return loss(
            *sums(trainer.model, *inputs, average=average).chunk(2), *reference, beta=0.3
        )

    assert_parity(trainer.model, lambda: trainer.compute_loss(trainer.model, dict(batch)), ours)


# ---- KTO ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [(1, 0), (0, 1)], ids=["z0 above 0", "z0 clamped to 0"])
def test_kto(seeds, tmp_path):
    """Reference point from completions one row on, weights, and both kinds of label."""
    model, ref = map(sharp_model, seeds)
    data = Dataset.from_dict(
        {
            "prompt": PAIRS["prompt"],
            "completion": PAIRS["chosen"],
            "label": [True, False, False, True],
        }
    )
    weights = dict(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    trainer = KTOTrainer(
        model,
        ref,
        args=config(KTOConfig, tmp_path, **weights),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    batch = batch_of(trainer)
    names = "input_ids", "attention_mask", "completion_mask"
    matched, shifted = ([batch[prefix + name] for name in names] for prefix in ("", "KL_"))

    def ours():
        with torch.no_grad():
            z0 = kto_reference_point(
                sums(trainer.model, *shifted), sums(trainer.ref_model, *shifted)
            )
            reference = sums(trainer.ref_model, *matched)
        assert z0 > 0.1 if seeds == (1, 0) else z0 == 0
        return kto(sums(trainer.model, *matched), reference, batch["label"], z0, **weights)

    assert_parity(trainer.model, lambda: trainer.compute_loss(trainer.model, dict(batch)), ours)


# ---- without a reference --------------------------------------------------------------------------------------


def joined(trainer, batch):
    """Chosen rows, then rejected: ids, attention, and a mask of completions, as trl scores them."""
    rows = trainer.concatenated_inputs(batch, padding_value=tokenizer().pad_token_id)
    labels = rows["concatenated_labels"]
    return (
        rows["concatenated_input_ids"],
        rows["concatenated_attention_mask"],
        (labels != -100).long(),
    )


def test_orpo(tmp_path):
    """With trl's SFT term: over all tokens of the chosen sequences, the prompts' too."""
    args = config(ORPOConfig, tmp_path, beta=0.4, max_length=64)
    trainer = ORPOTrainer(
        sharp_model(0), args=args, train_dataset=PAIRS, processing_class=tokenizer()
    )
    batch = batch_of(trainer)
    ids, attention, completion = joined(trainer, batch)

    def ours():
        chosen, rejected = sums(trainer.model, ids, attention, completion, average=True).chunk(
            2
        )
        everything = logprobs_of(trainer.model, ids[:4], attention[:4], ids.size(1) - 1)
        return orpo(chosen, rejected, beta=0.4, nll=-masked_mean(everything, attention[:4, 1:]))

    assert_parity(trainer.model, lambda: trainer.compute_loss(trainer.model, batch), ours)
    # A random model's tokens have p near 0, where odds are probabilities; so trl's own function on likelier ones.
    chosen, rejected = (
        torch.tensor(p).log().requires_grad_() for p in ([0.1, 0.5, 0.99], [0.9, 0.5, 0.2])
    )
    theirs = -trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    odds_alone = orpo(chosen, rejected, beta=0.4, nll=torch.tensor(0.0))
    assert odds_alone.item() == pytest.approx(theirs.item(), rel=1e-5)
    gradients = [torch.autograd.grad(loss, (chosen, rejected)) for loss in (theirs, odds_alone)]
    for wanted, got in zip(*gradients, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", ["simpo", "dpo with smoothed labels, no reference"])
def test_simpo_and_smoothed_labels(name, tmp_path):
    """trl 1.16 smooths labels in CPOTrainer, whose sigmoid loss is DPO's with a reference that says nothing."""
    options = (
        dict(loss_type="simpo", simpo_gamma=0.7)
        if name == "simpo"
        else dict(label_smoothing=0.2)
    )
    args = config(CPOConfig, tmp_path, beta=1.5, cpo_alpha=0.0, max_length=64, **options)
    trainer = CPOTrainer(
        sharp_model(0), args=args, train_dataset=PAIRS, processing_class=tokenizer()
    )
    batch = batch_of(trainer)
    inputs, zero = joined(trainer, batch), torch.zeros(4)

    def ours():
        chosen, rejected = sums(trainer.model, *inputs, average=name == "simpo").chunk(2)
        if name == "simpo":
            return simpo(chosen, rejected, beta=1.5, gamma=0.7)
        return dpo(chosen, rejected, zero, zero, beta=1.5, label_smoothing=0.2)

    assert_parity(trainer.model, lambda: trainer.compute_loss(trainer.model, batch), ours)


# ---- the reward model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_margin", [False, True])
def test_bradley_terry(with_margin, tmp_path):
    policy = sharp_model(0, spread=1.0)
    policy.config.num_labels, policy.config.pad_token_id = 1, tokenizer().pad_token_id
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(policy.config)
    with torch.no_grad():
        model.score.weight.mul_(20)  # so that rewards differ
    data = PAIRS.add_column("margin", [0.5, 0.0, -1.0, 2.0]) if with_margin else PAIRS
    trainer = RewardTrainer(
        model,
        args=config(RewardConfig, tmp_path),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    batch = batch_of(trainer)

    def ours():
        rewards = trainer.model(
            batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits[:, 0]
        chosen, rejected = rewards.chunk(2)
        assert (chosen - rejected).abs().max() > 0.5
        return bradley_terry(chosen, rejected, margin=batch["margin"] if with_margin else 0.0)

    assert_parity(trainer.model, lambda: trainer.compute_loss(trainer.model, dict(batch)), ours)
