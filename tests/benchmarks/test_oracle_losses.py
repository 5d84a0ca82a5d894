"""The oracle's losses: TRL is its own record, and a wrong loss is not."""

import math

import numpy as np
import pytest

from benchmarks.oracle.cases import EPSILONS, LOSSES, Case, all_cases
from benchmarks.oracle.compare import summary, tensor_errors, worst
from benchmarks.oracle.losses import compare_losses, recorded
from benchmarks.oracle.textbook import textbook_loss
from benchmarks.oracle.trl_loss import trl_loss

FEW = [
    "dapo, token, beta 0, full, 2 micro-batches",
    "gspo, sequence, beta 0.1, full, 1 micro-batch",
]
FEW += [
    "vespo, token, beta 0.1, lora, 2 micro-batches",
    "bnpo, token, beta 0, lora, 2 micro-batches, on-policy",
]


def cases(*names):
    return [case for case in all_cases() if case.name in (names or FEW)]


def test_trl_is_on_record():
    differences = compare_losses(trl_loss, cases=cases())
    assert len(differences) > 60 and all(d.passes for d in differences), worst(differences)


def test_another_implementation_is_compared_by_its_callable():
    """Every loss, level, beta and tuning, by one of its three ways to a gradient; the loop's own tests take all."""
    every = [case for place, case in enumerate(all_cases()) if place % 3 == place // 3 % 3]
    differences = compare_losses(textbook_loss, cases=every)
    assert all(d.passes for d in differences), worst(differences)


def test_a_refused_loss_differs():
    def refusing(case):
        raise ValueError("no such loss")

    (refusal,) = compare_losses(refusing, cases=cases(FEW[2]))
    assert refusal.what == "refusal" and not refusal.passes


class Negated(Case):
    def batch(self):
        batch = super().batch()
        return batch | {"advantages": -batch["advantages"]}


class Shifted(Case):
    """One completion's mask begins a token later."""

    def batch(self):
        batch = super().batch()
        row = int((batch["completion_mask"].sum(1) > 1).nonzero()[0])
        batch["completion_mask"][row, 0] = 0
        return batch


class Stale(Case):
    """The reference's log-probabilities are taken for the old ones."""

    def batch(self):
        batch = super().batch()
        return batch | {"old_logprobs": batch["ref_logprobs"]}


@pytest.mark.parametrize("wrong", [Negated, Shifted, Stale])
@pytest.mark.parametrize("name", FEW[:2])
def test_a_wrong_loss_differs(wrong, name):
    (case,) = cases(name)
    differences = compare_losses(lambda case: textbook_loss(wrong(**vars(case))), cases=[case])
    gradients = [d for d in differences if d.what.startswith("gradient")]
    assert sum(not d.passes for d in gradients) > len(gradients) / 2
    assert worst(differences)["gradient"] > 1e-2


def test_one_lost_tensor_and_one_wrong_scale_differ():
    (case,) = cases(FEW[0])

    def scaled(case, by=1 + 1e-4):
        loss, gradients = textbook_loss(case)
        gradients.pop("model.norm.weight")
        return loss, {name: gradient * by for name, gradient in gradients.items()}

    failed = {d.what: d.error for d in compare_losses(scaled, cases=[case]) if not d.passes}
    assert math.isinf(failed["gradient of model.norm.weight"])
    assert failed["gradient of model.layers.0.mlp.up_proj.weight"] == pytest.approx(
        1e-4, rel=0.5
    )


def test_the_batch_has_what_the_losses_differ_by():
    (case,) = cases(FEW[0])
    batch, mask = case.batch(), case.batch()["completion_mask"]
    assert len({*mask.sum(1).tolist()}) > 4 and 0 in mask.sum(1)
    assert (batch["advantages"] == 0).sum() == 2
    groups = [{*map(tuple, part["prompt_ids"].tolist())} for part in case.parts()]
    assert groups[0] & groups[1], "a group lies in both micro-batches"
    log_ratio = np.log(_ratios(case)) * mask.numpy()
    for level, ratio in (
        ("token", np.exp(log_ratio)),
        ("sequence", np.exp(log_ratio.sum(1) / mask.sum(1).clamp(min=1).numpy())[:, None]),
    ):
        low, high = EPSILONS[level]
        advantage = batch["advantages"].numpy()[:, None]
        assert ((ratio > 1 + high) & (advantage > 0)).any() and (
            (ratio < 1 - low) & (advantage < 0)
        ).any(), level


def _ratios(case):
    from benchmarks.oracle.textbook import logprobs_of

    batch = case.batch()
    return (logprobs_of(case.policy(), batch).detach() - batch["old_logprobs"]).exp().numpy()


def test_every_loss_is_on_record():
    record = recorded()
    assert {name.split(",")[0] for name in record} == {*LOSSES}
    assert len(record) == len({*record}) == sum(1 for _ in all_cases())


def test_projections_see_a_tensor_that_was_moved():
    import torch

    tensor = torch.arange(12.0)
    errors = tensor_errors(summary({"a": tensor.flip(0)}), summary({"a": tensor}))
    assert errors["a"] > 0.1, "the norm is the same, the projections are not"
