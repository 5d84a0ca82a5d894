"""GRPO and its relatives: exact expectations over every group, and what sets each of them apart by hand."""

import math

import pytest
import torch
from toy_policy import Toy, expected_gradient, gradient, policy_gradient

from grpo_kit.objectives import (
    bnpo,
    cispo,
    clip_fraction,
    dapo,
    dr_grpo,
    filter_negative_tokens,
    group_advantages,
    grpo,
    gspo,
    gspo_token,
    k3,
    luspo,
    overlong_filter,
    rloo_advantages,
    sapo,
    sequence_ratio,
    vespo,
    weigh_advantages,
)


def positives_grpo(logprobs, old, A, mask, positive_weight=1.0, negative_weight=0.0, **options):
    return grpo(
        logprobs, old, weigh_advantages(A, positive_weight, negative_weight), mask, **options
    )


FAMILY = {
    "grpo": grpo,
    "dr_grpo": lambda *a, **k: dr_grpo(*a, max_completion_tokens=3, **k),
    "bnpo": bnpo,
    "dapo": dapo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "positives_grpo": positives_grpo,
    "sapo": sapo,
    "luspo": luspo,
    "vespo": vespo,
}
every_loss = pytest.mark.parametrize("loss", FAMILY.values(), ids=FAMILY)


def close(a, b, tolerance=1e-10):
    return torch.allclose(a, b, atol=tolerance, rtol=0)


def on_policy(toy, logits, loss, advantages, size=2, **options):
    """The expected gradient over all groups, rewards turned into advantages group by group."""
    logprobs = toy.logprobs(logits)

    def of_group(rows):
        return loss(
            logprobs[rows], logprobs[rows].detach(), advantages(rows), toy.mask[rows], **options
        )

    return expected_gradient(toy, logits, size, of_group)


# ---- what each divides by -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in FAMILY if n != "positives_grpo"])
def test_on_fresh_samples_of_one_length_all_are_the_policy_gradient(name):
    toy = Toy()
    logits, rewards = toy.logits(0), toy.rewards()
    got = on_policy(toy, logits, FAMILY[name], lambda rows: rloo_advantages(rewards[rows], 2))
    divided = 1 if name == "luspo" else 3  # by nobody's length
    assert close(got, -policy_gradient(toy, logits, rewards) / divided)
    without_std = on_policy(
        toy, logits, FAMILY[name], lambda rows: group_advantages(rewards[rows], 2, scale="none")
    )
    assert close(without_std, got / 2)  # (G - 1) / G


def test_where_lengths_differ_only_dr_grpo_follows_the_expected_reward():
    toy = Toy(end=2)
    logits, rewards = toy.logits(1), toy.rewards()
    exact = -policy_gradient(toy, logits, rewards)

    def angle(loss):
        got = on_policy(toy, logits, loss, lambda rows: rloo_advantages(rewards[rows], 2))
        return (got * exact).sum() / got.norm() / exact.norm()

    got = on_policy(
        toy, logits, FAMILY["dr_grpo"], lambda rows: rloo_advantages(rewards[rows], 2)
    )
    assert close(got, exact / 3)
    for name in ("grpo", "bnpo", "gspo"):
        assert angle(FAMILY[name]) < 0.999, name


def test_grpo_follows_the_reward_per_token_of_length():
    """At old = now its gradient is E[1/|o| A grad log pi], for grpo and gspo alike."""
    toy = Toy(end=2)
    logits, rewards = toy.logits(1), toy.rewards()
    p, logprobs = toy.probabilities(logits).detach(), toy.logprobs(logits)
    # leave-one-out over a group of two: A_1 = r_1 - r_2, in expectation r_1 - E[r]
    centred = rewards - (p * rewards).sum()
    wanted = -gradient((p * centred / toy.lengths * logprobs.sum(1)).sum(), logits)
    for loss in (grpo, gspo, gspo_token):
        got = on_policy(toy, logits, loss, lambda rows: rloo_advantages(rewards[rows], 2))
        assert close(got, wanted)


