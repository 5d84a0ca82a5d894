"""How many sequences are decoded at once where nobody says: by free memory, and nothing that is written changes."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

import grpo_kit as kit
from grpo_kit.engine._kv_cache import row_bucket
from grpo_kit.engine.memory._free import (
    _CARD_ROWS,
    MOST_ROWS,
    UNKNOWN_ROWS,
    decode_bytes,
    rows_at_once,
)
from grpo_kit.evaluation import generate_and_score

SIZES = {"prompt_tokens": 90, "completion_tokens": 10}


def token_bytes(model):
    """Keys and values of one token."""
    c = model.config
    return (
        2
        * c.num_hidden_layers
        * c.num_key_value_heads
        * (c.hidden_size // c.num_attention_heads)
        * 4
    )


def row_bytes(model, samples=1):
    """Of one sequence, counted by hand: keys and values of its tokens, and a step's logits or a prompt's prefill."""
    c = model.config
    head = c.hidden_size // c.num_attention_heads
    layer = (3 * c.intermediate_size + 4 * c.hidden_size + 2 * head) * 4 + token_bytes(model)
    sampling = c.vocab_size * (2 * 4 + 4 + 4 + 25 + 4 / samples)  # by top-p, which takes most
    return (90 / samples + 10) * token_bytes(model) + max(sampling, 90 / samples * layer)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("rows", [4, 20, 60])
def test_as_many_rows_as_nine_tenths_of_free_memory_hold(tiny, rows, samples):
    need = rows * row_bytes(tiny[0], samples) / 0.9
    assert rows_at_once(tiny[0], need * 1.001, samples=samples, **SIZES) == rows
    assert rows_at_once(tiny[0], need * 0.999, samples=samples, **SIZES) == rows - 1


def test_bounds(tiny):
    assert rows_at_once(tiny[0], 0, **SIZES) == 1  # there is no less
    assert rows_at_once(tiny[0], 2**50, **SIZES) == MOST_ROWS["cpu"]
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=50))
    assert rows_at_once(gpt2, 0, **SIZES) == UNKNOWN_ROWS


def test_a_card_gets_numbers_that_the_engine_does_not_pad():
    assert (
        all(row_bucket(rows) == rows for rows in _CARD_ROWS)
        and _CARD_ROWS[0] == MOST_ROWS["cuda"]
    )
    # whose vocabulary takes most of a step
    model = kit.load_policy("tiny-random", quiet=True)[0]

    class OnACard(type(model)):
        device = torch.device("cuda")

    model.__class__ = OnACard
    # prompts of 90 tokens take 128 there
    need = 129 * (row_bytes(model) + 38 * token_bytes(model)) / 0.9
    assert rows_at_once(model, need, **SIZES) == 128


def test_models_that_transformers_decodes_share_nothing(tiny, asked, monkeypatch):
    model, tokenizer = tiny
    seen, inner = [], generate_and_score.rows_at_once
    monkeypatch.setattr(
        generate_and_score,
        "rows_at_once",
        lambda *a, **how: seen.append(how) or inner(*a, **how),
    )
    monkeypatch.setattr(
        generate_and_score.RolloutEngine,
        "unsupported",
        lambda *args: "its layers have another state",
    )
    monkeypatch.setattr(generate_and_score, "free_bytes", lambda device: 2**50)
    task = kit.tasks.largest(n_train=4, n_held_out=4)
    kit.evaluate(model, tokenizer, task, samples=2, k=(1,), max_completion_tokens=4)
    assert all("samples" not in how for how in seen) and asked[0] <= UNKNOWN_ROWS


def test_keys_and_values_are_those_of_qwens_table():
    """28,672 bytes a token of Qwen2.5-1.5B in bfloat16: 28 layers, 2 heads of 128 numbers."""
    qwen = LlamaConfig(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
    )
    found = decode_bytes(qwen, 2, rows=64, prompts=8, prompt_tokens=256, completion_tokens=512)
    assert found["keys and values"] == 28_672 * (8 * 256 + 64 * 512)


@pytest.fixture
def asked(monkeypatch):
    """Batch sizes that reach the engine, on a machine with room for 3 rows unless `room` says otherwise."""
    seen, complete = [], generate_and_score.complete

    def watched(*args, batch_size, **how):
        seen.append(batch_size)
        return complete(*args, batch_size=batch_size, **how)

    monkeypatch.setattr(generate_and_score, "complete", watched)
    return seen


def test_evaluate_asks_free_memory_and_writes_the_same(tiny, asked, monkeypatch):
    model, tokenizer = tiny
    task = kit.tasks.largest(n_train=4, n_held_out=8)
    longest = max(
        len(tokenizer(prompt)["input_ids"]) for prompt in task.render(tokenizer, task.held_out)
    )
    sizes = {"prompt_tokens": longest, "completion_tokens": 8}
    room = next(b for b in range(10**5, 10**9, 10**5) if rows_at_once(model, b, **sizes) == 3)
    how = {"samples": 2, "k": (1, 2), "max_completion_tokens": 8, "seed": 1}
    by_number = kit.evaluate(model, tokenizer, task, batch_size=5, **how)
    monkeypatch.setattr(generate_and_score, "free_bytes", lambda device: room)
    by_memory = kit.evaluate(model, tokenizer, task, **how)
    # two samples of a prompt share its keys
    assert asked[:2] == [5, 5] and asked[2] == 3 and asked[3] >= 3
    assert by_number.rows.equals(by_memory.rows)


def test_free_memory_is_that_of_the_models_device(tiny, asked, monkeypatch):
    seen = []
    monkeypatch.setattr(
        generate_and_score, "free_bytes", lambda device: seen.append(device) or 2**40
    )
    task = kit.tasks.largest(n_train=4, n_held_out=4)
    kit.readiness(*tiny, task, samples=2, group_size=2, max_completion_tokens=4, seconds=None)
    kit.length_probe(*tiny, task, max_completion_tokens=4)
    assert seen == [torch.device("cpu")] * 2 and asked == [MOST_ROWS["cpu"]] * 2


def test_a_number_is_obeyed_or_refused(tiny, asked):
    task = kit.tasks.largest(n_train=4, n_held_out=4)
    kit.evaluate(*tiny, task, batch_size=300, max_completion_tokens=4)
    assert asked == [300]
    with pytest.raises(ValueError, match="batch_size=0 must be a whole number of at least 1"):
        kit.evaluate(*tiny, task, batch_size=0, max_completion_tokens=4)


def test_sample_asks_too(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(generate_and_score, "free_bytes", lambda device: 0)
    task = kit.tasks.largest(n_train=3, n_held_out=1)
    how = {"samples": 2, "max_completion_tokens": 4}
    one_by_one = kit.scored_samples(*tiny, task, folder=tmp_path / "a", **how)
    monkeypatch.undo()
    at_once = kit.scored_samples(*tiny, task, folder=tmp_path / "b", **how)
    assert one_by_one.table.equals(at_once.table)
