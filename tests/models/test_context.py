"""The model's context: its length, where a prompt just fits, and that each caller names what does not."""

import math
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine._supported_models import check_room
from grpo_kit.models import load_policy
from grpo_kit.models._model_facts import check_context, context_length


def model_of(**config):
    inner = SimpleNamespace(**config)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: inner))


def test_length():
    model, _ = load_policy("tiny-random", quiet=True)
    assert context_length(model) == 1024
    assert context_length(load_policy("tiny-random", tuning="lora", quiet=True)[0]) == 1024
    assert context_length(model_of(max_position_embeddings=8)) == 8
    assert (
        context_length(model_of())
        == context_length(model_of(max_position_embeddings=None))
        == math.inf
    )


def test_a_prompt_and_its_completion_fill_the_context_and_no_more():
    check_context(1024, 1000, 24, where="it", mend="drop it")
    check_context(math.inf, 10**9, 10**9, where="it", mend="drop it")
    with pytest.raises(ValueError) as caught:
        check_context(
            1024, 1000, 25, where="prompts[3]", length="max_new_tokens", mend="drop it"
        )
    assert str(caught.value) == (
        "prompts[3] has 1000 tokens; with max_new_tokens=25 that is 1025, which exceeds the model's context of 1024: "
        "drop it"
    )


def generate(model, ids, limit):
    RolloutEngine(model).generate(ids, GenerationConfig(max_new_tokens=limit, eos_token_id=[]))


@pytest.mark.parametrize("check", [check_room, generate])
def test_callers_check_at_the_same_length(check):
    model, _ = load_policy("tiny-random", quiet=True)
    check(model, [[5], [5] * 1000], 24)
    with pytest.raises(
        ValueError, match=r"\[1\] has 1000 tokens; .*=25 that is 1025, .* context of 1024"
    ):
        check(model, [[5], [5] * 1000], 25)
