"""What only a card can show: graphs, FlexAttention's kernel, 8-bit moments, memory. Skipped without one."""

import pytest
import torch
from test_update import assert_same, kit_step, micro_batches, trl_step
from tiny_run import make
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from grpo_kit.memory.activations import chunk_bytes
from grpo_kit.memory.free import free_bytes, releasable_bytes
from grpo_kit.memory.plan import plan_memory
from grpo_kit.models import load_policy
from grpo_kit.models.renamed import NAME as CHECKPOINTING
from grpo_kit.optim.choose import make_optimizer
from grpo_kit.rollout import RolloutEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
PROMPTS = [[5, 6, 7, 8]] * 4 + [[9] * 11] * 4 + [[40, 41]] * 4


def qwen(dtype=torch.float32, *, hidden=128, layers=2):
    """Grouped-query attention with biases and a head dimension of 64, as Qwen2.5 has."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to("cuda", dtype).eval()


def greedy(model, end=None):
    config = GenerationConfig(max_new_tokens=80, do_sample=False, pad_token_id=0, eos_token_id=end)
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS], device="cuda")
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS], device="cuda")
    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
    return config, [row[: row.index(end) + 1] if end in row else row for row in out]


def test_graphs_write_what_generate_writes_and_follow_the_weights():
    """Two suffix buckets, several row buckets; weights changed in place, then moved to another dtype."""
    model = qwen()
    engine = RolloutEngine(model)
    end = greedy(model)[1][0][3]
    config, wanted = greedy(model, end)
    assert engine.generate(PROMPTS, config).completion_ids == wanted
    graphs = engine._decoder.graphs
    assert len(graphs._graphs) > 1 and not graphs._failed
    kept = dict(graphs._graphs)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    config, wanted = greedy(model, end)
    assert engine.generate(PROMPTS, config).completion_ids == wanted
    assert kept.items() <= graphs._graphs.items(), "in place: the graphs still hold"
    model.double().float()  # new addresses
    assert engine.generate(PROMPTS, config).completion_ids == wanted
    assert not kept.items() <= graphs._graphs.items(), "moved: captured again"
    engine.release()
    assert not graphs._graphs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sampled_log_probabilities_are_those_of_a_forward_pass(dtype):
    model = qwen(dtype)
    config = GenerationConfig(max_new_tokens=40, do_sample=True, temperature=0.9, pad_token_id=0)
    rollouts = RolloutEngine(model).generate(PROMPTS, config, seed=1)
    for prompt, ids, logprobs in zip(PROMPTS, rollouts.completion_ids, rollouts.policy_logprobs, strict=True):
        row = torch.tensor([prompt + ids], device="cuda")
        logits = model(row).logits[0, len(prompt) - 1 : -1].float() / 0.9
        plain = logits.log_softmax(-1).gather(1, row[0, len(prompt) :, None])[:, 0]
        assert (plain.cpu() - torch.tensor(logprobs)).abs().mean() < 0.02


def test_autocast_and_adapters_decode_in_graphs():
    model = load_policy("tiny-random", tuning="lora", lora={"init_lora_weights": False}, quiet=True)[0].cuda()
    engine = RolloutEngine(model)
    config = GenerationConfig(max_new_tokens=20, do_sample=True, pad_token_id=2, eos_token_id=[])
    with torch.autocast("cuda", torch.bfloat16):
        first = engine.generate([[5, 6, 7]] * 4, config, seed=3).completion_ids
    with model.disable_adapter(), torch.autocast("cuda", torch.bfloat16):
        without = engine.generate([[5, 6, 7]] * 4, config, seed=3).completion_ids
    assert first != without and not engine._decoder.graphs._failed


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_flex_attention_gives_trls_gradient(loss_type, tmp_path):
    trainers = []
    for which in ("kit", "plain"):
        options = dict(gradient_accumulation_steps=2, per_device_train_batch_size=6, use_cpu=False)
        model = load_policy("tiny-random", quiet=True)[0]
        trainers.append(make(which, tmp_path / which, model=model, loss_type=loss_type, **options))
    kit, plain = trainers
    window = [{k: v.cuda() for k, v in micro.items()} for micro in micro_batches()]
    wanted = trl_step(plain, window)
    assert_same(kit_step(kit, window), wanted)
    assert kit.update.memory.attention == "flex_attention", "it fell back to SDPA"


def test_a_full_card_halves_the_chunk_and_goes_on(tmp_path):
    kit = make("kit", tmp_path, use_cpu=False, per_device_train_batch_size=12)
    (micro,) = micro_batches(1)
    window = [{k: v.cuda() for k, v in micro.items()}]
    wanted = kit_step(kit, window)
    kit.update.memory.attention, inner = "sdpa", kit.update._label_logprobs

    def greedy_for_memory(model, ids, *rest):
        if ids.numel() > 40:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")  # a real out-of-memory error
        return inner(model, ids, *rest)

    kit.update._label_logprobs = greedy_for_memory
    assert_same(kit_step(kit, window), wanted)
    assert kit.update.memory.chunk_tokens <= 40


def test_what_the_cache_can_give_back_is_free():
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    free, held = free_bytes(device), torch.empty(2**30, dtype=torch.uint8, device=device)
    while_held = free_bytes(device)
    del held
    assert releasable_bytes(device) >= 2**30 and free_bytes(device) == pytest.approx(free, abs=2**26)
    assert free - while_held == pytest.approx(2**30, abs=2**26)
    torch.cuda.empty_cache()
    assert releasable_bytes(device) < 2**26


def test_the_split_optimizer_holds_the_float32_master_on_a_card():
    model, twin = qwen(torch.bfloat16), qwen(torch.bfloat16).float()
    split = make_optimizer("adamw-8bit-split", model, learning_rate=1e-6)
    wide = make_optimizer("adamw-8bit", twin, learning_rate=1e-6)
    for step in range(20):
        torch.manual_seed(step)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = 1e-3 * torch.randn_like(p)
            q.grad = p.grad.float()
        split.step(), wide.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(split.master(p), q, rtol=0, atol=1e-8)


@pytest.mark.parametrize("checkpointed", [0, 8])
def test_the_plan_is_within_ten_percent_of_the_measured_update(checkpointed, tmp_path):
    from trl.trainer.utils import add_fused_lm_head

    from grpo_kit.engine.packing import pack_rows

    model = qwen(torch.bfloat16, hidden=1024, layers=8).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if checkpointed:
        getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": False})
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(512, (n,), generator=generator).tolist()  # noqa: E731
    prompt = tuple(draw(256))
    packed = pack_rows([(prompt, draw(512)) for _ in range(8)], torch.device("cuda"))

    def update():
        out = model(
            input_ids=packed.input_ids, attention_mask=packed.dense_mask(), position_ids=packed.position_ids,
            shift_labels=packed.labels, fused_lm_head=True,
        )  # fmt: skip
        out.log_probs.sum().backward()

    update()  # gradients exist from here on
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    update()
    measured = torch.cuda.max_memory_allocated() - before
    tokens = packed.input_ids.numel()
    plan = chunk_bytes(
        model.config, 2, tokens=tokens, checkpointed_layers=checkpointed, scored_tokens=4096, mask_keys=tokens
    )
    assert plan.kept + plan.working == pytest.approx(measured, rel=0.1)
    assert plan_memory("gpu24").fits
