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

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine._attention import NAME
from grpo_kit.engine._supported_models import attention_named

NONE = set(
    "empty empty_like empty_strided as_strided view transpose t permute expand slice select unsqueeze squeeze "
    "_unsafe_view reshape resolve_conj resolve_neg detach alias unflatten flatten narrow resize_ _reshape_alias to "
    "unbind expand_as result_type view_as real lift_fresh broadcast_tensors set_ matmul linear contiguous "
    "mT new_empty type_as".split()
)
# One kernel on a card, whatever they are made of on a CPU.
ONE = set("rms_norm index_copy_ mm addmm addmm_ bmm baddbmm index_select cat stack".split())
# By modules 58, 58, 72. One more where scores are cast to 16 bits; three fewer for a llama without biases.
LAYER = {"qwen2": 28, "llama": 30, "qwen3": 29}
LORA = 10  # more, with adapters on all seven
REST = 21  # embedding, positions, masks, the last norm and the head


def launches(work):
    with torch.no_grad():
        work()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            work()

    def counted(event):
        return event.name.startswith("aten::") and event.name[6:] not in NONE

    def kernels(event):
        if event.name[6:] in ONE and counted(event):
            return Counter([event.name[6:]])
        below = sum(map(kernels, event.cpu_children), Counter())
        return below or Counter([event.name[6:]] * counted(event))

    return sum((kernels(e) for e in found.events() if e.cpu_parent is None), Counter())


def step(family, layers, lora=False):
    engine = RolloutEngine(tiny_model(family, num_hidden_layers=layers, lora=lora))
    engine._decoder.bucketed = True
    engine.generate(
        ragged_prompts(), config(do_sample=True, max_new_tokens=4, eos_token_id=[]), seed=1
    )
    with attention_named(engine._decoder.base, NAME):
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


def test_launches_of_adapters():
    two, three = step("qwen2", 2, lora=True), step("qwen2", 3, lora=True)
    assert sum(three.values()) - sum(two.values()) <= LAYER["qwen2"] + LORA, three - two
