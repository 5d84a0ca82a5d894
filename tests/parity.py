"""A loss of trl's and one of ours on the same weights: value and gradient of every parameter, in float32."""

import few_words
import torch

from grpo_kit.objectives import token_logprobs


def sharp_model(seed, spread=10.0):
    """A tiny model with logits far enough apart that policies differ; a seed stirs its weights."""
    model = few_words.policy()[0]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                parameter.std() * 0.3 * torch.randn(parameter.shape, generator=generator)
            )
        model.get_output_embeddings().weight.mul_(spread)
    return model


def logprobs_of(model, ids, attention_mask, width, *, temperature=1.0):
    """(R, width): the last `width` tokens' log-probabilities, from the model's plain logits."""
    logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
    return token_logprobs(logits[:, -width - 1 : -1], ids[:, -width:], temperature=temperature)


def assert_parity(model, theirs, ours, *, tolerance=1e-5, terms=0.0):
    """theirs, ours: functions that return a loss. Relative errors of the loss and of the whole gradient.

    terms: the size of what the loss adds up, where that cancels: float32 rounds those, not their small sum.
    """
    losses, gradients = [], []
    for function in (theirs, ours):
        model.zero_grad()
        loss = function()
        loss.backward()
        losses.append(loss.item())
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    assert gradients[0].norm() > 1e-4, "a gradient, or there is nothing to compare"
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert error < tolerance, f"gradients differ by {error:.1e}"
    assert abs(losses[1] - losses[0]) <= tolerance * max(abs(losses[0]), terms), losses
