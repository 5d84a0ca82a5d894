"""Draws follow the distribution that transformers' own warpers define; seeds belong to rows."""

import pytest
import torch
from rollout_models import config, plain_logits, ragged_prompts, tiny_model
from transformers.generation.logits_process import TopPLogitsWarper

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.sampling import Sampler, _TopP, draw, uniform


def chi_square(observed, expected=None):
    """Pearson's p-value of counts against expected counts; a fixed seed passes or fails for good."""
    expected = torch.full_like(observed, observed.mean()) if expected is None else expected
    statistic = ((observed - expected) ** 2 / expected).sum().double()
    return torch.special.gammaincc(
        torch.tensor((len(observed) - 1) / 2).double(), statistic / 2
    ).item()


def test_chi_square_by_hand():
    # statistic 1.44, 1 degree
    assert chi_square(torch.tensor([44.0, 56.0])) == pytest.approx(0.2301, abs=1e-4)


def expected_probs(model, prompt, settings):
    """float64 (V,): transformers' warpers on a plain forward's last logits."""
    settings._eos_token_tensor = None
    warp = model._get_logits_processor(settings, input_ids_seq_length=len(prompt))
    logits = plain_logits(model, prompt, [0])
    return torch.softmax(warp(torch.tensor([prompt]), logits)[0].double(), -1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 12},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {
            "temperature": 0.8,
            "top_k": 40,
            "top_p": 0.8,
            "min_p": 0.05,
            "repetition_penalty": 1.4,
        },
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_frequencies_follow_the_distribution(options):
    """4,000 completions of one token for each of two prompts each."""
    model = tiny_model()
    prompts = ragged_prompts(lengths=(5, 9), groups=(1, 1))
    settings = config(do_sample=True, max_new_tokens=1, **options)
    n = 4_000
    rows = [p for p in prompts for _ in range(n)]
    tokens = torch.tensor(
        RolloutEngine(model).generate(rows, settings, seed=11).completion_ids
    )[:, 0]
    for p, prompt in enumerate(prompts):
        probs = expected_probs(model, prompt, settings)
        counts = torch.bincount(tokens[p * n : (p + 1) * n], minlength=len(probs)).double()
        assert counts[probs == 0].sum() == 0
        common = probs * n >= 5
        observed = torch.cat([counts[common], counts[~common].sum()[None]])
        wanted = torch.cat([probs[common], probs[~common].sum()[None]]) * n
        kept = wanted > 0
        assert kept.sum() > 5
        assert chi_square(observed[kept], wanted[kept]) > 1e-4


def test_later_tokens_follow_the_distribution_too():
    """Second tokens, given the first: one prompt, a first token that many rows share."""
    model = tiny_model()
    prompt = ragged_prompts(lengths=(6,), groups=(1,))[0]
    settings = config(do_sample=True, max_new_tokens=2, top_k=3, eos_token_id=499)
    pairs = torch.tensor(
        [
            c
            for c in RolloutEngine(model)
            .generate([prompt] * 4_000, settings, seed=2)
            .completion_ids
            if len(c) == 2
        ]
    )
    for first in pairs[:, 0].unique().tolist():
        second = pairs[pairs[:, 0] == first, 1]
        probs = expected_probs(model, [*prompt, first], settings)
        kept = probs > 0
        counts = torch.bincount(second, minlength=len(probs)).double()
        assert counts[~kept].sum() == 0
        assert chi_square(counts[kept], probs[kept] * len(second)) > 1e-4


