"""In training CUDA graphs are captured once a shape, though autocast is always on; on a stand-in for CUDA's."""

import few_words
import pytest
import torch
from fake_cuda import FakeCuda
from loop_runs import make, record

from grpo_kit.engine import RolloutEngine, fast
from grpo_kit.engine.card._graphs import DecodeGraphs
from grpo_kit.engine.optim.split_adamw import SplitAdamW8bit
from grpo_kit.models import load_policy

KINDS = {
    "bfloat16 weights": dict(dtype="bfloat16"),
    "float32 weights": dict(dtype="float32"),
    "bfloat16 base, float32 adapters": dict(
        dtype="bfloat16", tuning="lora", lora={"init_lora_weights": False}
    ),
}


class Graphed(RolloutEngine):
    """Decodes as on a card."""

    def _new_decoder(self):
        decoder = super()._new_decoder()
        decoder.bucketed, decoder.graphs = True, DecodeGraphs(FakeCuda())
        return decoder


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_captured_once_a_shape_over_rollouts_and_optimizer_steps(
    kind, tmp_path, monkeypatch
):
    monkeypatch.setattr(fast, "RolloutEngine", Graphed)
    # what the engine holds may stay
    monkeypatch.setattr(fast, "free_bytes", lambda device: 2**40)
    torch.manual_seed(0)
    model = load_policy(few_words.folder(), quiet=True, **KINDS[kind])[0]
    trainer = make(tmp_path / "run", model=model, seams="fast", autocast="bfloat16", steps=5)
    weights, captured, inner = [], [], trainer.sample

    def noting(*args):
        made = inner(*args)
        graphs = inner.engine._decoder.graphs
        captured.append((graphs.captures, len(graphs._graphs), graphs.replays))
        weights.append([p.detach().clone() for p in trainer.trained.values()])
        return made

    trainer.sample = noting
    trainer.train()
    assert all(
        not any(map(torch.equal, a, b)) for a, b in zip(weights, weights[1:], strict=False)
    ), "they move"
    captures, shapes, replays = zip(*captured, strict=True)
    assert captures == shapes and captures[0] == captures[-1] > 0, "nothing is captured anew"
    assert replays[0] > 0 and all(b > a for a, b in zip(replays, replays[1:], strict=False))
    assert isinstance(trainer.optimizer, SplitAdamW8bit) == (kind == "bfloat16 weights")
    gaps = [row["rollout/logprob_gap"] for row in record(trainer.folder)[0]]
    assert len(gaps) == 5 and max(gaps) < 0.02, "graphs read the weights as they are"
