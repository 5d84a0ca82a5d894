"""Native Windows: a card without Triton. The update takes SDPA under a dense mask.

The plan of it is tested beside the allocator in tests/engine/test_cuda.py.
"""

import importlib.util

import pytest
import torch
from loop_runs import make
from test_packed_update import assert_same, ragged, step

from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.models import load_policy

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")


def test_the_update_takes_sdpa_and_gives_the_padded_gradient():
    model = load_policy("tiny-random", quiet=True)[0].cuda()
    packed = PackedUpdate(model, Config())
    assert packed.memory.attention == "sdpa"
    assert_same(step(packed, model, ragged()), step(PaddedUpdate(Config()), model, ragged()))


def test_a_run(tmp_path, capsys):
    model = load_policy("tiny-random", quiet=True)[0].cuda()
    before = [p.detach().clone() for p in model.parameters()]
    make(tmp_path / "run", model=model, seams="fast", steps=2).train()
    assert "failed on this machine" not in capsys.readouterr().out
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
