"""The parts of the benchmark of one step: forced completions, workloads, clock, floor, counts of tokens."""

import copy
import os
import random
import subprocess
import sys
import time
import zlib
from functools import partial

import pytest
import torch
from transformers import Qwen2ForCausalLM

from benchmarks.step import busy, task_prompts
from benchmarks.step.forcing import ForcedCompletions
from benchmarks.step.phases import PHASES, PeakMemory, PhaseClock
from benchmarks.step.setup import Setup
from benchmarks.step.sizes import SIZES, qwen_config
from benchmarks.step.tokens import factors, weighted
from benchmarks.step.workload import (
    completion_lengths,
    exact_prompt,
    make_workload,
    plain_words,
    word_tokenizer,
)
from grpo_kit import preset
from grpo_kit.models import load_policy

PUBLISHED = 2930789034  # CRC-32 of its completions


@pytest.fixture(scope="module")
def setup():
    model, tokenizer = load_policy("tiny-random", quiet=True)
    work = make_workload(tokenizer, SIZES["smoke"].realistic, seed=0)
    return Setup(
        model.cpu(), tokenizer, work, cuda=False, bf16=False, warmup=0, tuned=(8, False)
    )


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
@pytest.mark.parametrize("workload", ["realistic", "think"])
def test_lengths_have_the_stated_mean_and_maximum(size, workload):
    size = SIZES[size].shape(workload)
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


def test_long_workload_is_all_the_same_length(setup):
    work = make_workload(setup.tokenizer, SIZES["smoke"].long, seed=0)
    assert {len(p) for p in work.prompt_ids} == {16} and {
        len(c) for c in work.completion_ids
    } == {8}


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


# ---- workloads with a task's prompts ---------------------------------------------------------------------------


def test_the_main_jobs_work_is_what_its_profile_trains_with(setup):
    shape = SIZES["smoke"].shape("main-job")
    make = partial(task_prompts.main_job, setup.model, setup.tokenizer, "smoke", shape)
    work, again, other = make(seed=0), make(seed=0), make(seed=1)
    cfg = preset("smoke")
    task = cfg.make_task()
    rendered = set(task.dataset(setup.tokenizer)["prompt"])
    assert len(work.prompts) == cfg.prompts_per_step and set(work.prompts) <= rendered
    assert [setup.tokenizer(text).input_ids for text in work.prompts] == work.prompt_ids
    assert (
        len(work.completion_ids) == cfg.completions_per_step
        and work.group_size == cfg.group_size
    )
    for ids in work.completion_ids:
        assert 1 <= len(ids) <= task.max_completion_tokens and work.eos not in ids[:-1]
        assert len(ids) == task.max_completion_tokens or ids[-1] == work.eos
    assert work.checksum == again.checksum != other.checksum


def test_sampled_completions_end_at_the_end_token(setup):
    """The fourth token of the first row is made the end token: the same draws, cut there."""
    shape, prompts = SIZES["smoke"].shape("main-job"), setup.workload.prompt_ids
    sample = lambda t: task_prompts.sampled(setup.model, t, prompts, shape, 1.0, seed=0)  # noqa: E731
    tokenizer = copy.deepcopy(setup.tokenizer)
    whole = sample(tokenizer)
    assert len(whole) == 8 and {len(ids) for ids in whole} == {8}
    end = whole[0][3]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    assert sample(tokenizer) == [
        ids[: ids.index(end) + 1] if end in ids else ids for ids in whole
    ]


def test_thinking_prompts_begin_alike(setup):
    work = task_prompts.think(setup.tokenizer, SIZES["smoke"].think, seed=0)
    one, two = work.prompt_ids
    assert one[:100] == two[:100] and one != two
    assert all(text.endswith("<think>\n") for text in work.prompts)
    assert sum(map(len, work.completion_ids)) == 40


def test_realistic_work_on_a_cpu_is_the_published_one(smol_tokenizer):
    """So that later results can be compared with the first."""
    work = make_workload(smol_tokenizer, SIZES["cpu"].realistic, seed=0)
    assert [len(ids) for ids in work.prompt_ids] == [288, 160, 224, 352]
    assert zlib.crc32(repr(work.completion_ids).encode()) == PUBLISHED


# ---- factors, and who else is at work --------------------------------------------------------------------------


def test_factors_by_hand():
    tokens = {"prefill": 10, "decode": 20, "update": 30, "head": None}
    seconds = {"prefill": 1.0, "decode": 2.0, "forward-backward": 3.0, "step": 6.5}
    others = {"prefill": 80, "decode": None, "update": 60, "head": None}
    found = factors(tokens, seconds, others, {**seconds, "prefill": 16.0, "step": 13.0})
    assert list(found) == ["prefill", "forward-backward"], (
        "decode, and so the step, was not counted"
    )
    share = {"ratio": 16.0, "fewer tokens": 8.0, "faster tokens": 2.0, "share by tokens": 0.75}
    assert found["prefill"] == pytest.approx(share)
    assert found["forward-backward"]["faster tokens"] == 0.5
    assert found["forward-backward"]["share by tokens"] is None, "nothing to share out"
    assert weighted(tokens) == 10 + 20 + 3 * 30


def test_others_are_what_this_process_is_not(tmp_path, monkeypatch):
    """Ticks of user, nice, system, idle, waiting, irq, softirq, steal, guest; cores that are not ours do not count."""
    stat = tmp_path / "stat"
    monkeypatch.setattr(busy, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2})
    tick = os.sysconf("SC_CLK_TCK")

    def write(ticks):
        stat.write_text(
            f"cpu 9\ncpu0 900 0 0 0 0 0 0 0 0\ncpu1 {ticks} 1 1 7 7 1 1 1 5\ncpu2 0 0 2 0 0 0 0 0 0\n"
        )

    write(10)
    assert busy._busy() == (10 + 5 + 2) / tick
    for extra, expected in ((0.0, 0.0), (0.2, 0.25)):
        write(10)
        other = busy.OtherLoad()
        other.start()
        used, begin = time.process_time(), time.perf_counter()
        while time.perf_counter() - begin < 0.4:
            pass
        used = time.process_time() - used
        write(10 + round((used + extra) * tick))
        assert other.stop() == pytest.approx(expected, abs=0.06)


def test_another_process_is_seen():
    if not busy.STAT.exists():
        pytest.skip("nobody says here what the cores do")
    burn = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        share = busy.load_before(0.5)
    finally:
        burn.kill()
        burn.wait()
    assert share > 0.6 / len(os.sched_getaffinity(0)) and busy.is_busy(share)
    assert not busy.is_busy(None, 0.01)
