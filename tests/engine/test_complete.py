"""What prompts share is computed once; the completions are those of one prompt at a time, without a cache."""

import numpy as np
import pytest
import torch
from rollout_models import config, generate, ragged_prompts, tiny_model
from transformers import GenerationConfig

from benchmarks.architectures import tiny
from grpo_kit._support import cuda
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine import _first_use as first_use
from grpo_kit.engine import complete as decoding
from grpo_kit.engine._decode import Decoder
from grpo_kit.engine.complete import complete, row_batches
from grpo_kit.engine.cpu._kv_prefill import TreeKVPrefill, common_length
from grpo_kit.engine.sampling import Sampler


@pytest.fixture
def untried(monkeypatch, tmp_path):
    """This machine, as if it were a card that nobody has tried."""
    monkeypatch.setattr(cuda, "may_fail", lambda device: True)
    monkeypatch.setattr(first_use, "cache_folder", lambda: tmp_path)


class Numbers:
    """A tokenizer of token ids written as text: "5 7" is [5, 7]."""

    eos_token_id, pad_token_id = 2, 0

    def __call__(self, texts):
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


def texts(*tails, shared=24, seed=3):
    """Prompts that begin with the same `shared` tokens."""
    begin = np.random.default_rng(seed).integers(3, 500, shared).tolist()
    return [" ".join(map(str, [*begin, *tail])) for tail in tails]


# some are prefixes of others
PROMPTS = texts([5], [5, 6, 7, 8], [9, 10], [5, 6], list(range(30, 45)))


def by_hand(model, prompt, limit):
    """Greedy, no cache, no padding, no sharing."""
    ids = [int(word) for word in prompt.split()]
    start = len(ids)
    with torch.no_grad():
        while len(ids) - start < limit and ids[-1] != Numbers.eos_token_id:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return " ".join(map(str, ids[start:]))


@pytest.fixture
def computed(monkeypatch):
    """Tokens that each batch of prompts had the layers compute."""
    seen, prefill = [], TreeKVPrefill.__call__

    def counting(*args, **options):
        made = prefill(*args, **options)
        seen.append(made.computed)
        return made

    monkeypatch.setattr(TreeKVPrefill, "__call__", counting)
    return seen


def distinct_beginnings(prompts):
    return len({tuple(p.split()[: n + 1]) for p in prompts for n in range(len(p.split()))})