@pytest.fixture
def batch():
    """Two completions of 3 and 1 tokens, rubbish behind the end; ratios on all sides of the clip."""
    ratio = torch.tensor([[0.5, 1.25, 2.0], [1.5, 99.0, 99.0]], dtype=torch.float64)
    old = torch.log(torch.tensor([[0.1, 0.3, 0.2], [0.4, 1.0, 1.0]], dtype=torch.float64))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    return (
        (ratio.log() + old).requires_grad_(),
        old,
        torch.tensor([1.0, -2.0], dtype=torch.float64),
        mask,
    )


# min(rho A, clip(rho) A) with epsilon 0.2: [0.5, 1.2, 1.2] and [-3]; with 0.28 above: [0.5, 1.25, 1.28]
BY_HAND = {
    "grpo": -((0.5 + 1.2 + 1.2) / 3 - 3) / 2,
    "dr_grpo": -(2.9 - 3) / (2 * 3),
    "bnpo": -(2.9 - 3) / 4,
    "dapo": -(0.5 + 1.25 + 1.28 - 3) / 4,
    "gspo": -((1 + 4e-4) - 2 * 1.5) / 2,  # s = 1.25^(1/3) > 1.0004; A < 0 is not clipped above
    "gspo_token": -((1 + 4e-4) - 2 * 1.5) / 2,
    "positives_grpo": -(0.5 + 1.2 + 1.2) / 3 / 2,
    "luspo": -((0.5 + 1.0025 + 1.0025) - 3) / 2,
    "sapo": -4
    * (
        sum(1 / (1 + math.exp(1 - r)) for r in (0.5, 1.25, 2)) / 3
        - 2 / 1.05 / (1 + math.exp(-0.525))
    )
    / 2,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name, batch):
    assert FAMILY[name](*batch).item() == pytest.approx(BY_HAND[name], abs=1e-12)


SLOPES = {  # d loss / d log pi; 0 where clipped, and behind the end
    "grpo": [[-0.5 / 6, 0, 0], [3 / 2, 0, 0]],
    "dr_grpo": [[-0.5 / 6, 0, 0], [3 / 6, 0, 0]],
    "bnpo": [[-0.5 / 4, 0, 0], [3 / 4, 0, 0]],
    "dapo": [[-0.5 / 4, -1.25 / 4, 0], [3 / 4, 0, 0]],
    "gspo": [[0, 0, 0], [3 / 2, 0, 0]],
    "gspo_token": [[0, 0, 0], [3 / 2, 0, 0]],
    "cispo": [[-0.5 / 4, -1.25 / 4, -2 / 4], [3 / 4, 0, 0]],
    "positives_grpo": [[-0.5 / 6, 0, 0], [0, 0, 0]],
    "luspo": [[-0.5 / 2, 0, 0], [3 / 2, 0, 0]],
    # w = 1.25 with A > 0: w^2 e^(3 - 3 w); w = 1.5 with A < 0: w^3 e^(2 - 2 w)
    "vespo": [[-1.5625 * math.exp(-0.75) / 4] * 3, [2 * 3.375 * math.exp(-1) / 4, 0, 0]],
}


@pytest.mark.parametrize("name", SLOPES)
def test_which_tokens_keep_their_gradient(name, batch):
    got = gradient(FAMILY[name](*batch), batch[0])
    assert close(got, torch.tensor(SLOPES[name], dtype=torch.float64))


def test_sapo_fades_on_both_sides_and_never_jumps():
    """The slope is -A rho 4 sigma (1 - sigma): -A at rho = 1, less on both sides, and 0 nowhere."""
    ratios = torch.tensor([[0.1, 0.5, 1.0, 2.0, 6.0]], dtype=torch.float64)
    logprobs = ratios.log().requires_grad_()
    slope = gradient(
        sapo(logprobs, torch.zeros_like(ratios), torch.ones(1).double(), torch.ones(1, 5)),
        logprobs,
    )
    gate = torch.sigmoid(ratios - 1)
    assert close(slope * 5, -ratios * 4 * gate * (1 - gate)) and (slope < 0).all()


