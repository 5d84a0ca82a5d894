"""Scores, loss and gradient of the packed update against TRL's own on the same batch."""

import pytest
import torch
from tiny_run import make
from transformers import GenerationConfig

from grpo_kit.models import load_policy
from grpo_kit.packing import pack_groups
from grpo_kit.rollout import generate_shared_prefill


def ragged_batch(prompts=3, group=4, width=7, *, with_old=False, with_ref=False, seed=0):
    """Prompts of several lengths, completions of 0 (masked) to 7 tokens, rows shuffled as TRL does."""
    g = torch.Generator().manual_seed(seed)
    longest = 9
    rows = []
    for p in range(prompts):
        prompt = torch.randint(20, 4000, (4 + 2 * p,), generator=g)
        for i in range(group):
            n = 0 if (p, i) == (1, 2) else int(torch.randint(1, width + 1, (1,), generator=g))
            rows.append((prompt, torch.randint(20, 4000, (n,), generator=g)))
    rows = [rows[i] for i in torch.randperm(len(rows), generator=g)]
    batch = {
        "prompt_ids": torch.stack([torch.nn.functional.pad(p, (longest - len(p), 0)) for p, _ in rows]),
        "prompt_mask": torch.stack(
            [torch.nn.functional.pad(torch.ones_like(p), (longest - len(p), 0)) for p, _ in rows]
        ),
        "completion_ids": torch.stack([torch.nn.functional.pad(c, (0, width - len(c))) for _, c in rows]),
        "completion_mask": torch.stack(
            [torch.nn.functional.pad(torch.ones_like(c), (0, width - len(c))) for _, c in rows]
        ),
        "advantages": torch.randn(len(rows), generator=g),
    }
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    noise = lambda: -10.8 + 0.3 * torch.randn(len(rows), width, generator=g)  # noqa: E731
    if with_old:
        batch["old_per_token_logps"] = noise()
    if with_ref:
        batch["ref_per_token_logps"] = noise()
    return batch


def loss_and_gradients(trainer, batch):
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, dict(batch))
    loss.backward()
    return loss.detach(), {
        n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None
    }


def assert_same_gradient(kit, plain, batch):
    packed_calls = []
    inner = kit._packed_scores
    kit._packed_scores = lambda *a: packed_calls.append(1) or inner(*a)
    loss, gradients = loss_and_gradients(kit, batch)
    wanted_loss, wanted = loss_and_gradients(plain, batch)
    assert packed_calls, "the packed path was not taken"
    assert torch.allclose(loss, wanted_loss, rtol=1e-4, atol=1e-6)
    assert gradients.keys() == wanted.keys() and len(wanted) > 2
    for name, gradient in wanted.items():
        error = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-4, (name, error)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "cispo"},
        {"loss_type": "sapo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "vespo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "dapo", "temperature": 0.7},
        {"loss_type": "dapo", "beta": 0.1},
        {"loss_type": "dapo", "num_iterations": 2},
    ],
    ids=lambda o: "-".join(f"{v}" for v in o.values()),
)
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_same_loss_and_gradient_as_trl(options, tuning, tmp_path):
    lora = {"init_lora_weights": False} if tuning == "lora" else None
    load_policy("tiny-random", quiet=True)[0].save_pretrained(
        tmp_path / "model"
    )  # where TRL finds its reference
    trainers = []
    for which in ("kit", "plain"):
        torch.manual_seed(0)
        fresh = load_policy("tiny-random", tuning=tuning, lora=lora, quiet=True)[0]
        fresh.config._name_or_path = str(tmp_path / "model")
        trainers.append(make(which, tmp_path / which, model=fresh, **options))
    batch = ragged_batch(with_old=options.get("num_iterations") == 2, with_ref="beta" in options)
    assert_same_gradient(*trainers, batch)


def test_training_ends_in_the_same_weights_as_plain_trl(tmp_path):
    """Rollouts included: shared prefill draws the same tokens, the update moves the weights alike."""
    # At Adam's first steps a rounding error can flip the sign of a tiny gradient, so plain SGD.
    common = dict(optim="sgd", learning_rate=1.0, max_steps=3)
    trainers = []
    for which in ("kit", "plain"):
        trainers.append(make(which, tmp_path / which, **common))
        trainers[-1].train()
    kit, plain = trainers
    for (name, a), b in zip(kit.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name
    rewards = [[r["reward"] for r in t.state.log_history if "reward" in r] for t in (kit, plain)]
    assert rewards[0] == rewards[1]


def test_layout_by_hand():
    #   prompt [5, 6], completions [7, 8] and [9]; prompt [4] with completion [3, 2]
    ids = torch.tensor([[5, 6, 7, 8], [0, 4, 3, 2], [5, 6, 9, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0]])
    packed = pack_groups(ids, mask, 2)
    assert packed.input_ids.tolist() == [[5, 6, 7, 6], [4, 3, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 1], [0, 1, 0, 0]]
    assert packed.labels.tolist() == [[-100, 7, 8, 9], [3, 2, -100, -100]]
    sees = packed.attention_mask[0, 0].int().tolist()
    assert sees == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert packed.unpack(torch.tensor([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]), 2).tolist() == [
        [1, 2],
        [4, 5],
        [3, 0],
    ]


def prompts_of(tokenizer):
    texts = ["Say one:", "A longer prompt, with more words in it:", "x"]
    return [tokenizer(t).input_ids for t in texts for _ in range(4)]


def reference(model, prompt_ids, config):
    width = max(map(len, prompt_ids))
    ids = torch.tensor([[config.pad_token_id] * (width - len(p)) + p for p in prompt_ids])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompt_ids])
    with torch.no_grad():
        rows = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[
            :, width:
        ].tolist()
    end = config.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_shared_prefill_writes_what_generate_writes(tuning, sample, smol_tokenizer):
    torch.manual_seed(1)
    model = load_policy(
        "tiny-random",
        tuning=tuning,
        lora={"init_lora_weights": False} if tuning == "lora" else None,
        quiet=True,
    )[0]
    model.eval()
    ids = prompts_of(smol_tokenizer)
    base = dict(max_new_tokens=8, pad_token_id=2, bos_token_id=1)
    probe = reference(model, ids, GenerationConfig(do_sample=False, eos_token_id=2, **base))
    end = probe[0][3]  # a token that greedy decoding does produce, so that stopping is exercised
    config = GenerationConfig(do_sample=sample, temperature=0.8, top_k=0, eos_token_id=end, **base)
    torch.manual_seed(5)
    wanted = reference(model, ids, config)
    torch.manual_seed(5)
    assert generate_shared_prefill(model, ids, config) == wanted
    if not sample:
        assert len({len(row) for row in wanted}) > 1  # some stopped early, some did not


def test_shared_prefill_refuses_an_empty_prompt(tiny):
    with pytest.raises(ValueError, match="empty prompt"):
        generate_shared_prefill(
            tiny[0], [[5], []], GenerationConfig(max_new_tokens=2, pad_token_id=2, eos_token_id=2)
        )
