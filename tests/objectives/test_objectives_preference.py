"""Preference losses at the optima their papers promise, with every pair of completions listed, and by hand."""

import math

import pytest
import torch
from toy_policy import Toy, gradient

from grpo_kit.objectives import (
    bradley_terry,
    dpo,
    hinge,
    implicit_reward,
    ipo,
    kto,
    kto_reference_point,
    orpo,
    sequence_logprobs,
    simpo,
)

BOTH = pytest.mark.parametrize("toy", [Toy(), Toy(end=2)], ids=["length 3", "lengths 1 to 3"])


def close(a, b, tolerance=1e-10):
    return torch.allclose(a, b, atol=tolerance, rtol=0)


def number(*values):
    return torch.tensor(values, dtype=torch.float64)


def all_pairs(n):
    return torch.cartesian_prod(torch.arange(n), torch.arange(n)).T


def expected_over_pairs(preferred, loss):
    """Sum over all pairs (i, j) of the chance that i is preferred to j, times loss(i, j) of that one pair."""
    chosen, rejected = all_pairs(len(preferred))
    return sum(
        preferred[i, j] * loss(i[None], j[None])
        for i, j in zip(chosen, rejected, strict=True)
        if i != j
    )


def bradley_terry_chances(utilities):
    return torch.sigmoid(utilities[:, None] - utilities[None, :])


# ---- Bradley-Terry --------------------------------------------------------------------------------------------


def test_bradley_terry_recovers_the_utilities_up_to_a_constant():
    true = number(0.3, -1.2, 2.0, 0.0, 0.7)
    chances = bradley_terry_chances(true)
    learned = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [learned],
        max_iter=200,
        tolerance_grad=1e-12,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def step():
        optimizer.zero_grad()
        loss = expected_over_pairs(chances, lambda i, j: bradley_terry(learned[i], learned[j]))
        loss.backward()
        return loss

    optimizer.step(step)
    assert close(learned - learned.mean(), true - true.mean(), 1e-6)


def test_bradley_terry_by_hand():
    chosen, rejected = number(1.0, 0.0), number(0.0, 2.0)
    softplus = lambda x: math.log1p(math.exp(x))  # noqa: E731
    assert bradley_terry(chosen, rejected).item() == pytest.approx(
        (softplus(-1) + softplus(2)) / 2
    )
    wanted = (softplus(-0.5) + softplus(5)) / 2
    assert bradley_terry(chosen, rejected, margin=number(0.5, 3.0)).item() == pytest.approx(
        wanted
    )


# ---- DPO and IPO ----------------------------------------------------------------------------------------------


class Preferences:
    """A reference, rewards, and the policy that is best for them: ref exp(r / beta) / Z."""

    def __init__(self, toy, beta):
        self.toy = toy
        self.ref = toy.logprobs(toy.logits(1)).sum(1).detach()
        self.rewards = 2 * toy.rewards()
        self.chances = bradley_terry_chances(self.rewards)
        self.best = toy.logits_of(torch.softmax(self.ref + self.rewards / beta, 0))

    def expected(self, logits, loss):
        logp = sequence_logprobs(self.toy.logprobs(logits), self.toy.mask)
        return expected_over_pairs(
            self.chances, lambda i, j: loss(logp[i], logp[j], self.ref[i], self.ref[j])
        )


@BOTH
def test_dpo_is_lowest_at_the_policy_that_is_best_for_the_reward_behind_the_preferences(toy):
    beta = 0.4
    truth = Preferences(toy, beta)
    best = truth.expected(truth.best, lambda *a: dpo(*a, beta=beta))
    assert gradient(best, truth.best).abs().max() < 1e-10
    start = toy.logits(1)
    assert (
        gradient(truth.expected(start, lambda *a: dpo(*a, beta=beta)), start).abs().max() > 0.1
    )
    assert (
        gradient(truth.expected(truth.best, lambda *a: dpo(*a, beta=2 * beta)), truth.best)
        .abs()
        .max()
        > 0.1
    )
    hidden = implicit_reward(toy.probabilities(truth.best).log(), truth.ref, beta=beta)
    assert close(hidden - hidden.mean(), truth.rewards - truth.rewards.mean())