@pytest.mark.parametrize("batch_size", [1, 2, 32])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_with_a_shared_beginning(family, batch_size, computed):
    model = tiny_model(family)
    made = complete(model, Numbers(), PROMPTS, max_completion_tokens=8, batch_size=batch_size)
    assert [c.text for c in made] == [by_hand(model, p, 8) for p in PROMPTS]
    assert len({c.text for c in made}) > 1  # the prompts' own ends matter
    if batch_size == 32:
        assert computed == [distinct_beginnings(PROMPTS)]
    assert len(computed) == -(-len(PROMPTS) // batch_size)


def test_batches_share_a_long_beginning_too(computed):
    model = tiny_model()
    prompts = texts([5], [5, 6], [9, 10], [5, 6, 7], [11], shared=120)
    made = complete(model, Numbers(), prompts, max_completion_tokens=4, batch_size=2)
    assert [c.text for c in made] == [by_hand(model, p, 4) for p in prompts]
    assert sum(computed) < 120 + 5 * 3  # once for all three batches


def test_greedy_with_adapters(computed):
    model = tiny_model(lora=True)
    made = complete(model, Numbers(), PROMPTS, max_completion_tokens=6)
    assert [c.text for c in made] == [by_hand(model, p, 6) for p in PROMPTS]
    assert computed == [distinct_beginnings(PROMPTS)]
    with model.disable_adapter():
        assert made != complete(model, Numbers(), PROMPTS, max_completion_tokens=6)


@pytest.mark.parametrize("pad", [0, 2, None])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_is_transformers_own_where_nothing_is_shared(attention, pad):
    model = tiny_model("qwen2", attn_implementation=attention)
    prompts = ragged_prompts(lengths=(1, 3, 14, 40, 1), groups=(1,) * 5)
    free = generate(model, prompts, config(max_new_tokens=10))
    ends = [free[3][4], 2]  # pad = 2: padding is an end
    model.generation_config.eos_token_id = ends
    expected = generate(model, prompts, config(max_new_tokens=10, eos_token_id=ends))
    tokenizer = Numbers()
    tokenizer.pad_token_id = pad
    as_text = [" ".join(map(str, prompt)) for prompt in prompts]
    for batch_size in (2, 32):
        made = complete(
            model, tokenizer, as_text, max_completion_tokens=10, batch_size=batch_size
        )
        assert [c.text for c in made] == [" ".join(map(str, tokens)) for tokens in expected]
        assert [c.cut_off for c in made] == [tokens[-1] not in ends for tokens in expected]
    assert expected[3] != free[3]


def test_a_tokenizer_and_a_model_without_ends():
    model = tiny_model()
    model.generation_config.eos_token_id = None
    tokenizer = Numbers()
    tokenizer.eos_token_id = tokenizer.pad_token_id = None
    how = [{"temperature": 0.0}, {"temperature": 1.0, "samples": 2}]
    for made in (
        complete(model, tokenizer, PROMPTS, max_completion_tokens=3, **h) for h in how
    ):
        assert {(c.tokens, c.cut_off) for c in made} == {(3, True)}


def test_one_text_in_place_of_a_list_is_refused():
    with pytest.raises(ValueError, match="prompts='5 7' is one text"):
        complete(tiny_model(), Numbers(), "5 7", max_completion_tokens=2)


@pytest.mark.parametrize(
    ("prompts", "expected", "why"),
    [
        (texts([5], [6], shared=16), [16], "long enough to pay"),
        (texts([5], [6], shared=15), [], "too short to pay"),
        (texts([5]), [], "one prompt shares with nobody"),
        (
            texts([], [6], [6, 7]),
            [23],
            "one is the beginning of all others: it keeps its last token",
        ),
        (texts([5], [5]), [], "alike: one prompt, computed once anyway"),
        (texts([5]) + texts([5], seed=4), [], "nothing in common"),
    ],
)
def test_when_the_modules_share_a_beginning(prompts, expected, why, monkeypatch):
    computed, compute = [], Decoder._prefix_cache
    monkeypatch.setattr(
        Decoder,
        "_prefix_cache",
        lambda self, ids: computed.extend([len(ids)] * bool(ids)) or compute(self, ids),
    )
    model = tiny_model()
    # no longer plain functions
    model.model.norm.register_forward_hook(lambda module, inputs, output: None)
    made = complete(model, Numbers(), prompts, max_completion_tokens=4)
    assert [c.text for c in made] == [by_hand(model, p, 4) for p in prompts]
    assert computed == expected, why


def test_another_state_than_keys_is_left_to_transformers(computed):
    model = tiny("lfm2")
    assert "kind conv" in RolloutEngine.unsupported(model, GenerationConfig())
    made = complete(model, Numbers(), PROMPTS, max_completion_tokens=6)
    assert [c.text for c in made] == [by_hand(model, p, 6) for p in PROMPTS] and computed == []
    sampled = complete(
        model, Numbers(), PROMPTS, max_completion_tokens=4, samples=2, temperature=1.0
    )
    assert len(sampled) == 10 and len({c.text for c in sampled}) > 5


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 32])
def test_samples_are_the_engines_whatever_the_batch(lora, batch_size):
    model = tiny_model(lora=lora)
    made = complete(
        model,
        Numbers(),
        PROMPTS,
        max_completion_tokens=6,
        samples=3,
        temperature=0.7,
        batch_size=batch_size,
        seed=5,
    )
    rows = [ids for ids in Numbers()(PROMPTS)["input_ids"] for _ in range(3)]
    how = dict(
        do_sample=True, temperature=0.7, top_k=0, top_p=1.0, max_new_tokens=6, eos_token_id=2
    )
    expected = (
        RolloutEngine(model).generate(rows, GenerationConfig(**how), seed=5).completion_ids
    )
    assert [c.text for c in made] == [" ".join(map(str, ids)) for ids in expected]
    assert [c.tokens for c in made] == [len(ids) for ids in expected]
    assert [c.cut_off for c in made] == [ids[-1] != 2 for ids in expected]


