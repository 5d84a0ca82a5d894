"""How many kernels a decode step launches: operators of torch.profiler on a CPU that are made of no others.

Views and allocations launch none. A card runs the same operators, padded decoding being what graphs are captured over;
its float32 copies aside, 16-bit weights have the same count. A number that falls is to be written here, one that
rises is to be explained.
"""

from collections import Counter

import pytest
import torch
from rollout_models import config, ragged_prompts, tiny_model
from torch.profiler import ProfilerActivity, profile

from grpo_kit.rollout import RolloutEngine
from grpo_kit.rollout.decode import _decode_attention

NONE = set(
    "empty empty_like empty_strided as_strided view transpose t permute expand slice select unsqueeze squeeze "
    "_unsafe_view reshape resolve_conj resolve_neg detach alias unflatten flatten narrow resize_ _reshape_alias to "
    "unbind expand_as result_type view_as real lift_fresh broadcast_tensors set_ matmul linear contiguous".split()
)
LAYER = {"qwen2": 58, "llama": 58, "qwen3": 72}
REST = 19  # embedding, positions, masks, the last norm and the head


def launches(work):
    with torch.no_grad():
        work()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            work()

    def counted(event):
        return event.name.startswith("aten::") and event.name[6:] not in NONE

    def inside(event):
        return any(counted(child) or inside(child) for child in event.cpu_children)

    return Counter(e.name[6:] for e in found.events() if counted(e) and not inside(e))


def step(family, layers):
    engine = RolloutEngine(tiny_model(family, num_hidden_layers=layers))
    engine._decoder.bucketed = True
    engine.generate(ragged_prompts(), config(do_sample=True, max_new_tokens=4, eos_token_id=[]), seed=1)
    with _decode_attention(engine._decoder.base):
        return launches(engine._decoder._forward)


def test_the_counter_counts():
    x = torch.randn(3, 5)
    # A number in an operator is converted inside it, which the profiler shows in its place.
    assert sum(launches(lambda: torch.softmax((x.t() + 1).t() * 2, -1)).values()) == 3
    assert sum(launches(lambda: x.logsumexp(-1)).values()) > 5


@pytest.mark.parametrize("family", LAYER)
def test_launches_of_a_layer_and_of_the_rest(family):
    two, three = step(family, 2), step(family, 3)
    layer = sum(three.values()) - sum(two.values())
    rest = sum(two.values()) - 2 * layer
    assert layer <= LAYER[family] and rest <= REST, (layer, rest, three - two)
