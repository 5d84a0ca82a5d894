"""The rollout engine against transformers' generate and plain forwards."""

import pytest
import torch
from rollout_models import FAMILIES, config, generate, plain_logits, ragged_prompts, tiny_model
from transformers import GenerationConfig

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine import _decode as decode
from grpo_kit.models._model_facts import CHECKPOINTING

PROMPTS = ragged_prompts()


def engine_of(model, *, bucketed=False):
    """bucketed: the padded decoding that CUDA graphs need, here without graphs."""
    engine = RolloutEngine(model)
    engine._decoder.bucketed = bucketed
    return engine


def stop_ids_that_occur(model, prompts, count=1):
    """Ids that greedy decoding writes in the middle of some completions, and not in all of them."""
    free = generate(model, prompts, config(eos_token_id=2))
    writers = {}
    for row, completion in enumerate(free):
        for place, token in enumerate(completion):
            if place > 1:
                writers.setdefault(token, set()).add(prompts[row].__len__())
    return [t for t, who in writers.items() if len(who) < len(set(map(len, prompts)))][:count]


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(family, lora, bucketed):
    model = tiny_model(family, lora=lora)
    stops = stop_ids_that_occur(model, PROMPTS, 2)
    assert len(stops) == 2
    for eos in (2, stops[0], stops):
        settings = config(eos_token_id=eos)
        wanted = generate(model, PROMPTS, settings)
        assert (
            engine_of(model, bucketed=bucketed).generate(PROMPTS, settings).completion_ids
            == wanted
        )
    assert len({len(row) for row in wanted}) > 1  # rows ended at different steps
    if lora:
        with model.disable_adapter():
            assert generate(model, PROMPTS, settings) != wanted  # the adapters matter


@pytest.mark.parametrize("bucketed", [False, True])
def test_penalty_is_that_of_generate(bucketed):
    model = tiny_model()
    settings = config(repetition_penalty=1.7, max_new_tokens=20)
    # Let the short prompts want to write id 0, which also pads them: padding must not be penalised.
    liked = [generate(model, [PROMPTS[r]], settings)[0][0] for r in (3, 8)]
    with torch.no_grad():
        model.lm_head.weight[[0, liked[0]]] = model.lm_head.weight[[liked[0], 0]]
    # One by one: beside longer ones, transformers before 5.23 penalises the padding.
    wanted = [generate(model, [prompt], settings)[0] for prompt in PROMPTS]
    assert wanted != generate(model, PROMPTS, config(max_new_tokens=20))
    assert (
        engine_of(model, bucketed=bucketed).generate(PROMPTS, settings).completion_ids == wanted
    )


@pytest.mark.parametrize("bucketed", [False, True])
def test_long_completions_cross_every_bucket(bucketed):
    model = tiny_model("qwen2")
    stops = stop_ids_that_occur(model, PROMPTS, 1)
    settings = config(max_new_tokens=140, eos_token_id=stops)
    wanted = generate(model, PROMPTS, settings)
    assert max(map(len, wanted)) == 140 > min(map(len, wanted))
    assert (
        engine_of(model, bucketed=bucketed).generate(PROMPTS, settings).completion_ids == wanted
    )


def test_stop_strings_are_those_of_generate(tiny):
    model, tokenizer = tiny
    model.eval()
    prompts = [
        tokenizer(t).input_ids
        for t in ("Say one:", "A longer prompt with more words", "x")
        for _ in range(2)
    ]
    free = generate(model, prompts, config(max_new_tokens=10))
    strings = [tokenizer.decode(free[0][3:5])[1:], tokenizer.decode(free[2][6:7])]
    settings = config(max_new_tokens=10, stop_strings=strings)
    engine = engine_of(model)
    got = engine.generate(prompts, settings, tokenizer=tokenizer).completion_ids
    with_padding = generate(model, prompts, settings, tokenizer=tokenizer)
    assert [w[: len(g)] for g, w in zip(got, with_padding, strict=True)] == got
    for mine, theirs in zip(got, with_padding, strict=True):
        # generate pads behind the end
        assert len(mine) == len(theirs) or set(theirs[len(mine) :]) == {0}
    assert min(map(len, got)) < 10
    with pytest.raises(ValueError, match="tokenizer="):
        engine.generate(prompts, settings)


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}],
    ids=["plain", "all"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_entropies_are_those_of_a_plain_forward(family, options, bucketed):
    model = tiny_model(family, lora=True)
    settings = config(do_sample=True, max_new_tokens=10, **options)
    # no near-ties at the cuts
    out = engine_of(model, bucketed=bucketed).generate(PROMPTS, settings, seed=5)
    temperature = options.get("temperature", 1.0)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, out.completion_ids, strict=True)):
        logits = plain_logits(model, prompt, completion)
        policy = torch.log_softmax(logits / temperature, -1)
        chosen = torch.tensor(completion)[:, None]
        assert torch.tensor(out.policy_logprobs[row]) == pytest.approx(
            policy.gather(1, chosen)[:, 0], abs=1e-5
        )
        assert torch.tensor(out.entropies[row]) == pytest.approx(
            -(policy.exp() * policy).sum(-1), abs=1e-5
        )
        warped = torch.stack(
            [
                hf_scores(settings, prompt + completion[:t], logits[t : t + 1])[0]
                for t in range(len(completion))
            ]
        )
        sampler = torch.log_softmax(warped, -1).gather(1, chosen)[:, 0]
        assert torch.tensor(out.logprobs[row]) == pytest.approx(sampler, abs=1e-5)
    if options:
        assert out.logprobs != out.policy_logprobs