def test_sampled_first_tokens_follow_the_models_distribution():
    model = tiny_model()
    (prompt,) = texts([5])
    n = 4000
    made = complete(
        model,
        Numbers(),
        [prompt],
        max_completion_tokens=1,
        samples=n,
        temperature=2.0,
        batch_size=1000,
    )
    counts = np.bincount([int(c.text) for c in made], minlength=500)
    with torch.no_grad():
        logits = model(torch.tensor(Numbers()([prompt])["input_ids"])).logits[0, -1]
    p = torch.softmax(logits / 2.0, -1).numpy().astype(float)
    likely = p > 0.002
    assert np.all(np.abs(counts - n * p)[likely] < 5 * np.sqrt(n * p * (1 - p))[likely])


def test_samples_of_a_broken_model_are_refused():
    model = tiny_model()
    model.get_output_embeddings().weight.data[7] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        complete(model, Numbers(), PROMPTS, max_completion_tokens=2, samples=2, temperature=1.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_is_as_before(temperature):
    model = tiny_model(lora=True).train()
    model.get_base_model().generation_config.repetition_penalty = 7.0
    attention = model.config._attn_implementation
    state, settings = torch.get_rng_state(), model.get_base_model().generation_config
    one, two = (
        complete(
            model,
            Numbers(),
            PROMPTS,
            max_completion_tokens=4,
            temperature=temperature,
            samples=1 + bool(temperature),
        )
        for _ in range(2)
    )
    # dropout was off: the same twice
    assert one == two and all(module.training for module in model.modules())
    assert (
        torch.equal(torch.get_rng_state(), state)
        and model.get_base_model().generation_config is settings
    )
    assert settings.repetition_penalty == 7.0 and model.config._attn_implementation == attention


def test_rows_are_parted_only_where_a_prompt_has_too_many():
    prompts = [[1]] * 3 + [[2]] * 2 + [[3]] * 7
    assert row_batches(prompts, 5) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert row_batches(prompts, 4) == [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10, 11]]
    assert common_length([[1] * 20 + [2], [1] * 18 + [3]]) == 18


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"prompts\[1\] has no tokens"):
        complete(tiny_model(), Numbers(), ["5", ""], max_completion_tokens=2)


def test_rows_that_end_leave_the_batch_and_the_others_go_on():
    model = tiny_model("qwen2")
    free = [[int(word) for word in by_hand(model, p, 9).split()] for p in PROMPTS]
    lengths = lambda end: len({len(decoding.up_to_end(tokens, {end})) for tokens in free})  # noqa: E731
    end = max(sorted(set(sum(free, []))), key=lengths)  # the token that parts the rows most
    model.generation_config.eos_token_id = end
    ends = {2, end}
    widths = []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    made = complete(model, Numbers(), PROMPTS, max_completion_tokens=9)
    expected = [decoding.up_to_end(tokens, ends) for tokens in free]
    assert [c.text for c in made] == [" ".join(map(str, tokens)) for tokens in expected]
    left = [
        sum(len(tokens) > step for tokens in expected)
        for step in range(max(map(len, expected)))
    ]
    assert widths == [1, *left] and len(set(left)) > 2


# ---- a card that fails ----------------------------------------------------------------------------------------


def no_kernel(self, *args, **kwargs):
    raise RuntimeError("no valid triton configs for this card")


