"""Memory of a card: what is planned beside what the allocator gives, and what happens where it ends."""

import gc
import sys
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from test_cuda import qwen
from test_packed_update import assert_same, ragged, step
from transformers import GenerationConfig

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.optim import split_adamw
from grpo_kit.engine.optim.choose import make_optimizer
from grpo_kit.engine.packed_update import FLEX_BLOCK, PackedUpdate, pack_rows
from grpo_kit.loop import Config
from grpo_kit.loop.config import Preset
from grpo_kit.more.memory import _request as request
from grpo_kit.more.memory.plan import plan_memory

MIB = 2**20


@contextmanager
def room(counter, free):
    """Inside, the card has so many bytes more; what lies free between tensors is taken, so that it does not count."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    counter.put("fraction", torch.cuda.memory_reserved() / total)
    ballast = []
    for size in (64 * MIB, 16 * MIB, 4 * MIB, MIB + 1, MIB // 4):
        with suppress(torch.OutOfMemoryError):
            while True:
                ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    counter.put("fraction", (torch.cuda.memory_reserved() + free) / total)
    counter.reset()
    try:
        yield
    finally:
        counter.put("fraction", 1)


def pool_bytes():
    """What the private pools of graphs hold, besides a real card's workspace: cuBLAS takes one for a capture."""
    private = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return sum(
        s["total_size"] for s in private if "card" in sys.modules or s["total_size"] < 32 * MIB
    )


def generated(model, rows=16):
    engine = RolloutEngine(model)
    how = GenerationConfig(
        max_new_tokens=140, do_sample=True, pad_token_id=0, eos_token_id=list(range(60))
    )
    prompts = [[70 + i] * 40 for i in range(rows) for _ in range(4)]
    return engine, engine.generate(prompts, how, seed=1)


def test_the_engine_counts_what_its_graphs_hold():
    """The capture empties torch's cache, so what was reserved before it says nothing of the pool."""
    model = qwen(torch.bfloat16, vocabulary=4096)
    freed = [torch.empty(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(20)]
    del freed  # cached until the first capture
    engine, _ = generated(model)
    graphs = engine._decoder.graphs
    assert graphs.captures > 1
    logits = graphs._logits.numel() * graphs._logits.element_size()
    assert graphs.nbytes() - logits == pytest.approx(pool_bytes(), rel=0.1) and pool_bytes() > 0


def test_captures_share_one_stream(counter):
    made = counter.get("streams_made")
    engine, _ = generated(qwen(torch.bfloat16, vocabulary=4096))
    assert engine._decoder.graphs.captures > 1
    # the warm-ups', and at most torch.cuda.graph's own
    assert counter.get("streams_made") - made <= 2


def workspaces():
    """What cuBLAS keeps beside tensors, 8 or 32 MiB a stream: the plan has a reserve for it. It is given back."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    getattr(torch._C, "_cuda_clearCublasWorkspaces", int)()
    return before - torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    ("prompt_tokens", "vocabulary", "narrowed"),
    [
        (512, 4096, {}),
        (64, 16384, {}),
        (64, 16384, {"top_p": 0.9}),
        (64, 16384, {"repetition_penalty": 1.1}),
    ],
)
def test_the_plan_of_a_rollout_is_within_ten_percent_of_the_allocators(
    prompt_tokens, vocabulary, narrowed
):
    """The second rollout, which finds the keys, values and graphs of the first."""
    model = qwen(torch.bfloat16, hidden=256, vocabulary=vocabulary)
    config = Preset(dtype="bfloat16", prompts_per_step=8, group_size=8, **narrowed)
    plan = plan_memory(
        config, config=model.config, prompt_tokens=prompt_tokens, completion_tokens=6
    )
    planned = plan.parts["rollout"]
    prompts = [[20 + group] * prompt_tokens for group in range(8) for _ in range(8)]
    how = GenerationConfig(
        max_new_tokens=6, do_sample=True, pad_token_id=0, eos_token_id=[], **narrowed
    )
    workspaces()  # an earlier test's
    before = torch.cuda.memory_allocated()
    engine = RolloutEngine(model)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        engine.generate(prompts, how, seed=1)
    measured = torch.cuda.max_memory_allocated() - before - workspaces()
    slots = engine._decoder.slots
    assert planned["keys and values"] == pytest.approx(slots.nbytes(), rel=0.1)
    # Top-p on an H200 took 37 MB more, and why is not known: its kernels' own memory, or one more workspace.
    apart = 0.1 * measured + (0 if "card" in sys.modules or "top_p" not in narrowed else 40e6)
    assert planned["keys and values"] + planned["logits and sampling"] == pytest.approx(
        measured, abs=apart
    )


def test_a_block_mask_takes_next_to_nothing():
    """The plan leaves it out: torch's own way to it takes 3 bytes a pair of positions."""
    packed = pack_rows(
        [((7,), list(range(8, 4104)))], torch.device("cuda"), multiple=FLEX_BLOCK
    )
    before, length = torch.cuda.memory_allocated(), len(packed.end)
    torch.cuda.reset_peak_memory_stats()
    mask = packed.block_mask()
    assert int(mask.kv_num_blocks.sum()) == length // FLEX_BLOCK, (
        "the diagonal; the blocks before it are full"
    )
    assert torch.cuda.max_memory_allocated() - before < length**2 / 100


