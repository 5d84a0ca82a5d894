"""How much is computed at once on a card, its free memory made up: budget, halving, more again; whose an error is."""

import pytest
import torch
from rollout_models import tiny_model

from grpo_kit.engine import _update_memory as update_memory
from grpo_kit.engine._update_memory import UpdateMemory

GIB = 2**30
# 48 positions in three groups; the longest completion with its prompt has 23.
ROWS = [
    ((1, 2, 3), [4] * 20),
    ((1, 2, 3), [4] * 20 + [5]),
    ((7, 8), [4] * 21 + [6]),
    ((9,), [4, 5]),
]


@pytest.fixture
def memory(monkeypatch):
    """f(free=bytes) -> of a tiny model, for a card on which so much is free; FlexAttention is there."""

    def make(free=GIB):
        monkeypatch.setattr(update_memory, "free_bytes", lambda device: free)
        # A CUDA build of torch has Triton, and without a driver no card to ask.
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
        made = UpdateMemory(tiny_model(), torch.device("cuda"))
        made.attention = "flex_attention"
        return made

    return make


def card_of(tokens, limits):
    """Work that a card of so many tokens at once can do; notes what it was asked for."""

    def work(limit):
        limits.append(limit)
        if limit > tokens[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    return work


def test_the_budget_falls_with_what_is_free(memory):
    """Everything at once; less, with layers checkpointed; never less than the longest completion."""
    sizes = []
    for free in (GIB, 10**7, 10**5):
        made, limits = memory(free), []
        many = ROWS + [((n, n + 1), [n + 2] * 20) for n in range(10, 400)]
        made.run(card_of([10**6], limits), many)
        sizes.append((limits, made.checkpointed_layers))
    ((all_at_once,), none), ((some,), _), ((longest,), every) = sizes
    assert none == 0 and every == 2 and all_at_once > some > longest == 23


def test_out_of_memory_halves_and_says_so(memory, capsys):
    made, limits = memory(), []
    made.model.get_input_embeddings().weight.grad = torch.ones(500, 48)
    assert made.run(card_of([30], limits), ROWS) == "done"
    assert limits == [48, 24] and made.chunk_tokens == 24
    assert all(p.grad is None for p in made.model.parameters()), (
        "the failed attempt's gradients are gone"
    )
    assert "with 48 tokens at once: the step starts over with 24" in capsys.readouterr().out


def test_more_is_tried_again_after_a_while_and_then_kept(memory):
    """One bad moment: the ninth step is whole again."""
    made, limits, room = memory(), [], [30]
    for _ in range(30):
        made.run(card_of(room, limits), ROWS)
        room[0] = 1000
    assert limits == [48] + [24] * 8 + [48] * 22


def test_what_never_fits_is_tried_ever_more_rarely(memory):
    made, limits = memory(), []
    for _ in range(200):
        made.run(card_of([30], limits), ROWS)
    tried = [limits[:n].count(24) for n, limit in enumerate(limits) if limit == 48]
    assert tried == [0, 8, 24, 56, 120]


def test_a_limit_that_does_not_bind_is_no_reason_to_try_more(memory):
    made, limits = memory(), []
    made.chunk_tokens = 10_000
    for _ in range(20):
        made.run(card_of([100], limits), ROWS)
    assert made.chunk_tokens == 10_000 and set(limits) == {48}


def test_checkpointing_every_layer_is_given_up_again(memory, capsys):
    made, seen = memory(), []
    free = [False]

    def work(limit):
        seen.append((limit, made.checkpointed_layers))
        if made.checkpointed_layers < 2 and not free[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    for _ in range(60):
        made.run(work, ROWS)
        free[0] = True
    assert (
        seen[:4] == [(48, 0), (24, 0), (23, 0), (23, 2)]
        and "every layer checkpointed" in capsys.readouterr().out
    )
    assert seen[-1] == (48, 0)


def raised_in(module, error):
    """A function whose frame is one of that module's."""
    space = {"__name__": module, "error": error}
    exec("def fail():\n    raise error", space)
    return space["fail"]


def of_module(name, module):
    return type(name, (RuntimeError,), {"__module__": module})(
        "no shared memory left\nand a page of advice"
    )


FLEX_FAULTS = {
    "compiled code": raised_in(
        "torch._inductor.codecache", RuntimeError("no valid triton configs")
    ),
    "forward": raised_in("torch.nn.attention.flex_attention", ValueError("NYI: head_dim")),
    "backward": raised_in(
        "torch._higher_order_ops.flex_attention", NotImplementedError("no backward")
    ),
    "transformers": raised_in(
        "transformers.integrations.flex_attention", TypeError("an argument")
    ),
    "the compiler": raised_in(
        "somewhere", of_module("BackendCompilerFailed", "torch._dynamo.exc")
    ),
    "triton": raised_in("somewhere", of_module("OutOfResources", "triton.runtime.errors")),
}
OTHERS = {
    "a hook of the user's": raised_in("__main__", ValueError("mine")),
    "an assertion": raised_in("trl.trainer.grpo_trainer", AssertionError("mine")),
    "a name that only begins alike": raised_in("tritonbench.loss", RuntimeError("mine")),
    "the stop button": raised_in("torch._inductor.codecache", KeyboardInterrupt()),
    "the card": raised_in(
        "somewhere", torch.AcceleratorError("CUDA error: device-side assert triggered")
    ),
    "the card, met in compiled code": raised_in(
        "torch._inductor.codecache",
        torch.AcceleratorError("CUDA error: an illegal memory access"),
    ),
}


@pytest.mark.parametrize("fault", FLEX_FAULTS)
def test_where_flex_attention_fails_sdpa_takes_over_and_names_the_error(memory, capsys, fault):
    made, tried = memory(), []

    def work(limit):
        tried.append(made.attention)
        if made.attention == "flex_attention":
            FLEX_FAULTS[fault]()
        return "done"

    assert made.run(work, ROWS) == "done" == made.run(work, ROWS)
    assert tried == ["flex_attention", "sdpa", "sdpa"]
    error = FLEX_FAULTS[fault].__globals__["error"]
    out = capsys.readouterr().out
    told = f"FlexAttention failed ({type(error).__name__}: {str(error).splitlines()[0]}); using SDPA"
    assert told in out and out.count("\n") == 1


@pytest.mark.parametrize("error", OTHERS)
@pytest.mark.parametrize("attention", ["flex_attention", "sdpa"])
def test_what_anything_else_raises_passes_as_it_is(memory, capsys, error, attention):
    made = memory()
    made.attention = attention
    fail = OTHERS[error]
    with pytest.raises(BaseException) as raised:
        made.run(lambda limit: fail(), ROWS)
    assert raised.value is fail.__globals__["error"]
    assert (
        made.attention == attention
        and made.chunk_tokens is None
        and capsys.readouterr().out == ""
    )


def test_memory_that_ran_out_while_flex_attention_was_compiled_is_memory(memory, capsys):
    made, limits = memory(), []

    def work(limit):
        limits.append(limit)
        if len(limits) == 1:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except torch.OutOfMemoryError as error:
                raise of_module("BackendCompilerFailed", "torch._dynamo.exc") from error

    made.run(work, ROWS)
    assert limits == [48, 24] and made.attention == "flex_attention"
    assert "FlexAttention failed" not in capsys.readouterr().out


def test_flex_attention_that_torch_would_run_unfused_gives_way_to_sdpa(
    memory, capsys, monkeypatch
):
    """Each shape is compiled anew; past a limit torch runs the operator unfused, with a warning alone."""
    monkeypatch.setattr(update_memory, "_SHAPES", 3)
    made, attentions = memory(), []
    compiled = torch.compile(lambda x: x.sin() + x.shape[0], backend="eager", dynamic=False)

    def work(limit):
        attentions.append(made.attention)
        with made.attention_of(made.model):
            for length in range(1, 9) if made.attention == "flex_attention" else ():
                compiled(torch.ones(length))
        return "done"

    assert made.run(work, ROWS) == "done"
    assert attentions == ["flex_attention", "sdpa"]
    assert "FlexAttention failed (FailOnRecompileLimitHit" in capsys.readouterr().out