def test_where_the_engine_fails_on_a_card_transformers_takes_over(untried, monkeypatch):
    """Before training nothing else would catch it: readiness and the first evaluation come before the first step."""
    model, other = tiny_model(), tiny_model()
    expected = [c.text for c in complete(model, Numbers(), PROMPTS, max_completion_tokens=6)]
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "run", no_kernel)
        with pytest.warns(
            UserWarning, match="no valid triton configs.*transformers' generate.*issue"
        ):
            made = complete(model, Numbers(), PROMPTS, max_completion_tokens=6, batch_size=2)
    assert [c.text for c in made] == expected == [by_hand(model, p, 6) for p in PROMPTS]
    # nobody tries it again
    assert "failed here before" in RolloutEngine.unsupported(model, GenerationConfig())
    assert RolloutEngine.unsupported(other, GenerationConfig()) is None
    assert [
        c.text for c in complete(model, Numbers(), PROMPTS, max_completion_tokens=6)
    ] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("part", ["right", "wrong", "failing"])
def test_where_the_engine_is_silently_wrong_on_a_card_transformers_takes_over(
    temperature, part, untried, monkeypatch
):
    """The accuracy before training is read off these completions: found out at step 1 would be too late."""
    model, how = tiny_model(), dict(max_completion_tokens=6, temperature=temperature)
    inner = Sampler.__call__

    def flatter(self, logits, *rest, **options):
        return inner(self, logits * 0.8, *rest, **options)

    if part == "right":
        complete(model, Numbers(), PROMPTS, **how)
        assert RolloutEngine.unsupported(model, GenerationConfig()) is None
        return
    monkeypatch.setattr(Sampler, "__call__", flatter if part == "wrong" else no_kernel)
    said = (
        "engine: differs .off by"
        if part == "wrong"
        else "engine: failed .RuntimeError: no valid triton"
    )
    with pytest.warns(UserWarning, match=said + ".*issue"):
        made = complete(model, Numbers(), PROMPTS, **how)
    assert "compared with its own forward pass" in RolloutEngine.unsupported(
        model, GenerationConfig()
    )
    if not temperature:
        assert [c.text for c in made] == [by_hand(model, p, 6) for p in PROMPTS]


def test_the_engine_is_looked_at_once_a_kind_of_model_and_on_a_card_only(monkeypatch, tmp_path):
    looked = []
    inner = first_use._plain
    monkeypatch.setattr(first_use, "_plain", lambda *a, **k: looked.append(1) or inner(*a, **k))
    model = tiny_model()
    complete(model, Numbers(), PROMPTS, max_completion_tokens=4)
    assert not looked
    monkeypatch.setattr(cuda, "may_fail", lambda device: True)
    monkeypatch.setattr(first_use, "cache_folder", lambda: tmp_path)
    for each in (model, model, tiny_model()):
        complete(each, Numbers(), PROMPTS, max_completion_tokens=4, samples=2, temperature=1.0)
    assert len(looked) == 8  # four completions, and again moved


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("compared", [False, True])
def test_a_full_memory_and_a_press_are_not_the_engines_fault(
    error, compared, untried, monkeypatch
):
    def fails(self, *args, **kwargs):
        raise error

    model = tiny_model()
    if compared:
        assert RolloutEngine.unsupported(model, GenerationConfig()) is None
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(Decoder, "run", fails)
        complete(model, Numbers(), PROMPTS[:1], max_completion_tokens=2, batch_size=1)
    assert RolloutEngine.unsupported(model, GenerationConfig()) is None


def test_on_a_cpu_a_failing_engine_is_heard(monkeypatch):
    monkeypatch.setattr(Decoder, "run", no_kernel)
    with pytest.raises(RuntimeError, match="no valid triton"):
        complete(tiny_model(), Numbers(), PROMPTS, max_completion_tokens=2)


def test_a_model_that_is_nan_itself_is_said_to_be(untried):
    model = tiny_model()
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="weights hold a NaN"):
        complete(model, Numbers(), PROMPTS, max_completion_tokens=2)