def stepped(name, free=None, counter=None):
    """Weights after three steps; with `free` bytes left for the optimizer's second and third."""
    model = qwen(torch.bfloat16, hidden=256, vocabulary=16384)
    optimizer = make_optimizer(name, model, learning_rate=1e-3)
    for number in range(3):
        torch.manual_seed(number)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        with room(counter, free) if number and free is not None else nullcontext():
            optimizer.step()
    return {n: optimizer.master(p) for n, p in model.named_parameters()}


def test_out_of_memory_in_the_optimizer_takes_smaller_parts_and_moves_the_same(counter):
    wanted = stepped("adamw-8bit-split")
    found = stepped("adamw-8bit-split", free=22 * MIB, counter=counter)
    assert counter.get("out_of_memory") > 0
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_without_memory_for_the_moments_no_weight_moves(counter):
    model = qwen(torch.bfloat16, hidden=512)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = make_optimizer("adamw-8bit-split", model, learning_rate=1e-3)
    with room(counter, 8 * MIB), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_plan_knows_the_optimizers_scratch():
    assert request._SPLIT_SCRATCH == split_adamw.SCRATCH_BYTES
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2**12, 2**13, device="cuda", dtype=torch.bfloat16))
    model.w.grad = torch.ones_like(model.w)
    optimizer = make_optimizer("adamw-8bit-split", model, learning_rate=1e-3)
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(
        request._SPLIT_SCRATCH, rel=0.1
    )


def test_out_of_memory_in_a_rollout_halves_the_rows_and_writes_the_same(counter, capsys):
    model = qwen(vocabulary=16384, hidden=512)
    how = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=[])
    prompts = [[70 + i] * 40 for i in range(32)]
    wanted = RolloutEngine(model).generate(prompts, how).completion_ids
    with room(counter, 16 * MIB):
        found = RolloutEngine(model).generate(prompts, how).completion_ids
    assert (
        counter.get("out_of_memory") > 0
        and "rows do not fit in memory" in capsys.readouterr().out
    )
    assert found == wanted


@pytest.mark.parametrize("chunk", [1, 2])
def test_out_of_memory_in_an_update_halves_the_chunk_and_gives_the_same(
    chunk, counter, capsys, monkeypatch
):
    """Somebody else takes the card's memory once the update has planned with it, or half of it is computed."""
    model = qwen(vocabulary=32768)  # logits that no gap which an earlier test left holds
    packed, batch = PackedUpdate(model, Config()), ragged()
    packed.memory.attention = "sdpa"
    wanted = step(packed, model, batch)
    packed.memory.chunk_tokens = 40 if chunk == 2 else None
    forward, tried = PackedUpdate._forward, []

    def on_a_fuller_card(self, model, rows, *rest):
        tried.append(len(rows))
        if len(tried) == chunk:
            torch.cuda.empty_cache()
            counter.put(
                "fraction", (torch.cuda.memory_reserved() + MIB) / torch.cuda.mem_get_info()[1]
            )
        try:
            return forward(self, model, rows, *rest)
        finally:
            counter.put("fraction", 1)

    monkeypatch.setattr(PackedUpdate, "_forward", on_a_fuller_card)
    assert_same(step(packed, model, batch), wanted)
    assert "the step starts over" in capsys.readouterr().out and tried[chunk] < tried[0]
