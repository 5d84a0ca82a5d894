"""What only a card can show: graphs, FlexAttention's kernel, 8-bit moments, memory, whole runs. Skipped without one.

Longer than 250 lines because a person with a card runs this one file.
"""

import gc
import sys

import few_words
import pytest
import torch
from loop_runs import make, press_stop, record, task, weights
from test_packed_update import assert_same, ragged, step
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from grpo_kit._support.cuda import has_bf16
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine import _first_use as first_use
from grpo_kit.engine.card.checks import check_card
from grpo_kit.engine.fast import fast
from grpo_kit.engine.memory._activations import ChunkMemory
from grpo_kit.engine.memory._free import free_bytes, releasable_bytes
from grpo_kit.engine.optim.choose import make_optimizer
from grpo_kit.engine.packed_update import PackedUpdate, pack_rows
from grpo_kit.loop import Config
from grpo_kit.loop.batch import generate
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.models import load_policy
from grpo_kit.models._adapters import add_adapters
from grpo_kit.more import episodes
from grpo_kit.trainer.grpo_trainer import GRPOTrainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
PROMPTS = [[5, 6, 7, 8]] * 4 + [[9] * 11] * 4 + [[40, 41]] * 4


def qwen(dtype=torch.float32, *, hidden=128, layers=2, vocabulary=512):
    """Grouped-query attention with biases and a head dimension of 64, as Qwen2.5 has."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to("cuda", dtype).eval()


def greedy(model, end=None):
    config = GenerationConfig(
        max_new_tokens=80, do_sample=False, pad_token_id=0, eos_token_id=end
    )
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS], device="cuda")
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS], device="cuda")
    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[
        :, width:
    ].tolist()
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
    config = GenerationConfig(
        max_new_tokens=40, do_sample=True, temperature=0.9, pad_token_id=0
    )
    rollouts = RolloutEngine(model).generate(PROMPTS, config, seed=1)
    for prompt, ids, logprobs in zip(
        PROMPTS, rollouts.completion_ids, rollouts.policy_logprobs, strict=True
    ):
        row = torch.tensor([prompt + ids], device="cuda")
        logits = model(row).logits[0, len(prompt) - 1 : -1].float() / 0.9
        plain = logits.log_softmax(-1).gather(1, row[0, len(prompt) :, None])[:, 0]
        assert (plain.cpu() - torch.tensor(logprobs)).abs().mean() < 0.02


def test_autocast_and_adapters_decode_in_graphs():
    model = load_policy(
        "tiny-random", tuning="lora", lora={"init_lora_weights": False}, quiet=True
    )[0].cuda()
    engine = RolloutEngine(model)
    config = GenerationConfig(
        max_new_tokens=20, do_sample=True, pad_token_id=2, eos_token_id=[]
    )
    with torch.autocast("cuda", torch.bfloat16):
        first = engine.generate([[5, 6, 7]] * 4, config, seed=3).completion_ids
    with model.disable_adapter(), torch.autocast("cuda", torch.bfloat16):
        without = engine.generate([[5, 6, 7]] * 4, config, seed=3).completion_ids
    assert first != without and not engine._decoder.graphs._failed


@pytest.fixture(autouse=True)
def exact_products():
    """float32 is float32 here: load_policy turns TF32 on, for the whole process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What an earlier version found of this card counts for nothing here; models that are cached stay so."""
    monkeypatch.setattr(first_use, "cache_folder", lambda: tmp_path / "cache")


@pytest.mark.parametrize("loss", ["dapo", "grpo", "bnpo"])
def test_flex_attention_gives_the_padded_gradient(loss):
    model = qwen(vocabulary=4096)  # the kernel wants heads of 16 and more
    packed, batch = PackedUpdate(model, Config()), on_card(ragged(old=True))
    assert_same(
        step(packed, model, batch, loss=loss),
        step(PaddedUpdate(Config()), model, batch, loss=loss),
    )
    assert packed.memory.attention == "flex_attention", "it fell back to SDPA"


def on_card(batch):
    if batch.old_logprobs is not None:
        batch.old_logprobs = batch.old_logprobs.cuda()
    return batch


def test_a_full_card_halves_the_chunk_and_goes_on(monkeypatch):
    model, batch, inner = (
        load_policy("tiny-random", quiet=True)[0].cuda(),
        on_card(ragged()),
        PackedUpdate._forward,
    )
    packed = PackedUpdate(model, Config())
    wanted = step(packed, model, batch)
    packed.memory.attention = "sdpa"

    def greedy_for_memory(self, model, rows, *rest):
        if sum(len(completion) for _, completion in rows) > 20:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")  # a real out-of-memory error
        return inner(self, model, rows, *rest)

    monkeypatch.setattr(PackedUpdate, "_forward", greedy_for_memory)
    assert_same(step(packed, model, batch), wanted)
    assert packed.memory.chunk_tokens


def test_what_the_cache_can_give_back_is_free():
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    free, held = free_bytes(device), torch.empty(2**30, dtype=torch.uint8, device=device)
    while_held = free_bytes(device)
    del held
    assert releasable_bytes(device) >= 2**30 and free_bytes(device) == pytest.approx(
        free, abs=2**26
    )
    assert free - while_held == pytest.approx(2**30, abs=2**26)
    torch.cuda.empty_cache()
    assert releasable_bytes(device) < 2**26


def test_the_split_optimizer_holds_the_float32_master_on_a_card():
    model, twin = qwen(torch.bfloat16), qwen(torch.bfloat16).float()
    split = make_optimizer("adamw-8bit-split", model, learning_rate=1e-6)
    wide = make_optimizer("adamw-8bit", twin, learning_rate=1e-6)
    for number in range(20):
        torch.manual_seed(number)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = 1e-3 * torch.randn_like(p)
            q.grad = p.grad.float()
        split.step(), wide.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(split.master(p), q, rtol=0, atol=1e-8)


PLANNED = [
    ("full", "none", 16384, 4), ("lora", "bfloat16", 512, 0), ("full", "none", 512, 0), ("lora", "none", 512, 4),
    ("full", "none", 512, 4), ("full", "none", 16384, 0), ("lora", "none", 512, 0), ("lora", "bfloat16", 16384, 4),
]  # fmt: skip
PLANNED_HIDDEN, PLANNED_ROWS = 512, 8
# a pretend one computes on the CPU: every value, and not every pair of them
if "card" in sys.modules:
    PLANNED, PLANNED_HIDDEN, PLANNED_ROWS = PLANNED[:2], 256, 3


@pytest.mark.parametrize(("tuning", "autocast", "vocabulary", "checkpointed"), PLANNED)
def test_the_plan_is_near_the_measured_update(
    tuning, autocast, vocabulary, checkpointed, monkeypatch
):
    model = qwen(torch.bfloat16, hidden=PLANNED_HIDDEN, layers=4, vocabulary=vocabulary).train()
    if tuning == "lora":
        model = add_adapters(model, "lora", {}, 0)
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(512, (n,), generator=generator).tolist()  # noqa: E731
    packed = PackedUpdate(model, Config())
    packed.memory.attention = "sdpa"
    monkeypatch.setattr(packed.memory, "_budget", lambda *sizes: (10**6, checkpointed))
    batch = ragged()
    batch.cut_off = [False] * 12
    for length in (8, 256):  # of short rows: from then on there are gradients and workspaces
        prompt = draw(length)
        written = [draw(length) for _ in range(PLANNED_ROWS)]
        batch.prompt_ids, batch.completion_ids = (
            [prompt] * 12,
            written + [[]] * (12 - PLANNED_ROWS),
        )
        gc.collect()  # what an earlier test left would go while this one is measured
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(packed, model, batch, autocast=autocast)
        monkeypatch.setattr(model, "zero_grad", lambda set_to_none=True: None)
    measured = torch.cuda.max_memory_allocated() - before
    rows = [(tuple(prompt), ids) for ids in written]
    tokens = pack_rows(rows, torch.device("cuda")).input_ids.numel()
    compute_itemsize = None if autocast == "none" else 2
    memory = ChunkMemory(
        model.config,
        2,
        trainable=tuning,
        compute_itemsize=compute_itemsize,
        mask_keys=tokens,
        fused_norms=True,
    )
    scored = sum(map(len, written))
    plan = memory.peak(tokens=tokens, checkpointed_layers=checkpointed, scored_tokens=scored)
    # H200: at most 16 % too much
    assert plan.kept + plan.working == pytest.approx(measured, rel=0.16)


# ---- runs -------------------------------------------------------------------------------------------------------

KINDS = {
    "float32": (dict(dtype="float32"), {}),
    "bfloat16 autocast": (dict(dtype="float32"), {"autocast": "bfloat16"}),
    "float16 autocast": (dict(dtype="float32"), {"autocast": "float16"}),
    "bfloat16 weights": (dict(dtype="bfloat16"), {"autocast": "bfloat16"}),
    "LoRA": (dict(tuning="lora", dtype="bfloat16"), {"autocast": "bfloat16", "beta": 0.05}),
    "QLoRA": (dict(tuning="qlora"), {"autocast": "bfloat16"}),
}


def on_a_card(folder, kind, **more):
    how, config = KINDS[kind]
    if kind in ("QLoRA", "bfloat16 weights"):
        pytest.importorskip("bitsandbytes")
    if "bfloat16" in kind and not has_bf16():
        pytest.skip("a card without bfloat16")
    torch.manual_seed(0)
    for part in few_words.policy():  # 4-bit weights are read from a folder
        part.save_pretrained(folder.parent / "tiny")
    model = load_policy(folder.parent / "tiny", quiet=True, **how)[0].cuda()
    return make(folder, model=model, seams="fast", **config | more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_by_the_fast_ways(kind, tmp_path, capsys):
    trainer = on_a_card(tmp_path / "run", kind)
    assert hasattr(trainer.sample, "engine") and hasattr(trainer.update, "memory"), (
        "a fast way was left out"
    )
    before = {name: p.detach().clone() for name, p in trainer.trained.items()}
    trainer.train()
    assert "failed on this machine" not in capsys.readouterr().out
    assert any(not torch.equal(p, before[name]) for name, p in trainer.trained.items())
    rows = record(trainer.folder)[0]
    assert len(rows) == 4 and max(row["rollout/logprob_gap"] for row in rows) < 0.05
    assert kind == "float16 autocast" or all(0 < row["grad_norm"] < 1e4 for row in rows)


@pytest.mark.parametrize("kind", ["float32", "LoRA", "float16 autocast"])
def test_a_stopped_run_goes_on_in_a_new_trainer(kind, tmp_path):
    """Sums on a card have no fixed order, so the weights are near, not equal."""

    class Stop(Hook):
        def after_step(self, trainer, row, batch):
            if trainer.step == 2:
                press_stop()

    whole = on_a_card(tmp_path / "whole", kind)
    whole.train()
    with pytest.raises(Stopped, match="after step 2"):
        on_a_card(tmp_path / "run", kind, hooks=[Stop()]).train()
    trainer = on_a_card(tmp_path / "run", kind)
    trainer.train(resume=True)
    assert trainer.step == 4
    assert all(
        torch.allclose(p, weights(whole)[n], atol=1e-3)
        for n, p in weights(trainer).items()
        if "/" not in n
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fast_ways_and_the_optimizer_are_right_on_this_card(dtype):
    pytest.importorskip("bitsandbytes")
    if dtype == torch.bfloat16 and not has_bf16():
        pytest.skip("a card without bfloat16")
    optimizer = "adamw-8bit-split" if dtype == torch.bfloat16 else "adamw-8bit"
    found = {one.part: str(one) for one in check_card(qwen(dtype), Config(optimizer=optimizer))}
    assert found.keys() == {"engine", "packed update", "optimizer"}
    assert all("equal" in words for words in found.values()), found


def test_episodes_are_played_by_the_engine(tmp_path, capsys):
    model, tokenizer = few_words.policy()
    config = Config(steps=2, prompts_per_step=2, group_size=4, learning_rate=1e-3)
    grid = episodes.grid(n_train=4, n_held_out=2)
    sampled = []

    class Look(Hook):
        def after_step(self, trainer, row, batch):
            sampled.append(batch.sampler_logprobs)  # the engine's own

    trainer = GRPOTrainer(
        model.cuda(),
        grid,
        config,
        tokenizer=tokenizer,
        folder=tmp_path / "run",
        live=None,
        hooks=[Look()],
    )
    trainer.train()
    assert (
        "plain way" not in capsys.readouterr().out and len(sampled) == 2 and None not in sampled
    )


def test_a_model_that_the_engine_does_not_know_trains_plainly(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = few_words.tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=256, n_embd=32, n_layer=1, n_head=2, attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).cuda()
    assert fast(model, Config()).sample is generate
    trainer = make(tmp_path / "run", model=model, seams="fast", task=task(), steps=2)
    trainer.train()
    assert trainer.step == 2