def test_cispo_bounds_the_weight_and_drops_no_token(batch):
    got = gradient(cispo(*batch, max_ratio=1.3), batch[0])
    assert close(got, torch.tensor([[-0.5, -1.25, -1.3], [2.6, 0, 0]], dtype=torch.float64) / 4)


def test_gspo_gradient_is_that_of_the_sequences_ratio(batch):
    """Unclipped: d/d log pi_t of -s A is -s A / |o|, the same for each token; gspo_token alike, token by token."""
    logprobs, old, A, mask = batch
    s = sequence_ratio(logprobs, old, mask).detach()
    for loss, advantages in ((gspo, A), (gspo_token, A), (gspo_token, A[:, None].expand(2, 3))):
        got = gradient(
            loss(logprobs, old, advantages, mask, epsilon=9, epsilon_high=99), logprobs
        )
        wanted = -s * A[:, None] / mask.sum(1, keepdim=True) * mask / 2
        assert close(got, wanted)
    own = torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    got = gradient(gspo_token(logprobs, old, own, mask, epsilon=9, epsilon_high=99), logprobs)
    assert close(got, -s * own / 3 / 2)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_clip_higher_is_the_upper_bound_alone(sign):
    """With epsilon 0.1 and epsilon_high 0.4; clip_fraction counts what has lost its gradient."""
    ratios = torch.tensor(
        [[0.3, 0.7, 0.89, 0.91, 1.0, 1.11, 1.3, 1.39, 1.41, 2.0]], dtype=torch.float64
    )
    logprobs = ratios.log().requires_grad_()
    A, mask, clip = (
        torch.tensor([sign]).double(),
        torch.ones(1, 10),
        dict(epsilon=0.1, epsilon_high=0.4),
    )
    slope = gradient(dapo(logprobs, torch.zeros_like(ratios), A, mask, **clip), logprobs) * 10
    free = ratios < 1.4 if sign > 0 else ratios > 0.9
    assert close(slope, torch.where(free, -ratios * sign, 0.0))
    low, high = clip_fraction(ratios, A, mask, **clip)
    assert (low.item(), high.item()) == pytest.approx((0, 0.2) if sign > 0 else (0.3, 0))


def test_unclipped_cispo_and_dapo_have_one_gradient(batch):
    """rho A grad log pi = A grad rho."""
    got = gradient(cispo(*batch, max_ratio=1e9), batch[0])
    assert close(got, gradient(dapo(*batch, epsilon=1.0, epsilon_high=1e9), batch[0]))


@pytest.mark.parametrize("name", FAMILY)
def test_the_present_log_probabilities_may_stand_for_the_old(name, batch):
    """Where they carry a gradient it goes nowhere, or the ratio's would vanish."""
    logprobs, _, A, mask = batch
    loss = FAMILY[name]
    got = gradient(loss(logprobs, logprobs, A, mask), logprobs)
    assert (
        close(got, gradient(loss(logprobs, logprobs.detach(), A, mask), logprobs))
        and got.abs().max() > 0.01
    )


def test_dapo_micro_batches_add_up_to_the_step_and_bnpo_ones_do_not(batch):
    whole = dapo(*batch)
    # 4 tokens in the step
    parts = [dapo(*(x[i : i + 1] for x in batch), num_tokens=torch.tensor(4)) for i in (0, 1)]
    assert close(sum(parts), whole)
    cispos = [cispo(*(x[i : i + 1] for x in batch), num_tokens=4) for i in (0, 1)]
    assert close(sum(cispos), cispo(*batch))
    halves = [bnpo(*(x[i : i + 1] for x in batch)) for i in (0, 1)]
    assert close(sum(halves) / 2, grpo(*batch)) and not close(
        sum(halves) / 2, bnpo(*batch), 1e-3
    )


@every_loss
def test_an_advantage_a_token_may_be_given(loss, batch):
    logprobs, old, A, mask = batch
    assert close(
        loss(logprobs, old, A, mask),
        loss(logprobs, old, A[:, None].expand(2, 3).contiguous(), mask),
    )


