"""The benchmark of one step measures what it says, on the same work, or stops."""

import json
import random
import time
from functools import partial

import pytest
import torch
from transformers import Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from benchmarks.result import result_path
from benchmarks.step.__main__ import check_same_work, main
from benchmarks.step.arms import ARMS, Setup, kit, measure, trl_hf
from benchmarks.step.floor import floor
from benchmarks.step.forcing import ForcedCompletions
from benchmarks.step.phases import PHASES, PeakMemory, PhaseClock
from benchmarks.step.sizes import SIZES, qwen_config
from benchmarks.step.workload import (
    completion_lengths,
    exact_prompt,
    make_workload,
    plain_words,
    word_tokenizer,
)
from grpo_kit.models import load_policy

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

SMOKE = dict(prompts=2, group_size=4, prompt_tokens=(8, 24), mean_completion=5, max_completion=8, seed=0)


@pytest.fixture(scope="module")
def setup():
    model, tokenizer = load_policy("tiny-random", quiet=True)
    work = make_workload(tokenizer, "realistic", **SMOKE)
    return Setup(model.cpu(), tokenizer, work, cuda=False, bf16=False, warmup=0, tuned=(8, False))


@pytest.fixture(scope="module")
def plain(setup):
    return measure("trl-hf", setup)


# ---- a real run ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    path = main(["--size", "smoke", "--arms", "trl-hf,trl-hf-tuned,kit,unsloth", "--out", str(out)])
    assert path.name == "step_smoke_realistic.json"
    return json.loads(path.read_text())


def test_result_is_complete(result):
    assert list(result["arms"]) == ["trl-hf", "trl-hf-tuned", "kit", "kit-skip"]
    assert list(result["not run"]) == ["unsloth"]
    expected = {"command", "hardware", "weights", "n", "seed", "date", "versions", "work", "floor", "rounds"}
    assert expected <= result.keys()
    assert "--size smoke" in result["command"]
    assert result["work"]["completion tokens"] == 40 and result["work"]["prompt tokens"] == [12, 20]
    assert result["arms"]["trl-hf"]["rollouts by"] == "transformers.generate"
    assert result["arms"]["kit"]["rollouts by"] == "RolloutEngine"
    for arm in result["arms"].values():
        assert arm["peak bytes"]["above start"] > 0
        seconds, held = arm["timeline"]["seconds"], arm["timeline"]["GiB"]
        assert len(seconds) == len(held) <= 200 and list(seconds) == sorted(seconds) and max(held) * 2**30 > 0
        assert max(held) * 2**30 == pytest.approx(arm["peak bytes"]["above start"], rel=0.01, abs=2**21)
        assert arm["tokens/s decode"] == pytest.approx(40 / arm["phases"]["decode"]["median"], rel=1e-4)


def test_phases_add_up_to_the_step_and_are_filled(result):
    for arm, step in result["rounds"][0].items():
        assert sum(step["phases"].values()) == pytest.approx(step["seconds"], rel=1e-4), arm
        for phase in ("prefill", "decode", "reward", "forward-backward", "optimizer", "other"):
            assert step["phases"][phase] > 0, (arm, phase)
        # on-policy, beta 0: nothing to score
        assert step["phases"]["log-probs"] < 0.01 * step["seconds"], arm


def test_ratio_is_the_reference_over_the_arm(result):
    steps = result["rounds"][0]
    for reference in ("trl-hf", "trl-hf-tuned"):
        ratio = steps[reference]["seconds"] / steps["kit"]["seconds"]
        assert result["arms"]["kit"][f"{reference} / this"] == pytest.approx(ratio, rel=1e-4)


def test_all_arms_did_the_same_work(result):
    one, *others = result["rounds"][0].values()
    for other in others:
        assert other["tokens crc32"] == one["tokens crc32"] and other["mean reward"] == one["mean reward"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_only_plain_trl_checkpoints(setup, monkeypatch):
    """Checkpointed layers run once more in the backward pass: 2 layers, 1 micro-batch."""
    runs = []
    inner = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: runs.append(1) or inner(self, x))
    counts = {}
    for arm in ("trl-hf", "trl-hf-tuned"):
        runs.clear()
        measure(arm, setup)
        counts[arm] = len(runs)
    assert counts["trl-hf"] == counts["trl-hf-tuned"] + 2


# ---- what is not the same work stops it ------------------------------------------------------------------------


def other_rewards(setup, model, folder):
    trainer = kit(setup, model, folder, skip=False)
    inner = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *args: 1 - inner(*args)
    return trainer