def test_greedy_reports_the_distribution_before_temperature():
    model = tiny_model()
    out = engine_of(model).generate([PROMPTS[0]], config(temperature=0.5))
    chosen = torch.tensor(out.completion_ids[0])[:, None]
    logits = plain_logits(model, PROMPTS[0], out.completion_ids[0])
    for numbers, temperature in ((out.logprobs, 1.0), (out.policy_logprobs, 0.5)):
        wanted = torch.log_softmax(logits / temperature, -1).gather(1, chosen)[:, 0]
        assert torch.tensor(numbers[0]) == pytest.approx(wanted, abs=1e-5)


def hf_scores(settings, ids, scores):
    """Through the processors transformers' generate builds for these settings."""
    settings._eos_token_tensor = None
    processors = tiny_model()._get_logits_processor(settings, input_ids_seq_length=1)
    return processors(torch.tensor([ids]), scores)


@pytest.mark.parametrize("bucketed", [False, True])
def test_same_seed_same_rollouts_whatever_shares_the_batch(bucketed):
    model = tiny_model()
    stops = stop_ids_that_occur(model, PROMPTS, 3)
    settings = config(do_sample=True, max_new_tokens=20, eos_token_id=stops)
    engine = engine_of(model, bucketed=bucketed)
    first = engine.generate(PROMPTS, settings, seed=1)
    assert engine.generate(PROMPTS, settings, seed=1).completion_ids == first.completion_ids
    assert engine.generate(PROMPTS, settings, seed=2).completion_ids != first.completion_ids
    assert len({tuple(c) for c in first.completion_ids[4:8]}) == 4  # siblings differ
    # Row ids go with the rows: without its neighbours a row writes what it wrote among them.
    kept = [0, 2, 5, 6, 9]
    alone = engine.generate(
        [PROMPTS[r] for r in kept], settings, seed=1, rows=kept
    ).completion_ids
    assert alone == [first.completion_ids[r] for r in kept]
    assert alone != engine.generate([PROMPTS[r] for r in kept], settings, seed=1).completion_ids
    torch.manual_seed(7)
    drawn = engine.generate(PROMPTS, settings).completion_ids
    torch.manual_seed(7)
    assert engine.generate(PROMPTS, settings).completion_ids == drawn != first.completion_ids


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_beginning_is_computed_once_by_the_modules_too(family, bucketed, monkeypatch):
    model = tiny_model(family)
    begin = list(range(40, 64))
    prompts = [begin + tail for tail in ([5], [5], [6, 7, 8], list(range(90, 130)), [9, 9])]
    settings = config(do_sample=True, max_new_tokens=12)
    wanted = [
        engine_of(model, bucketed=bucketed).generate([p], settings, seed=4, rows=[r])
        for r, p in enumerate(prompts)
    ]
    read, forward = [], type(model.get_decoder()).forward

    def counting(self, input_ids, **kwargs):
        read.append(tuple(input_ids.shape))
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(model.get_decoder()), "forward", counting)
    # no longer plain
    model.model.norm.register_forward_hook(lambda module, inputs, output: None)
    shared = engine_of(model, bucketed=bucketed).generate(prompts, settings, seed=4)
    assert read[:2] == [(1, 24), (4, 40)]  # the beginning, then four distinct ends
    assert shared.completion_ids == [one.completion_ids[0] for one in wanted]
    for one, other in zip(shared.policy_logprobs, wanted, strict=True):
        assert one == pytest.approx(other.policy_logprobs[0], abs=1e-5)


