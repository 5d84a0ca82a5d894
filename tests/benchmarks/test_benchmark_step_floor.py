"""The floor of one step: the least tokens by sets of prefixes, and seconds by hand."""

from dataclasses import replace
from functools import partial

import pytest

from benchmarks.step import task_prompts
from benchmarks.step.floor import floor, needed
from benchmarks.step.sizes import SIZES
from benchmarks.step.workload import make_workload
from grpo_kit.models import load_policy


@pytest.fixture(scope="module")
def policy():
    model, tokenizer = load_policy("tiny-random", quiet=True)
    return model.cpu(), tokenizer


def prefixes(rows):
    """Every distinct beginning of the rows, as tuples."""
    return {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}


@pytest.fixture(scope="module", params=["realistic", "main-job"])
def work(request, policy):
    """Without a shared prefix, and with one; two completions of a group begin alike, too."""
    if request.param == "realistic":
        return make_workload(policy[1], SIZES["smoke"].realistic, seed=0)
    shape = SIZES["smoke"].shape("main-job")
    work = task_prompts.main_job(*policy, "smoke", shape, seed=0)
    ids = work.completion_ids
    return replace(work, completion_ids=[ids[0], [*ids[0][:3], work.eos], ids[0], *ids[3:]])


def test_least_tokens_are_those_of_distinct_prefixes(work):
    least = needed(work)
    prompts = prefixes(work.prompt_ids)
    # behind a row's last token nothing is asked
    inputs = prefixes([row[:-1] for row in work.rows])
    assert least.prefill == len(prompts) and least.starts == len(
        set(map(tuple, work.prompt_ids))
    )
    assert least.update == len(inputs) and least.decode == len(inputs - prompts)
    scored = {
        tuple(row[: len(row) - back])
        for row, ids in rows_of(work)
        for back in range(1, len(ids) + 1)
    }
    assert least.head == len(scored)
    assert least.update_keys == sum(map(len, inputs)) and least.prefill_keys == sum(
        map(len, prompts)
    )
    assert least.decode_keys == sum(map(len, inputs - prompts))


def test_each_distinct_key_is_read_once_a_step(work):
    """Step by step: the rows that still write read all that is before their newest token, and itself."""
    least, reads = needed(work), 0
    for step in range(1, least.steps + 1):
        live = [
            row[: len(row) - len(ids) + step] for row, ids in rows_of(work) if len(ids) > step
        ]
        assert live
        reads += len(prefixes(live))
    assert least.reads == reads
    assert not [1 for ids in work.completion_ids if len(ids) > least.steps + 1]


def rows_of(work):
    return list(zip(work.rows, work.completion_ids, strict=True))


def test_skipping_leaves_the_flat_groups_out_of_the_update_only(work):
    learning = [row for r, row in enumerate(work.rows) if not work.flat[r // 4]]
    least, skipping = needed(work), needed(work, skip=True)
    assert skipping.update == len(prefixes([row[:-1] for row in learning])) < least.update
    assert (skipping.prefill, skipping.decode, skipping.reads) == (
        least.prefill,
        least.decode,
        least.reads,
    )


def test_floor_by_hand(policy, work):
    model, least = policy[0], needed(work)
    total, head = model.num_parameters(), model.get_input_embeddings().weight.numel()  # tied
    body = total - head
    seconds = partial(floor, model, work, skip=False)
    compute = seconds({"FLOP/s": 1.0, "bytes/s": 1e30})
    assert compute["prefill"] == 2 * (body * least.prefill + head * 2)
    assert compute["decode"] == 2 * total * least.decode
    assert compute["forward-backward"] == 6 * (body * least.update + head * least.head)
    assert compute["step"] == sum(
        seconds for phase, seconds in compute.items() if phase != "step"
    )
    # Scores and sums: 2 products of 2 FLOP for each of 4 heads of 8 in 2 layers and each key.
    more = seconds({"FLOP/s": 1.0, "bytes/s": 1e30}, attention=True)
    key = 2 * 2 * 2 * 4 * 8
    assert more["prefill"] - compute["prefill"] == key * least.prefill_keys
    assert more["decode"] - compute["decode"] == key * least.decode_keys
    assert more["forward-backward"] - compute["forward-backward"] == 3 * key * least.update_keys
    # fp32, weights once a step; K and V, 2 layers, 2 heads of 8
    memory = seconds({"FLOP/s": 1e30, "bytes/s": 1.0})
    assert memory["decode"] == 4 * total * least.steps + 4 * 2 * 2 * 2 * 8 * least.reads