def other_loss(setup, model, folder):
    trainer = kit(setup, model, folder, skip=False)
    inner = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: 1.01 * inner(*args, **kwargs)
    return trainer


def other_gradient(setup, model, folder):
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.05)  # on-policy, the loss does not depend on the weights
    return kit(setup, model, folder, skip=False)


def other_tokens(setup, model, folder):
    trainer = trl_hf(setup, model, folder)
    inner = trainer._generate_single_turn

    def one_token_short(*args):
        ids, _ = inner(*args)
        return [*ids[:-1], ids[-1][:-1]], None

    trainer._generate_single_turn = one_token_short
    return trainer


@pytest.mark.parametrize(
    "tampered, message",
    [
        (other_rewards, "rewards differ"),
        (other_loss, "loss differs"),
        (other_gradient, "grad_norm differs"),
        (other_tokens, "kit trained on other completions"),
    ],
)
def test_a_tampered_arm_stops_the_run(tampered, message, setup, plain, monkeypatch):
    monkeypatch.setitem(ARMS, "kit", tampered)
    step = measure("kit", setup)
    with pytest.raises(SystemExit, match=message):
        check_same_work({"kit": step, "trl-hf": plain}, setup.workload, 1e-3)


def test_an_honest_arm_passes(setup, plain):
    check_same_work({"kit": measure("kit", setup), "trl-hf": plain}, setup.workload, 1e-3)


def test_the_second_step_is_measured_after_a_warmup(setup, plain):
    """The rate is so small that the weights stay where they were."""
    warm = measure("trl-hf", Setup(**{**vars(setup), "warmup": 1}))
    check_same_work({"warm": warm, "trl-hf": plain}, setup.workload, 1e-3)
    assert sum(warm.phases.values()) == pytest.approx(warm.seconds)


# ---- forced completions ----------------------------------------------------------------------------------------

IDS = [[5, 6, 2], [7], [8, 9, 3, 4]]


def draw(scores):
    return torch.multinomial(scores.softmax(-1), 1)[:, 0].tolist()


def test_forced_rows_in_order():
    forced = ForcedCompletions(IDS, eos=2)
    for _ in range(2):
        forced.reset()
        steps = [draw(forced(None, torch.randn(3, 12))) for _ in range(5)]
        assert steps == [[5, 7, 8], [6, 2, 9], [2, 2, 3], [2, 2, 4], [2, 2, 2]]


def test_forced_rows_in_any_order_each_at_its_own_step():
    forced = ForcedCompletions(IDS, eos=2)
    step = lambda *rows: draw(forced(None, torch.randn(len(rows), 12), torch.tensor(rows)))  # noqa: E731
    assert step(2, 0) == [8, 5]
    assert step(0) == [6]
    assert step(1, 2, 0) == [7, 9, 2]
    assert step(2) == [3]


def test_forcing_leaves_the_scores_it_was_given_alone():
    scores = torch.randn(3, 12)
    before = scores.clone()
    out = ForcedCompletions(IDS, eos=2)(None, scores)
    assert torch.equal(scores, before)
    assert out[0, 5] == scores[0, 5] and out.isinf().sum() == 3 * 11


def test_forcing_refuses_rows_that_do_not_match():
    with pytest.raises(ValueError, match="2 row numbers for 3 rows"):
        ForcedCompletions(IDS, eos=2)(None, torch.zeros(3, 12), torch.tensor([0, 1]))


# ---- workload --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["cpu", "gpu"])
def test_lengths_have_the_stated_mean_and_maximum(size):
    size = SIZES[size]
    n = size.prompts * size.group_size
    lengths = completion_lengths(n, size.mean_completion, size.max_completion, seed=0)
    assert sum(lengths) / n == pytest.approx(size.mean_completion, rel=0.005)
    assert max(lengths) == size.max_completion and min(lengths) < size.mean_completion / 2
    assert lengths == completion_lengths(n, size.mean_completion, size.max_completion, seed=0)
    other = completion_lengths(n, size.mean_completion, size.max_completion, seed=1)
    assert other != lengths and sorted(other) == sorted(lengths)


def test_lengths_refuse_a_mean_above_the_maximum():
    with pytest.raises(ValueError, match="mean=64 must lie between 2 and maximum=64"):
        completion_lengths(8, 64, 64, seed=0)


@pytest.mark.parametrize("kind", ["smol", "words"])
def test_prompts_have_exactly_the_tokens_asked_for(kind, smol_tokenizer):
    tokenizer = smol_tokenizer if kind == "smol" else word_tokenizer(2000)
    dice = random.Random(0)
    words = plain_words(tokenizer, dice)
    for n in (1, 17, 384):
        text, ids = exact_prompt(tokenizer, n, words, dice)
        assert tokenizer(text).input_ids == ids and len(ids) == n


