"""Graphs from rollout to rollout, on a stand-in for CUDA's that tells every read of memory that was given back."""

import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from fake_cuda import FakeCuda, ReadsFreedMemory
from rollout_models import config, ragged_prompts, tiny_model

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.card._graphs import AutocastCache, DecodeGraphs

PROMPTS = ragged_prompts()
TOKENS = 6


def engine_of(model, *, graphs=True):
    """Bucketed decoding as on a card; graphs: with graphs, of the stand-in."""
    engine = RolloutEngine(model)
    engine._decoder.bucketed = True
    if graphs:
        engine._decoder.graphs = DecodeGraphs(FakeCuda())
    return engine


def autocast(on):
    return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()


def rollout(engine, cast=False, **options):
    settings = config(
        **{"do_sample": True, "max_new_tokens": TOKENS, "eos_token_id": [], **options}
    )
    with autocast(cast):
        out = engine.generate(PROMPTS, settings, seed=1)
    return out.completion_ids, out.policy_logprobs


def counts(engine):
    return engine._decoder.graphs.captures, engine._decoder.graphs.replays


def step(model):
    """In place, as an optimizer's."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn_like(p))


KINDS = {
    "float32": (dict(), False),
    "float32 under autocast": (dict(), True),
    "tied float32 under autocast": (dict(tie_word_embeddings=True), True),
    "bfloat16": (dict(), False),
    "adapters under autocast": (dict(lora=True), True),
}


def model_of(kind):
    options, cast = KINDS[kind]
    model = tiny_model("qwen2", **options)
    return (model.to(torch.bfloat16) if kind == "bfloat16" else model), cast


@pytest.mark.parametrize("kind", KINDS)
def test_weights_updated_in_place_are_replayed_and_nothing_is_captured_again(kind):
    model, cast = model_of(kind)
    engine, plain = engine_of(model), engine_of(model, graphs=False)
    seen = []
    for _ in range(3):
        made = rollout(engine, cast)
        assert made == rollout(plain, cast)
        assert made not in seen, "the step changes what is written"
        seen.append(made)
        step(model)
    assert counts(engine) == (1, 3 * (TOKENS - 1))
    engine.release()
    assert rollout(engine, cast) == rollout(plain, cast)
    assert counts(engine)[0] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_autocasts(kind):
    """Bit for bit those of decoding by the plain engine, whose casts are autocast's own."""
    model, cast = model_of(kind)
    plain = engine_of(model, graphs=False)
    plain._casts.instead_of_autocasts = lambda device: nullcontext()
    assert rollout(engine_of(model), cast) == rollout(plain, cast)


def test_autocasts_own_copies_would_be_read_after_they_are_gone(monkeypatch):
    """What the copies are for, and that the stand-in tells."""
    monkeypatch.setattr(
        AutocastCache, "instead_of_autocasts", lambda self, device: nullcontext()
    )
    engine = engine_of(tiny_model("qwen2"))
    rollout(engine, True)
    with pytest.raises(ReadsFreedMemory):
        rollout(engine, True)


def replaced(model):
    """The same numbers elsewhere; what lay there before is no longer theirs."""
    for p in model.parameters():
        old, p.data = p.data, p.data.clone()
        old.fill_(torch.nan)