def test_dpo_from_the_reference_ends_in_the_reward():
    """Trained by hand on exact expectations, the implicit reward becomes the true one."""
    toy, beta = Toy(end=2), 0.4
    truth, learned = Preferences(toy, beta), toy.logits(1)
    optimizer = torch.optim.LBFGS(
        [learned],
        max_iter=150,
        tolerance_grad=1e-9,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def step():
        optimizer.zero_grad()
        loss = truth.expected(learned, lambda *a: dpo(*a, beta=beta))
        loss.backward()
        return loss

    optimizer.step(step)
    hidden = implicit_reward(toy.probabilities(learned).log(), truth.ref, beta=beta)
    assert close(hidden - hidden.mean(), truth.rewards - truth.rewards.mean(), 1e-4)


def test_dpo_gradient_pulls_hardest_where_the_implicit_reward_is_wrong():
    """d/d log pi_chosen = -beta sigma(-h), h the gap of implicit rewards (DPO, section 4)."""
    chosen, rejected = number(-1.0, -6.0).requires_grad_(), number(-3.0, -2.0).requires_grad_()
    ref = number(-2.0, -2.0), number(-2.0, -2.5)
    dpo(chosen, rejected, *ref, beta=0.5).backward()
    gaps = 0.5 * number(1.0 - (-1.0), -4.0 - 0.5)
    assert close(chosen.grad, -0.5 * torch.sigmoid(-gaps) / 2) and close(
        rejected.grad, -chosen.grad
    )


def test_label_smoothing_stops_the_gap_at_the_odds_of_a_wrong_label():
    beta, smoothing = 0.5, 0.1
    gap = math.log((1 - smoothing) / smoothing) / beta
    chosen = number(gap).requires_grad_()
    loss = dpo(
        chosen, number(0.0), number(0.0), number(0.0), beta=beta, label_smoothing=smoothing
    )
    loss.backward()
    assert abs(chosen.grad.item()) < 1e-12
    wanted = 0.9 * math.log(10 / 9) + 0.1 * math.log(10)
    assert loss.item() == pytest.approx(wanted)


@pytest.mark.parametrize("chance", [1.0, 0.8, 0.5])
def test_ipo_has_its_optimum_at_a_finite_gap(chance):
    """(2 p - 1) / (2 beta); for clean preferences 1 / (2 beta), where DPO's gap has no end."""
    beta = 0.25
    gap = number((2 * chance - 1) / (2 * beta)).requires_grad_()
    zero = number(0.0)
    loss = chance * ipo(gap, zero, zero, zero, beta=beta) + (1 - chance) * ipo(
        zero, gap, zero, zero, beta=beta
    )
    loss.backward()
    assert abs(gap.grad.item()) < 1e-12 and gap.item() >= 0


def test_ipo_by_hand():
    got = ipo(
        number(-1.0, -4.0), number(-3.0, -1.0), number(-2.0, -2.0), number(-2.5, -1.0), beta=0.5
    )
    assert got.item() == pytest.approx(((1.0 + 0.5 - 1) ** 2 + (-2.0 - 0.0 - 1) ** 2) / 2)


def test_a_pair_that_is_far_enough_apart_moves_nothing():
    chosen = number(3.0, 9.0).requires_grad_()
    zero = number(0.0, 0.0)
    loss = hinge(chosen, zero, zero, zero, beta=0.25)
    loss.backward()
    assert loss.item() == pytest.approx((1 - 0.75 + 0) / 2) and chosen.grad.tolist() == [
        -0.125,
        0.0,
    ]


# ---- KTO ------------------------------------------------------------------------------------------------------


def test_kto_by_hand():
    logprobs, ref = number(-1.0, -2.0, -3.0), number(-2.0, -1.0, -3.5)
    desirable = torch.tensor([True, False, False])
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    got = kto(
        logprobs, ref, desirable, 0.25, beta=2.0, desirable_weight=1.5, undesirable_weight=0.5
    )
    wanted = (
        1.5 * (1 - sigmoid(2 * 0.75))
        + 0.5 * (1 - sigmoid(2 * 1.25))
        + 0.5 * (1 - sigmoid(-2 * 0.25))
    )
    assert got.item() == pytest.approx(wanted / 3)


def test_kto_raises_the_desirable_lowers_the_rest_and_gives_up_what_is_far_off():
    logprobs = number(0.0, 0.0, 60.0, -60.0, -60.0).requires_grad_()
    desirable = torch.tensor([True, False, True, True, False])
    kto(logprobs, torch.zeros(5).double(), desirable, 0.0, beta=1.0).backward()
    raised, lowered, *far = logprobs.grad.tolist()
    assert raised == pytest.approx(-0.25 / 5) and lowered == pytest.approx(0.25 / 5)
    assert max(map(abs, far)) < 1e-20


def test_the_reference_point_is_a_mean_never_below_zero_and_constant():
    logprobs = number(-1.0, -5.0, -4.0).requires_grad_()
    got = kto_reference_point(logprobs, number(-2.0, -7.0, -4.0))
    assert got.item() == pytest.approx(1.0) and not got.requires_grad
    assert kto_reference_point(number(-3.0), number(-1.0)).item() == 0


# ---- ORPO and SimPO -------------------------------------------------------------------------------------------


def test_orpo_is_its_definition_in_probabilities():
    """Loss and gradient of -log p_w - beta log sigma(log(odds_w / odds_l)), autograd through p itself."""
    p = number(0.2, 0.999, 1e-5).requires_grad_()
    q = number(0.5, 0.1, 0.9).requires_grad_()
    odds = (p / (1 - p)) / (q / (1 - q))
    definition = (-torch.log(p) - 0.3 * torch.log(torch.sigmoid(torch.log(odds)))).mean()
    wanted = torch.autograd.grad(definition, (p, q))
    ours = orpo(p.log(), q.log(), beta=0.3)
    assert close(ours, definition) and ours.item() > 1
    for got, exact in zip(torch.autograd.grad(ours, (p, q)), wanted, strict=True):
        assert torch.allclose(got, exact, rtol=1e-9)
    assert wanted[0].max() < 0 < wanted[1].min(), "chosen up, rejected down"


def test_orpo_by_hand_and_with_an_nll_of_its_own():
    p, q = number(0.5).log(), number(0.2).log()  # odds 1 and 1/4
    wanted = -math.log(0.8)  # sigma(log 4) = 4/5
    assert orpo(p, q, beta=2.0).item() == pytest.approx(math.log(2) + 2 * wanted)
    assert orpo(p, q, beta=2.0, nll=number(7.0)).item() == pytest.approx(7 + 2 * wanted)


def test_simpo_by_hand_and_its_margin():
    chosen, rejected = number(-1.0, -0.5).requires_grad_(), number(-1.5, -0.4)
    loss = simpo(chosen, rejected, beta=2.0, gamma=0.6)
    gaps = (2 * 0.5 - 0.6, -2 * 0.1 - 0.6)
    assert loss.item() == pytest.approx(sum(math.log1p(math.exp(-g)) for g in gaps) / 2)
    slopes = gradient(loss, chosen).tolist()
    assert slopes == pytest.approx([-2 / (1 + math.exp(g)) / 2 for g in gaps])


def test_simpo_and_orpo_do_not_reward_length_itself():
    """Chosen three times as long, each token alike: no gap between means, a large one between sums."""
    logprobs, mask = torch.full((2, 3), -2.0), torch.tensor([[1, 1, 1], [1, 0, 0]])
    chosen, rejected = sequence_logprobs(logprobs, mask, average=True)
    assert simpo(chosen, rejected, gamma=0.0).item() == pytest.approx(math.log(2))
    assert orpo(chosen, rejected, beta=1.0).item() == pytest.approx(2 + math.log(2))


# ---- errors ---------------------------------------------------------------------------------------------------


P, Q = torch.zeros(2), torch.zeros(1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bradley_terry(P, Q), "rejected_rewards has shape"),
        (lambda: dpo(P, P, Q, P), "ref_logprobs has shape"),
        (lambda: dpo(P, Q, P, Q), "rejected_rewards has shape"),
        (lambda: ipo(P, P, P, Q), "ref_logprobs has shape"),
        (lambda: ipo(P, Q, P, Q), "rejected has shape"),
        (lambda: hinge(P, Q, P, Q), "rejected has shape"),
        (lambda: kto(P, P, torch.tensor([True]), 0.0), "desirable has shape"),
        (lambda: kto_reference_point(P, Q), "ref_logprobs has shape"),
        (lambda: orpo(P, Q), "rejected_logprobs has shape"),
        (lambda: simpo(P, Q), "rejected_rewards has shape"),
    ],
)
def test_pairs_that_do_not_match_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