def test_completions_end_in_eos_unless_cut_off(setup):
    work = setup.workload
    for ids in work.completion_ids:
        assert (ids[-1] == work.eos) is (len(ids) < work.max_completion)
        assert work.eos not in ids[:-1]


def test_fixed_workload_is_all_the_same_length(setup):
    work = make_workload(setup.tokenizer, "fixed", **SMOKE)
    assert {len(p) for p in work.prompt_ids} == {16} and {len(c) for c in work.completion_ids} == {8}


def test_rewards_follow_from_the_tokens_and_flat_groups_are_equal(setup):
    work = setup.workload
    flat = [work.flat[row // 4] for row in range(8)]
    rewards = work.reward([""] * 8, completion_ids=work.completion_ids, flat=flat)
    assert rewards == work.reward([""] * 8, completion_ids=work.completion_ids, flat=flat)
    assert sum(work.flat) == 1 and all(0 <= r <= 1 for r in rewards)
    for group in (0, 1):
        assert (len(set(rewards[4 * group : 4 * group + 4])) == 1) is work.flat[group]


def test_random_weights_have_qwens_size():
    with torch.device("meta"):
        model = Qwen2ForCausalLM(qwen_config())
    assert model.num_parameters() == 1_543_714_304  # as in Qwen2.5-1.5B's model card: 1.54B


# ---- clock, memory, floor, files -------------------------------------------------------------------------------


def test_inner_phases_take_their_time_from_outer_ones():
    clock = PhaseClock()
    with clock.phase("decode"):
        time.sleep(0.02)
        with clock.phase("prefill"):
            time.sleep(0.05)
        clock.move(0.01, "decode", "reward")
    time.sleep(0.03)
    whole = clock.stop()
    assert sum(clock.seconds.values()) == pytest.approx(whole)
    assert clock.seconds["prefill"] == pytest.approx(0.05, abs=0.015)
    assert clock.seconds["reward"] == pytest.approx(0.01)
    assert clock.seconds["other"] >= 0.03 and clock.seconds["decode"] < 0.03
    clock.start()
    assert set(clock.seconds) == set(PHASES) and not any(clock.seconds.values())


def test_peak_memory_sees_what_was_freed_again():
    peak = PeakMemory()
    peak.start()
    block = torch.ones(2**26)  # 256 MiB
    time.sleep(0.05)
    del block
    time.sleep(0.05)
    assert peak.stop()["above start"] == pytest.approx(2**28, rel=0.1)


def test_floor_by_hand(setup):
    model, work = setup.model, setup.workload
    total, head = model.num_parameters(), model.get_input_embeddings().weight.numel()  # tied
    least = partial(floor, model, work)
    compute = least({"FLOP/s": 1.0, "bytes/s": 1e30}, skip=False)
    assert compute["prefill"] == 2 * total * 32 and compute["decode"] == 2 * total * 40
    assert compute["forward-backward"] == 6 * ((total - head) * (32 + 40) + head * 40)
    memory = least({"FLOP/s": 1e30, "bytes/s": 1.0}, skip=False)
    context = sum(
        len(work.prompt_ids[row // 4]) + t
        for row, ids in enumerate(work.completion_ids)
        for t in range(len(ids))
    )
    # fp32, K and V, 2 layers, 2 heads of 8
    assert memory["decode"] == 4 * total * 8 + 4 * 2 * 2 * 2 * 8 * context
    learning = work.flat.index(False)
    tokens = sum(map(len, work.completion_ids[4 * learning : 4 * learning + 4]))
    skipping = least({"FLOP/s": 1.0, "bytes/s": 1e30}, skip=True)
    packed = len(work.prompt_ids[learning]) + tokens
    assert skipping["forward-backward"] == 6 * ((total - head) * packed + head * tokens)


def test_results_of_other_hardware_are_kept(tmp_path):
    (tmp_path / "a.json").write_text('{"hardware": "one"}')
    assert result_path(tmp_path, "a", "one").name == "a.json"
    assert result_path(tmp_path, "a", "two").name == "a_2.json"
    (tmp_path / "a_2.json").write_text('{"hardware": "two"}')
    assert result_path(tmp_path, "a", "two").name == "a_2.json"
    assert result_path(tmp_path, "a", "three").name == "a_3.json"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--arms", "kit,nonsense"], "nonsense not known; use trl-hf"),
        (["--arms", "unsloth"], "none of these can run here"),
    ],
)
def test_arms_that_cannot_run(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(["--size", "smoke", *arguments])