def test_out_of_memory_halves_the_rows_and_changes_nothing(monkeypatch, capsys):
    model = tiny_model()
    settings = config(do_sample=True)
    wanted = RolloutEngine(model).generate(PROMPTS, settings, seed=4)
    import grpo_kit.engine._decode as decode

    built = []

    class Small(decode.KVCache):
        def __init__(self, shape, size, **kwargs):
            if size.rows > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            built.append(size.rows)
            super().__init__(shape, size, **kwargs)

    monkeypatch.setattr(decode, "KVCache", Small)
    engine = RolloutEngine(model)
    got = engine.generate(PROMPTS, settings, seed=4)
    assert got.completion_ids == wanted.completion_ids
    for mine, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert "10 rows do not fit" in capsys.readouterr().out
    engine.generate(PROMPTS, settings, seed=4)
    assert "do not fit" not in capsys.readouterr().out  # it remembers what fits
    assert max(built) == 2

    monkeypatch.setattr(
        decode, "KVCache", lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError("one"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        RolloutEngine(model).generate([[5]], settings)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("room", ["back at once", "never back"])
def test_rows_that_did_not_fit_are_tried_again_after_a_while(room):
    model, settings = tiny_model(), config(do_sample=True, max_new_tokens=2)
    engine, tried, rooms = RolloutEngine(model), [], [5]
    run = engine._decoder.run

    def small_card(prompts, *args, **options):
        tried[-1].append(len(prompts))
        if len(prompts) > rooms[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(prompts, *args, **options)

    engine._decoder.run = small_card
    for _ in range(60):
        tried.append([])
        engine.generate(PROMPTS, settings, seed=4)
        if room == "back at once":
            rooms[0] = 10
    assert tried[0] == [10, 4, 6, 4, 2] and tried[1] == [4, 4, 2]
    more = [n for n, batches in enumerate(tried) if max(batches) > 5]
    assert more == ([0, *range(9, 60)] if room == "back at once" else [0, 9, 26, 59])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bucketed", [False, True])
def test_half_precision_stays_close(dtype, bucketed):
    model = tiny_model("qwen2").to(dtype)
    out = engine_of(model, bucketed=bucketed).generate(PROMPTS, config(do_sample=True), seed=0)
    for prompt, completion, logprobs in zip(
        PROMPTS, out.completion_ids, out.policy_logprobs, strict=True
    ):
        policy = torch.log_softmax(plain_logits(model, prompt, completion), -1)
        wanted = policy.gather(1, torch.tensor(completion)[:, None])[:, 0]
        gap = (torch.tensor(logprobs) - wanted).abs()
        assert gap.mean() < 0.05 and gap.max() < 0.5


@pytest.mark.parametrize("bucketed", [False, True])
def test_autocast_of_the_caller_is_followed(bucketed):
    model = tiny_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine = engine_of(model, bucketed=bucketed)
        out = engine.generate(PROMPTS, config(do_sample=True), seed=0)
        assert engine._decoder.slots.prefix.dtype == torch.bfloat16
        for prompt, completion, logprobs in zip(
            PROMPTS, out.completion_ids, out.policy_logprobs, strict=True
        ):
            policy = torch.log_softmax(plain_logits(model, prompt, completion), -1)
            wanted = policy.gather(1, torch.tensor(completion)[:, None])[:, 0]
            assert (torch.tensor(logprobs) - wanted).abs().mean() < 0.1


def test_processors_see_text_scores_and_rows():
    """A processor that forces row r to write token r + 100 and to stop after r % 3 + 1 tokens."""
    model = tiny_model()
    prompts = ragged_prompts()
    width = max(map(len, prompts))
    lengths = [r % 3 + 1 for r in range(len(prompts))]

    def force(input_ids, scores, rows):
        step = input_ids.size(1) - width
        for i, row in enumerate(rows.tolist()):
            assert (
                input_ids[i].tolist()
                == [0] * (width - len(prompts[row])) + prompts[row] + [row + 100] * step
            )
        token = torch.where(step + 1 >= torch.tensor(lengths)[rows], 2, rows + 100)
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)

    out = engine_of(model).generate(prompts, config(do_sample=True), processors=[force])
    assert out.completion_ids == [[r + 100] * (n - 1) + [2] for r, n in enumerate(lengths)]
    assert all(x == 0 for row in out.logprobs for x in row)  # certain under the sampler
    assert all(x < 0 for row in out.policy_logprobs for x in row)  # not under the policy


def test_processors_may_write_over_the_scores_or_expand_one_row():
    """The policy's numbers are those without any processor."""
    model, settings = tiny_model(), config(do_sample=True, eos_token_id=499, max_new_tokens=5)

    def banned(input_ids, scores, rows):
        return scores.index_fill(1, torch.arange(3, 300), -torch.inf)

    def banned_in_place(input_ids, scores, rows):
        scores[:, 3:300] = -torch.inf
        return scores

    wanted, got = (
        engine_of(model).generate(PROMPTS, settings, seed=1, processors=[processor])
        for processor in (banned, banned_in_place)
    )
    assert got.completion_ids == wanted.completion_ids
    assert got.policy_logprobs == wanted.policy_logprobs and got.entropies == wanted.entropies
    assert all(x > 0 for row in got.entropies for x in row)

    def the_same_for_all(input_ids, scores, rows):
        return torch.where(torch.arange(scores.size(1)) == 77, 0.0, -torch.inf).expand_as(
            scores
        )

    out = engine_of(model).generate(PROMPTS, settings, seed=1, processors=[the_same_for_all])
    assert {token for row in out.completion_ids for token in row} == {77}


def test_everything_is_put_back_whatever_happens():
    model = tiny_model(lora=True).train()
    model.base_model.model.model.layers[0].eval()
    getattr(model.base_model.model, f"{CHECKPOINTING}_enable")()
    before = [m.training for m in model.modules()]
    engine = RolloutEngine(model)
    wanted = engine.generate(PROMPTS, config()).completion_ids

    def interrupt(*args):
        assert not model.training
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, config(), processors=[interrupt])
    assert [m.training for m in model.modules()] == before
    assert model.config._attn_implementation == "sdpa"
    assert (
        engine.generate(PROMPTS, config()).completion_ids
        == wanted
        == generate(model.eval(), PROMPTS, config())
    )
    engine.release()
    assert engine._decoder.slots is None
    assert engine.generate(PROMPTS, config()).completion_ids == wanted


def test_weights_changed_in_place_are_used_at_once():
    model = tiny_model()
    engine = RolloutEngine(model)
    before = engine.generate(PROMPTS, config()).completion_ids
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)
    after = engine.generate(PROMPTS, config()).completion_ids
    assert after != before and after == generate(model, PROMPTS, config())


