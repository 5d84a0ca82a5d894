"""Head and embedding on a CPU against torch's own: values, gradients, what is hooked."""

import pytest
import torch

from grpo_kit.engine.cpu import _matmul as cpu_lm_head
from grpo_kit.engine.cpu._matmul import embed, head_logprobs, usable, usable_head


@pytest.fixture
def work():
    torch.manual_seed(0)
    hidden = torch.randn(37, 16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(301, 16))
    return hidden, weight, torch.randint(301, (37,))


def by_torch(hidden, weight, labels, scale):
    table = (scale * hidden @ weight.t()).log_softmax(-1)
    return table.gather(1, labels[:, None])[:, 0], -(table.exp() * table).sum(-1)


def gradients(function, work, *, entropies, times=1, scale=1 / 0.7):
    hidden, weight, labels = work
    hidden.grad = weight.grad = None
    logprobs, entropy = function(hidden, weight, labels, scale)
    loss = (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()
    if entropies:
        loss = loss + (entropy * torch.linspace(0, 1, len(logprobs))).sum()
    for _ in range(times):
        loss.backward(retain_graph=True)
    return logprobs.detach(), entropy.detach(), hidden.grad.clone(), weight.grad.clone()


def assert_close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [5, 16, 256])
@pytest.mark.parametrize("kept", [0.0, 0.25], ids=["none", "all"])
@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1 / 0.7, 2 / 1.3])
def test_the_head_is_torchs(work, tile, kept, entropies, scale, monkeypatch):
    monkeypatch.setattr(cpu_lm_head, "_TILE", tile)
    monkeypatch.setattr(cpu_lm_head, "_KEPT_OF_FREE", kept)
    options = dict(entropies=entropies, scale=scale)
    assert_close(
        gradients(head_logprobs, work, **options), gradients(by_torch, work, **options)
    )


def test_what_is_kept_of_a_part(work, monkeypatch):
    """Memory for a part: the rest is computed again."""
    monkeypatch.setattr(cpu_lm_head, "_TILE", 5)
    monkeypatch.setattr(cpu_lm_head, "free_bytes", lambda device: 4 * 301 * 4 * 22)
    assert len(head_logprobs(*work, 1.0)[0].grad_fn.kept) == 20
    assert_close(
        gradients(head_logprobs, work, entropies=True),
        gradients(by_torch, work, entropies=True),
    )


def test_nothing_is_held_once_the_gradients_are_there(work):
    logprobs, _ = head_logprobs(*work, 1.0)
    held = logprobs.grad_fn
    assert held.kept.untyped_storage().nbytes() > 0
    logprobs.sum().backward(retain_graph=True)
    assert held.kept.untyped_storage().nbytes() == 0


def test_backward_twice_adds_twice(work):
    options = dict(entropies=True, times=2)
    assert_close(
        gradients(head_logprobs, work, **options), gradients(by_torch, work, **options)
    )


def test_probabilities_of_zero_do_not_make_nan(work):
    hidden, weight, labels = work
    sharp = (hidden.detach() * 1e3).requires_grad_(), weight, labels
    assert all(
        value.isfinite().all() for value in gradients(head_logprobs, sharp, entropies=True)
    )


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_are_called_with_its_gradient(work, hook):
    hidden, weight, _ = work
    wanted = gradients(head_logprobs, work, entropies=False)[3]
    seen = []
    handle = getattr(weight, hook)(
        lambda x: seen.append((x.grad if hook.endswith("grad_hook") else x).clone())
    )
    gradients(head_logprobs, work, entropies=False)
    handle.remove()
    assert len(seen) == 1 and torch.allclose(seen[0], wanted, rtol=1e-5, atol=1e-6)


def test_what_it_cannot_do_is_left_to_the_model(work):
    hidden, weight, _ = work
    assert usable(hidden, weight) and not usable(hidden.double(), weight.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not usable(hidden, weight)
    assert usable_head(torch.nn.Linear(16, 301, bias=False), hidden)
    assert not usable_head(torch.nn.Linear(16, 301), hidden), "a bias"
    hooked = torch.nn.Linear(16, 301, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    assert not usable_head(hooked, hidden)


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