@pytest.mark.parametrize("correct_kl", [False, True])
@pytest.mark.parametrize("name", FAMILY)
def test_the_kl_is_added_to_each_token(name, correct_kl, batch):
    logprobs, old, _, mask = batch
    ref = old + torch.tensor([[0.3, -0.2, 0.1], [0.5, 7.0, 7.0]])
    options = dict(beta=0.5, ref_logprobs=ref, correct_kl=correct_kl)
    with_kl = FAMILY[name](*batch, **options) - FAMILY[name](*batch)
    kl = k3(logprobs, ref) * mask
    if correct_kl:
        kl = kl * (
            sequence_ratio(logprobs, old, mask)
            if name.startswith("gspo")
            else torch.exp(logprobs - old)
        )
    over_tokens = {
        "dr_grpo": kl.sum() / 6,
        "bnpo": kl.sum() / 4,
        "dapo": kl.sum() / 4,
        "cispo": kl.sum() / 4,
    }
    over_tokens |= {"vespo": kl.sum() / 4, "luspo": kl.sum() / 2}
    by_row = (kl.sum(1) / mask.sum(1)).mean()
    assert close(with_kl, 0.5 * over_tokens.get(name, by_row)) and with_kl.item() > 1e-3


# ---- few successes --------------------------------------------------------------------------------------------


def test_weights_on_positives_change_the_pull_of_a_prompt_and_not_where_to():
    """Rewards 0 and 1, success rate p: the expected gradient is (w+ (1 - p) + w- p) (G-1)/G times that of p."""
    toy = Toy(end=2)
    logits = toy.logits(3)
    rewards = torch.zeros(toy.n, dtype=torch.float64)
    rewards[[2, 7]] = 1.0
    p = (toy.probabilities(logits) * rewards).sum().item()
    exact = -policy_gradient(toy, logits, rewards) / 3  # dr_grpo's constant
    assert 0.01 < p < 0.3
    for positive, negative in ((1.0, 1.0), (4.0, 1.0), (1.0, 0.0), (0.0, 1.0)):

        def advantages(rows, positive=positive, negative=negative):
            return weigh_advantages(
                group_advantages(rewards[rows], 2, scale="none"), positive, negative
            )

        got = on_policy(toy, logits, FAMILY["dr_grpo"], advantages)
        assert close(got, (positive * (1 - p) + negative * p) / 2 * exact), (positive, negative)


def test_positives_grpo_is_grpo_on_weighed_advantages(batch):
    logprobs, old, A, mask = batch
    options = dict(epsilon=0.1, epsilon_high=0.4, beta=0.2, ref_logprobs=old)
    got = positives_grpo(*batch, positive_weight=3.0, negative_weight=0.5, **options)
    assert close(got, grpo(logprobs, old, torch.tensor([3.0, -1.0]).double(), mask, **options))


# ---- tokens of negatives --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "logprobs, length, keep, kept, why",
    [
        ([-1.0, -3.0, -2.0, -9.0], 3, 1 / 3, [1], "the least likely of three, not what stands behind the end"),
        ([-1.0, -3.0, -2.0, -9.0], 3, 0.34, [1, 2], "a share is rounded up"),
        ([-1.0, -3.0, -2.0, -9.0], 3, 0.01, [1], "at least one token"),
        ([-1.0, -3.0, -2.0, -9.0], 3, 1.0, [0, 1, 2], "all: nothing changes"),
        ([-2.0, -2.0, -2.0, -2.0], 4, 0.5, [0, 1], "of equally likely tokens the earlier"),
        ([-1.0] * 29 + [-2.0], 30, 0.1, [0, 1, 29], "a tenth of thirty is three, whatever floats make of it"),
        ([-1.0, -3.0], 0, 0.5, [], "a completion without tokens"),
    ],
)  # fmt: skip
def test_of_a_negative_the_least_likely_tokens_stay(logprobs, length, keep, kept, why):
    T = len(logprobs)
    mask = (torch.arange(T) < length).long().expand(2, T)
    got = filter_negative_tokens(
        torch.tensor([-0.5, 0.5]), torch.tensor([logprobs] * 2), mask, keep=keep
    )
    assert got[0].nonzero().flatten().tolist() == kept, why
    assert set(got[0][kept].tolist()) <= {-0.5}
    assert got[1].tolist() == [0.5] * length + [0.0] * (T - length), "a positive keeps all"