CHANGES = {
    "loaded by new tensors": replaced,
    "another dtype": lambda model: model.to(torch.float16),
    "another dtype and back": lambda model: model.double().float(),
    "adapters off": lambda model: model.disable_adapter_layers(),
    "adapters merged": lambda model: model.merge_adapter(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cast", [False, True])
def test_what_moves_or_switches_is_captured_again(change, cast):
    model = tiny_model("qwen2", lora=change.startswith("adapters"))
    engine, plain = engine_of(model), engine_of(model, graphs=False)
    rollout(engine, cast)
    assert counts(engine)[0] == 1
    CHANGES[change](model)
    assert rollout(engine, cast) == rollout(plain, cast)
    assert counts(engine)[0] == 2


def test_autocast_on_and_off_is_captured_again():
    model = tiny_model("qwen2")
    engine, plain = engine_of(model), engine_of(model, graphs=False)
    for number, cast in enumerate((True, False, True), start=1):
        assert rollout(engine, cast) == rollout(plain, cast)
        assert counts(engine)[0] == number


def test_an_adapter_switched_is_captured_again():
    model = tiny_model("qwen2", lora=True)
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("default")
    engine, plain = engine_of(model), engine_of(model, graphs=False)
    first = rollout(engine, True)
    model.set_adapter("other")
    assert rollout(engine, True) == rollout(plain, True) != first
    assert counts(engine)[0] == 2


def test_shapes_that_rows_and_columns_come_in_and_what_they_hold():
    """Rows end one by one: one capture a bucket of rows, none at the second rollout."""
    model = tiny_model("qwen2")
    engine, plain = engine_of(model), engine_of(model, graphs=False)
    ends = dict(eos_token_id=list(range(3, 500, 25)), max_new_tokens=70)
    wanted = rollout(plain, True, **ends)
    assert rollout(engine, True, **ends) == wanted
    captured, replays = counts(engine)
    rows = {shape[0] for shape in engine._decoder.graphs._graphs}
    assert captured == len(engine._decoder.graphs._graphs) >= 4 and rows <= {
        1,
        2,
        3,
        4,
        6,
        8,
        12,
    }
    assert {shape[1] for shape in engine._decoder.graphs._graphs} <= {64, 70}
    assert rollout(engine, True, **ends) == wanted
    assert counts(engine) == (captured, 2 * replays)
    decoder, linears = (
        engine._decoder,
        [m for m in model.modules() if isinstance(m, torch.nn.Linear)],
    )
    weights = sum(p.numel() for m in linears for p in m.parameters())
    assert engine._casts.nbytes() == 2 * weights
    logits = 12 * 500 * decoder.graphs._logits.element_size()
    assert decoder.graphs.nbytes() == decoder.graphs._cuda.memory_reserved() + logits
    assert engine.nbytes() == decoder.slots.nbytes() + decoder.graphs.nbytes() + 2 * weights
    engine.release()
    assert engine.nbytes() == 0


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_weights_that_autocast_does_not_cast_are_not_copied(kind):
    model, _ = model_of(kind)
    engine = engine_of(model)
    rollout(engine, kind == "bfloat16")
    assert engine._casts.nbytes() == 0


def test_frozen_weights_have_no_second_copy():
    """Autocast keeps none of them either; they are cast in the graph."""
    model = tiny_model("qwen2", lora=True)
    engine = engine_of(model)
    rollout(engine, True)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert engine._casts.nbytes() == 2 * trained


def test_a_release_in_the_middle_leaves_graphs_that_hold():
    """Out of memory: everything is given back inside a rollout, which goes on and makes it anew."""
    model = tiny_model("qwen2")
    engine, plain = engine_of(model), engine_of(model, graphs=False)
    run, failed = engine._decoder.run, []

    def short_of_memory(prompts, *args, **kwargs):
        made = run(prompts, *args, **kwargs)
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("full")
        return made

    engine._decoder.run = short_of_memory
    wanted = rollout(plain, True)
    assert rollout(engine, True)[0] == wanted[0]
    step(model)
    assert rollout(engine, True)[0] == rollout(plain, True)[0]


def test_a_step_that_reads_on_the_host_cannot_be_captured():
    def step(out=None):
        return torch.ones(2, 3) * float(torch.ones(1))

    graphs = DecodeGraphs(FakeCuda())
    with pytest.warns(UserWarning, match="decoding without CUDA graphs"):
        assert torch.equal(graphs.run((2, 64), step), torch.ones(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        graphs.clear()
        assert torch.equal(graphs.run((2, 128), step), torch.ones(2, 3))
    assert graphs._failed and graphs.captures == 0


def test_a_capture_that_fails_in_a_rollout_changes_nothing(monkeypatch):
    model = tiny_model("qwen2")
    engine, plain = engine_of(model), engine_of(model, graphs=False)

    @contextmanager
    def refuses(*args, **kwargs):
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(engine._decoder.graphs._cuda, "graph", refuses)
    with pytest.warns(
        UserWarning, match="failed: operation failed due to a previous error"
    ) as said:
        assert rollout(engine, True) == rollout(plain, True)
    assert rollout(engine, True) == rollout(plain, True)
    assert len([w for w in said if "CUDA graphs" in str(w.message)]) == 1 and counts(
        engine
    ) == (
        0,
        0,
    )


@pytest.mark.parametrize("hidden", [False, True])
def test_memory_that_runs_out_in_a_capture_is_memory(hidden, monkeypatch):
    """The capture's own end may hide it. Rows are halved then, and graphs are kept."""
    model = tiny_model("qwen2")
    engine, plain = engine_of(model), engine_of(model, graphs=False)
    cuda, full = engine._decoder.graphs._cuda, [True]
    capture = cuda.graph

    @contextmanager
    def once(*args, **kwargs):
        try:
            if full:
                raise torch.OutOfMemoryError(full.pop())
        except torch.OutOfMemoryError:
            if hidden:
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
            raise
        with capture(*args, **kwargs):
            yield

    monkeypatch.setattr(cuda, "graph", once)
    assert rollout(engine)[0] == rollout(plain)[0]
    assert not full and not engine._decoder.graphs._failed and counts(engine)[0] > 0