def test_uniform_numbers_are_uniform_and_belong_to_seed_row_and_step():
    rows = torch.arange(20_000)
    u = uniform(5, rows, 3)
    assert u.dtype == torch.float64 and 0 <= u.min() and u.max() < 1
    assert chi_square(torch.histc(u, 50, 0, 1)) > 1e-4
    steps = torch.stack([uniform(5, torch.tensor([8]), t)[0] for t in range(5_000)])
    assert chi_square(torch.histc(steps, 50, 0, 1)) > 1e-4
    seeds = torch.stack([uniform(s, torch.tensor([8]), 0)[0] for s in range(5_000)])
    assert chi_square(torch.histc(seeds, 50, 0, 1)) > 1e-4
    for other in (uniform(5, rows, 4), uniform(6, rows, 3), uniform(5, rows + 1, 3)):
        assert abs(torch.corrcoef(torch.stack([u, other]))[0, 1]) < 0.04
    assert torch.equal(uniform(5, rows[[7, 3]], 3), u[[7, 3]])
    assert 0 <= uniform(2**63 - 1, rows, 0).min()


@pytest.mark.parametrize("vocabulary", [3, 256, 500, 1024])
def test_draw_is_the_inverse_of_the_cumulative_distribution(vocabulary):
    g = torch.Generator().manual_seed(0)
    probs = torch.rand(200, vocabulary, generator=g)
    probs[torch.rand(200, vocabulary, generator=g) < 0.6] = 0
    probs[:, 1] += 0.01
    probs /= probs.sum(-1, keepdim=True)
    u = torch.rand(200, generator=g, dtype=torch.float64)
    exact = probs.double().cumsum(-1)
    wanted = (exact <= u[:, None] * exact[:, -1:]).sum(-1)
    got = draw(probs, u)
    assert (got != wanted).sum() <= 1  # block sums in float32 may move a boundary by 1e-7
    assert (probs.gather(1, got[:, None]) > 0).all()


def test_draw_never_picks_what_has_no_probability():
    """The corners: u at both ends, mass in one token anywhere, also behind the last whole block."""
    for vocabulary in (300, 512):
        probs = torch.eye(vocabulary)
        for u in (0.0, 0.5, 1 - 2.0**-53):
            got = draw(probs, torch.full((vocabulary,), u, dtype=torch.float64))
            assert torch.equal(got, torch.arange(vocabulary))
    half = torch.zeros(1, 600)
    half[0, [10, 580]] = 0.5
    for u, wanted in ((0.0, 10), (0.4999999, 10), (0.5, 580), (1 - 2.0**-53, 580)):
        assert draw(half, torch.tensor([u], dtype=torch.float64)).item() == wanted
    # A block's sum in float32 can exceed the sum of its parts in float64.
    probs = torch.rand(500, 256, generator=torch.Generator().manual_seed(0))
    probs[:, 200:] = 0
    assert (draw(probs, torch.full((500,), 1 - 2.0**-53, dtype=torch.float64)) < 200).all()


@pytest.mark.parametrize("ties", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    "spread", [0.0, 1.0, 3.0, 8.0], ids=["uniform", "flat", "peaked", "steep"]
)
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.75, 0.95, 0.999])
@pytest.mark.parametrize("vocabulary", [700, 3000, 49152])
def test_top_p_keeps_what_transformers_keeps(vocabulary, top_p, spread, ties):
    """And of equal scores at the cut all, where transformers' sort decides."""
    g = torch.Generator().manual_seed(0)
    scores = spread * torch.randn(6, vocabulary, generator=g)
    scores = (2 * scores).round() / 2 if ties else scores
    scores[1, 5:] = -torch.inf  # what another warper took out
    scores[2, 7] = 60.0  # a certain token
    ids = torch.zeros(6, 1, dtype=torch.long)
    wanted = TopPLogitsWarper(top_p)(ids, scores)
    least = wanted.masked_fill(wanted == -torch.inf, torch.inf).amin(-1, keepdim=True)
    wanted = scores.masked_fill(scores < least, -torch.inf)
    for given in (scores, scores.t().contiguous().t()):  # either layout
        found = _TopP(top_p)(ids, given)
        # transformers sums in float32, which of tens of thousands is right to some 1e-6
        apart = torch.softmax(scores.double(), -1)[found.isfinite() != wanted.isfinite()]
        assert apart.sum() < 1e-5