@pytest.mark.parametrize("name", sorted(FAMILY.keys() - {"gspo", "positives_grpo"}))
def test_a_token_that_stays_has_its_gradient_and_the_others_none(name):
    """Divisors are those of the whole completion, so what stays is as large as before; off the policy too."""
    g = torch.Generator().manual_seed(1)
    logprobs, old = -torch.rand(2, 3, 12, generator=g, dtype=torch.float64)
    mask = (torch.arange(12) < torch.tensor([[12], [7], [10]])).long()
    A = torch.tensor([-1.0, -0.5, 2.0], dtype=torch.float64)
    logprobs.requires_grad_()
    whole = gradient(FAMILY[name](logprobs, old, A, mask), logprobs)
    filtered = filter_negative_tokens(A, old, mask, keep=0.25)
    got = gradient(FAMILY[name](logprobs, old, filtered, mask), logprobs)
    stays = torch.zeros(3, 12, dtype=torch.bool)
    for row, n in ((0, 3), (1, 2)):  # a quarter of 12, and of 7 rounded up
        lowest = sorted(range(int(mask[row].sum())), key=lambda t: old[row, t].item())[:n]
        stays[row, lowest] = True
    stays[2] = mask[2] == 1
    assert close(got, torch.where(stays, whole, 0.0))


@pytest.mark.parametrize("keep", [0, -0.1, 1.5, math.nan])
def test_a_share_that_is_none_is_refused(keep):
    with pytest.raises(ValueError, match=r"keep=.* must lie in \(0, 1\]"):
        filter_negative_tokens(
            torch.tensor([1.0]), torch.zeros(1, 2), torch.ones(1, 2), keep=keep
        )


# ---- overlong -------------------------------------------------------------------------------------------------


def test_filtered_completions_add_nothing_and_still_count_as_rows(batch):
    logprobs, old, A, mask = batch
    filtered = overlong_filter(mask, torch.tensor([True, False]))
    assert filtered.tolist() == [[0, 0, 0], [1, 0, 0]]
    for name, loss in FAMILY.items():
        got = gradient(loss(logprobs, old, A, filtered), logprobs)
        assert got[0].abs().sum() == 0 and not got.isnan().any(), name
    assert grpo(logprobs, old, A, filtered).item() == pytest.approx(3 / 2)
    assert bnpo(logprobs, old, A, filtered).item() == pytest.approx(3)
    assert bnpo(logprobs, old, A, torch.zeros(2, 3)).item() == 0


# ---- errors ---------------------------------------------------------------------------------------------------


@every_loss
def test_shapes_that_would_be_stretched_are_refused(loss):
    T = torch.zeros(3, 3)  # square: (3,) would stretch without an error
    good = [T, T, torch.zeros(3), torch.ones(3, 3)]
    for place, name in enumerate(("logprobs", "old_logprobs", "advantages", "completion_mask")):
        for wrong in (torch.zeros(1, 3), torch.zeros(3, 1), torch.zeros(2)):
            if name == "advantages" and wrong.shape == (3, 1):
                continue  # one a row
            with pytest.raises(ValueError, match="has shape"):
                loss(*good[:place], wrong, *good[place + 1 :])
    with pytest.raises(ValueError, match="beta=0.1 needs ref_logprobs"):
        loss(*good, beta=0.1)
    with pytest.raises(ValueError, match="ref_logprobs has shape"):
        loss(*good, beta=0.1, ref_logprobs=torch.zeros(3, 1))


def test_a_filter_of_other_rows_is_refused():
    with pytest.raises(ValueError, match="truncated has shape"):
        overlong_filter(torch.ones(2, 3), torch.tensor([True]))
    assert math.isfinite(
        grpo(*[torch.zeros(1, 2)] * 2, torch.zeros(1), torch.ones(1, 2)).item()
    )
