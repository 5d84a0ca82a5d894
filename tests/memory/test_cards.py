"""Several cards: the plan beside DeepSpeed's estimators, the ZeRO paper and torch's tracker; the table beside plans."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_kit.memory.cards import QWEN, cards_table, largest_that_fits
from grpo_kit.memory.plan import plan_memory, request_for
from grpo_kit.memory.roofline import CARDS, Card, step_floor
from grpo_kit.memory.shapes import Counts, config_of, count, counted
from grpo_kit.memory.sharding import average_bytes, fsdp_states, zero_states
from grpo_kit.profiles import profile

GIB = 2**30
ROOT = Path(__file__).parent.parent.parent
CFG = profile("gpu24", max_completion_tokens=256)


def of_size(size, **changes):
    return replace(CFG, model=f"Qwen/Qwen2.5-{size}-Instruct", **changes)


# ---- parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "published"),  # of the safetensors files on the hub
    [
        ("0.5B", 494_032_768),
        ("1.5B", 1_543_714_304),
        ("3B", 3_085_938_688),
        ("7B", 7_615_616_512),
        ("14B", 14_770_033_664),
        ("32B", 32_763_876_352),
        ("72B", 72_706_203_648),
    ],
)
def test_models_known_by_name_have_the_published_number_of_parameters(size, published):
    assert counted(f"Qwen/Qwen2.5-{size}-Instruct", 16).all == published


# ---- states: independent implementations -----------------------------------------------------------------------------

# deepspeed 0.19.8, cpu_offload=False: estimate_zero2_model_states_mem_needs(parameters, cards) and
# estimate_zero3_model_states_mem_needs(parameters, embedding's, cards, cpu_offload_params=False), bytes on a card.
DEEPSPEED = {
    ("0.5B", 2): (5_434_360_448, 4_990_833_536),
    ("0.5B", 8): (2_099_639_264, 1_656_112_352),
    ("1.5B", 4): (10_034_142_976, 7_880_209_152),
    ("7B", 2): (83_771_781_632, 70_720_538_112),
    ("7B", 8): (32_366_370_176, 19_315_126_656),
}


@pytest.mark.parametrize(("size", "cards"), DEEPSPEED)
def test_zero_keeps_what_deepspeeds_own_estimators_say(size, cards):
    stage2, stage3 = DEEPSPEED[size, cards]
    kept = ("weights", "gradients", "optimizer", "optimizer's own")
    step = plan_memory(of_size(size), 80, gpus=cards, sharding="zero2").parts["optimizer step"]
    assert sum(step[part] for part in kept) == pytest.approx(stage2, abs=8)
    # Stage 3 holds the 16-bit gradients beside a part of them in float32, which the estimator leaves out; it adds its
    # largest layer twice, the embedding, which is 28 % of 0.5B and which the plan has in the backward pass only.
    if size != "0.5B":
        step = plan_memory(of_size(size), 80, gpus=cards, sharding="zero3").parts["optimizer step"]
        assert sum(step[part] for part in kept) == pytest.approx(stage3, rel=0.09)


def test_the_zero_papers_figure():
    """arXiv:1910.02054, figure 1: 7.5B parameters on 64 cards, AdamW in mixed precision."""
    counts = Counts(linear=7_500_000_000, ends=0, norms=0, adapters=0, matrix=0)
    options = {"full": True, "reference": False, "sparing": False}
    second, third = (zero_states(stage, counts, 64, 2, **options) for stage in (2, 3))
    assert round((sum(second.always.values()) + second.gradients) / 1e9, 1) == 16.6
    kept = {name: size for name, size in third.always.items() if name != "communication"}
    assert round(sum(kept.values()) / 1e9, 1) == 1.9


def test_fsdp_is_what_torchs_tracker_finds_in_a_real_backward_pass():
    sys_path = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    run = [sys.executable, str(Path(__file__).parent / "fsdp_tracked.py")]
    done = subprocess.run(run, capture_output=True, text=True, env=sys_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    from fsdp_tracked import CARDS as cards
    from fsdp_tracked import CONFIG

    counts = count(CONFIG, 16)
    for sync, sparing in (("False", False), ("True", True)):
        options = {"full": True, "reference": False, "accumulates": True, "sparing": sparing}
        states = fsdp_states(counts, CONFIG.num_hidden_layers, cards, 2, 2, **options)
        seen = found[sync]
        assert states.always["weights"] == pytest.approx(seen["SHARDED_PARAM"], rel=0.001)
        gradients = seen["SHARDED_GRAD"] + seen["UNSHARDED_GRAD"]
        assert gradients <= states.gradients * 1.001
        assert states.gradients == pytest.approx(gradients, rel=0.12)
        planned = states.always["weights"] + states.gradients + sum(states.backward.values())
        tracked = seen["Total"] - seen["ACT"] - seen["TEMP"]
        assert tracked <= planned <= 1.16 * tracked
    assert found["False"]["UNSHARDED_GRAD"] > found["True"]["UNSHARDED_GRAD"] == 0


def test_each_of_several_processes_with_all_weights_is_one_with_its_share_of_the_rows():
    two = plan_memory(CFG, gpus=2, chunk_tokens=2048, checkpointed_layers=28)
    half = plan_memory(replace(CFG, prompts_per_step=4), chunk_tokens=2048, checkpointed_layers=28)
    for moment in half.parts:
        alone = {part: size for part, size in half.parts[moment].items() if part != "reserve"}
        assert {part: two.parts[moment][part] for part in alone} == alone
    largest = 151_936 * 1536 * 2  # the embedding's gradient, a tensor larger than a bucket
    assert two.parts["averaging"]["communication"] == largest
    assert two.parts["averaging"]["gradients"] == two.parts["update"]["gradients"]
    assert average_bytes(count(config_of(CFG.model), 16), 4, full=False) == 64 * 2**20


def test_rows_of_a_card_may_be_fewer_than_a_group():
    sixteen = plan_memory(CFG, gpus=16, sharding="ddp")  # 4 completions of one prompt
    kept = 28_672 * (256 + 4 * 256)
    assert sixteen.parts["rollout"]["keys and values"] == kept
    zero = plan_memory(CFG, gpus=16, sharding="zero2")  # TRL computes the prompt once a row
    assert zero.parts["rollout"]["keys and values"] == 28_672 * 4 * (256 + 256)


@pytest.mark.parametrize("sharding", ["zero2", "zero3", "fsdp"])
def test_what_is_sharded_falls_with_the_cards_and_the_rest_does_not(sharding):
    two, eight = (plan_memory(of_size("7B"), 80, gpus=n, sharding=sharding) for n in (2, 8))
    assert two.parts["update"]["optimizer"] == 4 * eight.parts["update"]["optimizer"]
    shares = 4 if sharding != "zero2" else 1
    assert two.parts["update"]["weights"] == shares * eight.parts["update"]["weights"]
    assert two.parts["update"]["head and backward"] == eight.parts["update"]["head and backward"]


def test_sampling_gathers_all_weights_in_zero3_unless_spared():
    whole = plan_memory(of_size("7B"), 80, gpus=8, sharding="zero3")
    spared = plan_memory(of_size("7B"), 80, gpus=8, sharding="zero3", sparing=True)
    assert whole.parts["rollout"]["gathered weights"] == 2 * 7_615_616_512
    assert spared.parts["rollout"]["gathered weights"] == 2 * 1.05e9
    assert "ds3_gather_for_generation=False" in str(spared)
    assert "ds3_gather_for_generation=False" not in str(whole)


def test_a_reference_model_is_gathered_whole_where_fsdp_has_it_in_one_unit():
    with_reference = plan_memory(of_size("7B", beta=0.01), 80, gpus=8, sharding="fsdp")
    assert with_reference.parts["reference"]["gathered weights"] == 4 * 7_615_616_512
    assert with_reference.parts["reference"]["reference model"] == 2 * 7_615_616_512 / 8
    assert "reference" not in plan_memory(of_size("7B"), 80, gpus=8, sharding="fsdp").parts


def test_four_bit_weights_are_made_wide_one_matrix_at_a_time():
    update = plan_memory(of_size("72B"), 80, tuning="qlora").parts["update"]
    assert update["head and backward"] < 20 * GIB  # the casts of all layers would be 131
    assert update["head and backward"] > 8192 * 29568 * 2


# ---- words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0}, "gpus=0 must be a whole number of at least 1"),
        ({"gpus": 2.0}, "gpus=2.0"),
        ({"gpus": True}, "gpus=True"),
        ({"gpus": 3}, "gpus=3 cannot share 64 completions"),
        ({"gpus": 2, "sharding": "zero1"}, "sharding='zero1' is not known; use 'ddp'"),
        ({"sharding": "fsdp"}, "give gpus of at least 2"),
        ({"gpus": 2, "sharding": "zero2", "sparing": True}, "'zero2' has nothing to spare"),
        ({"gpus": 2, "sparing": 1, "sharding": "fsdp"}, "sparing=1 must be True or False"),
        ({"gpus": 2, "sharding": "fsdp", "tuning": "qlora"}, "leaves 4-bit weights whole"),
        ({"gpus": 2, "sharding": "fsdp", "chunk_tokens": 512}, "the update is TRL's"),
    ],
)
def test_what_several_cards_cannot_be_asked_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        plan_memory("gpu24", **options)


def test_following_the_advice_of_a_sharded_plan_makes_it_fit():
    tight = {"gpu_gb": 80, "gpus": 8, "sharding": "zero3"}
    plan = plan_memory(of_size("32B"), **tight)
    assert not plan.fits
    assert "each of 8 cards, zero3, 8 completions" in str(plan)
    line = next(line for line in plan.advice if line.startswith("sparing=True"))
    saved = float(line.split(" saves ")[1].split()[0])
    spared = plan_memory(of_size("32B"), sparing=True, **tight)
    assert saved == pytest.approx(plan.peak_gib - spared.peak_gib, abs=0.06)
    assert any(line.startswith("micro_batch=4 saves") for line in spared.advice)
    assert plan_memory(of_size("32B", micro_batch=2), sparing=True, **tight).fits


# ---- floors and the table ------------------------------------------------------------------------------------------


def test_a_floor_by_hand():
    """One card of 10 TFLOP/s and 100 GB/s; Qwen2.5-1.5B, 8 x 8 completions of 256 tokens behind prompts of 256."""
    card = Card(24, 10, 100, 10)
    request = request_for(profile("gpu24", max_completion_tokens=256), 24)
    floor = step_floor(request, request.plan(checkpointed_layers=28), card)
    body, head = 1_310_340_608, 151_936 * 1536
    weights, kept = 2 * (body + head), 28_672 * (8 * 256 + 64 * 255 / 2)
    prefill = 2 * (body * 8 * 256 + head * 8) / 10e12
    decode = 255 * (weights + kept) / 100e9  # longer than its arithmetic
    assert decode > 2 * (body + head) * 64 * 255 / 10e12
    assert floor["rollout"] == pytest.approx(prefill + decode)
    tokens, scored = 8 * 255 + 64 * 256, 64 * 256
    update = (6 * (body * tokens + head * scored) + 2 * body * tokens) / 10e12
    assert floor["update"] == pytest.approx(update, rel=0.001)
    assert floor["exchange"] == 0
    assert floor["step"] == floor["rollout"] + floor["update"]


@pytest.mark.parametrize(
    ("sharding", "sparing", "sent"),
    [
        ("ddp", False, 2 * 2 * 7_615_616_512),
        ("zero2", False, 2 * 2 * 7_615_616_512),  # one micro-batch
        ("zero3", False, (1 + 3) * 2 * 7_615_616_512),
        ("zero3", True, (256 * 6.615616512e9 + 3 * 7_615_616_512) * 2),
        ("fsdp", False, (256 * 6_525_621_760 + 3 * 7_615_616_512) * 2),
    ],
)
def test_bytes_that_a_card_sends(sharding, sparing, sent):
    """A link so slow that nothing hides: the exchange is what is sent, less the arithmetic it runs beside."""
    card = Card(80, 1e9, 1e9, 1)
    request = request_for(of_size("7B"), 80, gpus=8, sharding=sharding, sparing=sparing)
    floor = step_floor(request, request.plan(), card)
    assert floor["exchange"] == pytest.approx(7 / 8 * sent / 1e9, rel=0.001)


def test_the_table_names_the_largest_that_fits_and_the_next_one_does_not():
    table = cards_table([("RTX 4090", 1), ("H100 80GB", 8)], tunings=["full"], models=QWEN[:6])
    assert table.rows["model"].tolist() == ["Qwen2.5-1.5B", "Qwen2.5-32B"]
    assert (table.rows["GiB"] <= table.rows["usable GiB"]).all()
    assert not plan_memory(of_size("3B")).fits
    assert largest_that_fits(CARDS["RTX 4090"], 8, "full", models=["Qwen/Qwen2.5-7B-Instruct"]) is None
    for text in (str(table), table._repr_html_(), table.markdown()):
        assert "On paper" in text and "Floors, which no run reaches" in text


def test_the_page_shows_the_table_as_it_is_printed():
    page = (ROOT / "docs" / "cards.md").read_text()
    table = cards_table([("T4", 1), ("RTX 4090", 1), ("RTX 4090", 2), ("RTX 4090", 4)])
    lines = table.markdown().splitlines()
    assert all(line in page.splitlines() for line in lines if line)


def test_what_the_table_cannot_be_asked_is_named():
    with pytest.raises(ValueError, match="card 'B200' is not known; use one of T4"):
        cards_table([("B200", 1)])
    with pytest.raises(ValueError, match="tuning='half'"):
        cards_table([("T4", 1)], tunings=["half"])
    with pytest.raises(ValueError, match="no field of a profile"):
        cards_table([("T4", 1)], rows=3)
    with pytest.raises(ValueError, match="gpus=5 cannot share"):
        cards_table([("T4", 5)])
    none = cards_table([(Card(2, 10, 100, 10), 1)], tunings=["full"])
    assert "none of them" in str(none)