def test_top_p_at_a_tokens_edge():
    """The fewest tokens whose mass is top_p, by float64, of large scores too."""
    dice = torch.Generator().manual_seed(0)
    ids = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(100):
        scores = 90 + 3 * torch.randn(1, 4096, generator=dice)
        edges = torch.softmax(scores.double(), -1).sort(descending=True).values.cumsum(-1)[0]
        count = int((edges < 0.97).sum())
        edge = edges[count - 1].item()
        for top_p, wanted in ((edge - 1.2e-6, count), (edge + 1.2e-6, count + 1)):
            assert _TopP(top_p)(ids, scores).isfinite().sum() == wanted


def call(sampler, logits, rows, step, ids, padding):
    return sampler(logits, rows, ids, padding, uniform(sampler.seed, rows, step))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"repetition_penalty": 1.3}], ids=str
)
def test_a_step_by_hand_in_either_layout(options, greedy):
    g = torch.Generator().manual_seed(0)
    sampler = Sampler.from_config(config(do_sample=not greedy, **options), seed=3)
    bare = Sampler.from_config(config(do_sample=not greedy, **options), seed=3, numbers=False)
    temperature = options.get("temperature", 1.0)
    for count in (7, 5, 2):
        logits = 4 * torch.randn(count, 700, generator=g)
        rows, padding = torch.arange(count), torch.zeros(count, dtype=torch.long)
        ids = torch.randint(0, 700, (count, 6), generator=g)
        wide = torch.zeros(700, 8)
        wide[:, :count] = logits.t()
        for given in (logits.clone(), wide.t()[:count]):
            out = call(sampler, given, rows, count, ids, padding)
            assert torch.equal(call(bare, given, rows, count, ids, padding).token, out.token)
            scores = logits
            if "repetition_penalty" in options:
                seen = scores.gather(1, ids)
                scores = scores.scatter(1, ids, torch.where(seen < 0, seen * 1.3, seen / 1.3))
            drawn = torch.log_softmax(scores.double() / (1 if greedy else temperature), -1)
            policy = torch.log_softmax(logits.double() / temperature, -1)
            chosen = out.token[:, None]
            assert torch.allclose(
                out.logprob.double(), drawn.gather(1, chosen)[:, 0], atol=1e-5
            )
            assert torch.allclose(
                out.policy_logprob.double(), policy.gather(1, chosen)[:, 0], atol=1e-5
            )
            assert torch.allclose(
                out.entropy.double(), -(policy.exp() * policy).sum(-1), atol=1e-5
            )
            if greedy:
                assert torch.equal(out.token, scores.argmax(-1))
            else:
                assert torch.equal(
                    out.token, draw(drawn.exp().float(), uniform(3, rows, count))
                )
            assert torch.equal(given, logits)  # the caller's logits stay


