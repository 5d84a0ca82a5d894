"""Head and embedding on a CPU against trl's chunked head and torch's embedding: values, gradients, what is hooked."""

import pytest
import torch
from trl.trainer import utils as trl_utils

from grpo_kit.engine import cpu_lm_head
from grpo_kit.engine.cpu_lm_head import KeptHead, embed

OUTPUTS = ("log_probs", "entropy")


@pytest.fixture
def work():
    torch.manual_seed(0)
    hidden = torch.randn(37, 16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(301, 16))
    return hidden, weight, torch.randint(301, (37,))


def apply(function, work, *, temperature=0.7, logit_scale=1.0, outputs=OUTPUTS):
    hidden, weight, labels = work
    return function.apply(hidden, weight, None, labels, temperature, 128, None, logit_scale, outputs)[:2]


def gradients(function, work, *, entropies, times=1, **options):
    hidden, weight, _ = work
    hidden.grad = weight.grad = None
    logprobs, entropy = apply(function, work, **options)
    loss = (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()
    if entropies:
        loss = loss + (entropy * torch.linspace(0, 1, len(logprobs))).sum()
    for _ in range(times):
        loss.backward(retain_graph=True)
    return logprobs.detach(), entropy.detach(), hidden.grad.clone(), weight.grad.clone()


@pytest.mark.parametrize("tile", [5, 16, 256])
@pytest.mark.parametrize("kept", [0.0, 0.25], ids=["none", "all"])
@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize("scale", [(1.0, 1.0), (0.7, 1.0), (1.3, 2.0)])
def test_the_head_is_trls(work, tile, kept, entropies, scale, monkeypatch):
    monkeypatch.setattr(cpu_lm_head, "_TILE", tile)
    monkeypatch.setattr(cpu_lm_head, "_KEPT_OF_FREE", kept)
    options = dict(entropies=entropies, temperature=scale[0], logit_scale=scale[1])
    wanted = gradients(trl_utils._ChunkedLogProbFunction, work, **options)
    got = gradients(KeptHead(trl_utils._ChunkedLogProbFunction), work, **options)
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_kept_of_a_part(work, monkeypatch):
    """Memory for a part: the rest is computed again."""
    monkeypatch.setattr(cpu_lm_head, "_TILE", 5)
    monkeypatch.setattr(cpu_lm_head, "free_bytes", lambda device: 4 * 301 * 4 * 22)
    wanted = gradients(trl_utils._ChunkedLogProbFunction, work, entropies=True)
    logprobs, _ = apply(KeptHead(trl_utils._ChunkedLogProbFunction), work)
    assert len(logprobs.grad_fn.kept) == 20
    got = gradients(KeptHead(trl_utils._ChunkedLogProbFunction), work, entropies=True)
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_nothing_is_held_once_the_gradients_are_there(work):
    logprobs, _ = apply(KeptHead(trl_utils._ChunkedLogProbFunction), work)
    held = logprobs.grad_fn
    assert held.kept.untyped_storage().nbytes() > 0
    logprobs.sum().backward(retain_graph=True)
    assert held.kept.untyped_storage().nbytes() == 0


def test_backward_twice_adds_twice(work):
    wanted = gradients(trl_utils._ChunkedLogProbFunction, work, entropies=True, times=2)
    got = gradients(KeptHead(trl_utils._ChunkedLogProbFunction), work, entropies=True, times=2)
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_probabilities_of_zero_do_not_make_nan(work):
    hidden, weight, labels = work
    sharp = (hidden.detach() * 1e3).requires_grad_(), weight, labels
    values = gradients(KeptHead(trl_utils._ChunkedLogProbFunction), sharp, entropies=True)
    assert all(value.isfinite().all() for value in values)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_are_called_with_its_gradient(work, hook):
    hidden, weight, _ = work
    wanted = gradients(KeptHead(trl_utils._ChunkedLogProbFunction), work, entropies=False)[3]
    seen = []
    handle = getattr(weight, hook)(
        lambda x: seen.append((x.grad if hook.endswith("grad_hook") else x).clone())
    )
    gradients(KeptHead(trl_utils._ChunkedLogProbFunction), work, entropies=False)
    handle.remove()
    assert len(seen) == 1 and torch.allclose(seen[0], wanted, rtol=1e-5, atol=1e-6)


def test_what_it_cannot_do_is_left_to_trl(work):
    hidden, weight, labels = work
    asked = []

    class Trl:
        @staticmethod
        def apply(*arguments):
            asked.append(arguments)
            return (None,) * 5

    head = KeptHead(Trl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        apply(head, work)
    apply(head, (hidden.double(), weight.double(), labels))
    apply(head, work, outputs=("log_probs", "is_top1"))
    head.apply(hidden, weight, torch.zeros(301), labels, 1.0, 128, None, 1.0, OUTPUTS)
    head.apply(hidden, weight, None, labels, 1.0, 128, 30.0, 1.0, OUTPUTS)
    assert len(asked) == 5
    apply(head, work)
    assert len(asked) == 5


@pytest.mark.parametrize("before", [False, True], ids=["first", "added"])
@pytest.mark.parametrize("padding", [None, 3])
def test_the_embedding_is_torchs(before, padding):
    torch.manual_seed(0)
    ids = torch.randint(9, (1, 40))
    results = []
    for own in (True, False):
        torch.manual_seed(1)
        embedding = torch.nn.Embedding(9, 4, padding_idx=padding)
        if before:
            embedding.weight.grad = torch.ones_like(embedding.weight)
        out = embed(embedding, ids) if own else embedding(ids)
        (out * torch.linspace(0, 1, 4)).sum().backward()
        results.append((out.detach(), embedding.weight.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-5)


def test_an_embedding_that_is_watched_or_frozen_is_asked_itself():
    ids = torch.zeros(1, 2, dtype=torch.long)
    hooked, frozen = torch.nn.Embedding(4, 2), torch.nn.Embedding(4, 2)
    hooked.register_forward_hook(lambda *_: None)
    frozen.requires_grad_(False)
    assert embed(hooked, ids) is None and embed(frozen, ids) is None
    with torch.no_grad():
        assert embed(torch.nn.Embedding(4, 2), ids) is None
    assert embed(torch.nn.Embedding(4, 2), ids) is not None