def test_real_model_writes_what_generate_writes(smol):
    model, tokenizer = smol
    prompts = [tokenizer("The capital of France is").input_ids] * 2 + [
        tokenizer("1, 2, 3,").input_ids
    ]
    settings = config(max_new_tokens=6, pad_token_id=2)
    assert RolloutEngine(model.eval()).generate(prompts, settings).completion_ids == generate(
        model, prompts, settings
    )


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompt_ids is empty"),
        ([[5], []], {}, r"prompt_ids\[1\] has no tokens"),
        ([[5], [5] * 250], {}, r"prompt_ids\[1\] has 250 tokens.*262.*256"),
        ([[5]], {"max_new_tokens": None}, "max_new_tokens=None"),
        ([[5]], {"temperature": 0.0}, "temperature=0.0 must be a number above 0"),
        ([[5]], {"num_beams": 3}, "num_beams=3"),
    ],
)
def test_bad_input_is_named(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        RolloutEngine(tiny_model()).generate(prompts, config(do_sample=True, **options))


def test_weights_that_are_not_finite_are_named():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        RolloutEngine(model).generate([[5]], config(do_sample=True))


@pytest.mark.parametrize("bucketed", [False, True])
def test_a_model_that_was_mended_is_believed(bucketed):
    model = tiny_model()
    engine, weight = (
        engine_of(model, bucketed=bucketed),
        model.model.layers[0].self_attn.v_proj.weight,
    )
    wanted = engine.generate(PROMPTS, config()).completion_ids
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.generate(PROMPTS, config())
    with torch.no_grad():
        weight.copy_(good)
    assert engine.generate(PROMPTS, config()).completion_ids == wanted


def test_a_cards_batches_of_prompts_hold_so_many_tokens(monkeypatch):
    """What all begin with is there once a prompt."""
    monkeypatch.setattr(decode, "_PREFILL_TOKENS", 80)
    decoder = engine_of(tiny_model(), bucketed=True)._decoder
    assert list(decoder._chunks([20, 20, 20, 20, 20], 16)) == [(0, 4), (4, 5)]
    assert list(decoder._chunks([20, 20, 20, 20, 20], 0)) == [(0, 4), (4, 5)]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"bad_words_ids": [[3]]}, "bad_words_ids"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"min_new_tokens": 3}, "min_new_tokens"),
        ({"suppress_tokens": [7]}, "suppress_tokens"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
    ],
)
def test_settings_the_engine_does_not_know_are_named(options, word):
    assert word in RolloutEngine.unsupported(
        tiny_model(), GenerationConfig(max_new_tokens=3, **options)
    )


def test_models_the_engine_does_not_know_are_named():
    ask = RolloutEngine.unsupported
    assert ask(tiny_model(lora=True), config()) is None
    assert (
        ask(
            tiny_model(),
            GenerationConfig(max_new_tokens=3, disable_compile=True, typical_p=1.0),
        )
        is None
    )
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "'dynamic'" in ask(tiny_model(rope_parameters=rope), config())
    checkpoint = tiny_model()
    checkpoint.generation_config.no_repeat_ngram_size = 3
    assert "checkpoint" in ask(checkpoint, config())
    assert "Linear" in ask(torch.nn.Linear(2, 2), config())
    assert "float64" in ask(tiny_model().double(), config())
