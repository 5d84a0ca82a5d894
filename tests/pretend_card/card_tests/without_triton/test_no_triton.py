"""Native Windows: a card without Triton. The update takes SDPA under a dense mask.

Its chunks are planned with the mask and the score matrices that FlexAttention does not have: one that does not know
it takes 2.7 times what it planned with, and runs out of memory.
"""

import importlib.util

import few_words
import pytest
import torch
from loop_runs import make
from test_cuda import qwen
from test_packed_update import assert_same, ragged, step

from grpo_kit.engine import _update_memory as update_memory
from grpo_kit.engine.memory._activations import USED_OF_FREE, ChunkMemory
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.models import load_policy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is not None, reason="Triton is installed"
)


def test_the_update_takes_sdpa_and_gives_the_padded_gradient():
    model = load_policy("tiny-random", quiet=True)[0].cuda()
    packed = PackedUpdate(model, Config())
    assert packed.memory.attention == "sdpa"
    assert_same(step(packed, model, ragged()), step(PaddedUpdate(Config()), model, ragged()))


def test_what_is_free_suffices_for_the_chunks_that_it_plans(monkeypatch):
    """With a little less than the step takes at once, of which a third is dense masks."""
    model = qwen(torch.bfloat16, hidden=128, layers=4, vocabulary=512).train()
    draw, batch = torch.Generator().manual_seed(0), ragged()
    batch.prompt_ids = [[5]] * 12
    batch.completion_ids = [
        torch.randint(500, (400,), generator=draw).tolist() for _ in range(4)
    ] + [[]] * 8
    batch.cut_off = [False] * 12
    whole = ChunkMemory(model.config, 2, mask_keys=1600).peak(
        tokens=1600, checkpointed_layers=0
    )
    free = 0.85 * (whole.kept + whole.working) / USED_OF_FREE
    update = PackedUpdate(model, Config())
    step(update, model, batch)  # gradients exist from here on
    monkeypatch.setattr(model, "zero_grad", lambda set_to_none=True: None)
    monkeypatch.setattr(update_memory, "free_bytes", lambda device: free)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(update, model, batch)
    taken = (torch.cuda.max_memory_allocated() - before) / (USED_OF_FREE * free)
    assert 0.6 < taken < 1.1, taken


def test_a_run(tmp_path, capsys):
    model = few_words.policy()[0].cuda()
    before = [p.detach().clone() for p in model.parameters()]
    make(tmp_path / "run", model=model, seams="fast", steps=2).train()
    assert "failed on this machine" not in capsys.readouterr().out
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
