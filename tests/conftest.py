"""Models every test may ask for: a tiny random Llama and the real SmolLM2-135M-Instruct."""

import pytest

from grpo_kit.models import load_policy


@pytest.fixture(scope="session")
def smol_tokenizer():
    return load_policy("tiny-random", quiet=True)[1]


@pytest.fixture
def tiny():
    return load_policy("tiny-random", quiet=True)


@pytest.fixture(scope="session")
def smol():
    return load_policy("smollm2-135m-instruct", quiet=True)
