"""Sizes from a model's name: published numbers of parameters, and what 4-bit weights are made wide for."""

from dataclasses import replace

import pytest

from grpo_kit.more.memory._request import counted
from grpo_kit.more.memory.plan import plan_memory
from grpo_kit.trainer.presets import preset

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "published"),  # of the safetensors files on the hub
    [
        ("0.5B", 494_032_768),
        ("1.5B", 1_543_714_304),
        ("3B", 3_085_938_688),
        ("7B", 7_615_616_512),
        ("14B", 14_770_033_664),
        ("32B", 32_763_876_352),
        ("72B", 72_706_203_648),
    ],
)
def test_models_known_by_name_have_the_published_number_of_parameters(size, published):
    assert counted(f"Qwen/Qwen2.5-{size}-Instruct", 16).all == published


def test_four_bit_weights_are_made_wide_one_matrix_at_a_time():
    large = replace(
        preset("gpu24", max_completion_tokens=256), model="Qwen/Qwen2.5-72B-Instruct"
    )
    update = plan_memory(large, 80, tuning="qlora").parts["update"]
    assert update["head and backward"] < 20 * GIB  # the casts of all layers would be 131
    assert update["head and backward"] > 8192 * 29568 * 2