def test_a_processor_may_write_over_the_scores_and_the_policys_numbers_stay():
    def forbid(ids, scores, rows):
        scores[:, :690] = -torch.inf
        return scores

    logits, rows, ids = (
        4 * torch.randn(5, 700),
        torch.arange(5),
        torch.zeros(5, 1, dtype=torch.long),
    )
    policy = torch.log_softmax(logits, -1)
    sampler = Sampler.from_config(config(do_sample=True), 3, [forbid])
    out = call(sampler, logits, rows, 0, ids, 0 * rows)
    assert (out.token >= 690).all() and (out.logprob > out.policy_logprob).all()
    assert torch.allclose(
        out.policy_logprob, policy.gather(1, out.token[:, None])[:, 0], atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_processor_may_return_another_dtype(dtype):
    sampler = Sampler.from_config(
        config(do_sample=True), 3, [lambda ids, scores, rows: scores.to(dtype)]
    )
    rows = torch.arange(5)
    out = call(sampler, torch.randn(5, 700), rows, 0, torch.zeros(5, 1, dtype=torch.long), rows)
    assert out.logprob.dtype == torch.float32


@pytest.mark.parametrize("larger", [0, 30])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_numbers_of_a_large_vocabulary(temperature, larger):
    """torch's softmax over 152,000 tokens sums to 1 + 1e-5 on a CPU."""
    torch.manual_seed(0)
    logits = 4 * torch.randn(8, 151_936) + larger
    sampler = Sampler.from_config(config(do_sample=True, temperature=temperature), seed=3)
    out = call(sampler, logits, torch.arange(8), 0, None, None)
    policy = torch.log_softmax(logits.double() / temperature, -1)
    wanted = policy.gather(1, out.token[:, None])[:, 0]
    assert torch.allclose(out.policy_logprob.double(), wanted, atol=1e-6)
    assert torch.allclose(out.entropy.double(), -(policy.exp() * policy).sum(-1), atol=5e-5)


def test_what_the_policy_gives_no_probability_in_float32_has_a_log_probability():
    logits = torch.tensor([[0.0, -200.0, -300.0]])
    sampler = Sampler.from_config(config(), 3, [lambda ids, scores, rows: scores.flip(-1)])
    out = call(
        sampler, logits, torch.arange(1), 0, torch.zeros(1, 1, dtype=torch.long), torch.zeros(1)
    )
    assert (
        out.token.item() == 2 and out.policy_logprob.item() == -300 and out.logprob.item() == 0
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_16_bits_are_float32_before_they_are_divided(temperature):
    """On a card, whose logits may be bfloat16: as the trainer divides them."""
    logits = (4 * torch.randn(6, 900)).bfloat16()
    rows = torch.arange(6)
    sampler = Sampler.from_config(config(do_sample=True, temperature=temperature), 3)
    out = call(sampler, logits, rows, 0, None, None)
    wanted = torch.log_softmax(logits.float() / temperature, -1).gather(1, out.token[:, None])[
        :, 0
    ]
    assert torch.allclose(out.logprob, wanted, atol=2e-6)


def test_uniform_numbers_of_all_steps_at_once_are_those_of_each_step():
    rows = torch.tensor([4, 9, 2])
    chances = uniform(5, rows[:, None], torch.arange(7))
    assert all(torch.equal(chances[:, step], uniform(5, rows, step)) for step in range(7))


@pytest.mark.parametrize("vocabulary", [700, 20_000])
@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_top_p_without_waiting_keeps_what_transformers_keeps(vocabulary, spread, top_p):
    """Of distinct scores; where fewer candidates than needed were looked at it says so, and then sorts."""
    scores = spread * torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0))
    scores[1, 5:] = -torch.inf  # what another warper took out
    wanted = TopPLogitsWarper(top_p)(None, scores)
    warp = _TopP(top_p)
    found = warp.without_waiting(scores)
    if warp.too_few():
        assert vocabulary > 8192 and spread == 1 and not torch.equal(found, wanted)
        found = warp.without_waiting(scores)
    else:
        assert (vocabulary, spread, top_p) != (20_000, 1.0, 0.95)
    assert torch.equal(found, wanted) and not warp.too_few()
    assert torch.equal(_TopP(top_p, sort=True).without_waiting(scores), wanted)


def test_top_p_without_waiting_keeps_all_of_equal_scores_at_the_cut():
    scores = torch.tensor([[0.25, 0.125, 0.125, 0.125, 0.375]]).log()
    assert _TopP(0.7).without_waiting(scores).isfinite().all()
    # one of them by the order of its sort
    assert TopPLogitsWarper(0.7)(None, scores).isfinite().sum() == 3


@pytest.mark.parametrize("sampled", [False, True])
def test_numbers_that_nobody_reads_are_left_out_and_a_broken_model_is_still_seen(sampled):
    model = tiny_model()
    settings, prompts = config(do_sample=sampled), ragged_prompts()
    full = RolloutEngine(model).generate(prompts, settings, seed=1)
    bare = RolloutEngine(model).generate(prompts, settings, seed=1, numbers=False)
    assert bare.completion_ids == full.completion_ids
    assert bare.logprobs == bare.policy_logprobs == bare.entropies == []
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        RolloutEngine(model).generate(prompts, settings, seed=1, numbers=False)
