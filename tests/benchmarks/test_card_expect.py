"""What to expect of a card: the committed numbers are the model's, and the model does what a model of peaks must."""

import importlib.util
from dataclasses import replace

import pytest

from benchmarks.card import expect, peaks
from benchmarks.card.peaks import CARDS, H200, Work, counted, decoded, weight_bytes
from benchmarks.result import ROOT, six_digits
from grpo_kit.more.memory._request import counted as parameters

RIG = ROOT / "tests" / "pretend_card"


@pytest.fixture(scope="module")
def result():
    return six_digits(expect.all_expected())


def test_the_committed_numbers_are_the_models(result):
    assert result == peaks.results("card_expected.json"), (
        "python -m benchmarks.card.expect makes them anew"
    )


def test_the_page_has_the_committed_tables(result):
    page = expect.PAGE.read_text(encoding="utf-8")
    assert page == expect.with_tables(page, result)
    assert "A model of peaks and launches, not a measurement" in page
    with pytest.raises(ValueError, match="no place"):
        expect.with_tables("without a table", result)


def test_it_is_near_what_the_h200_took(result):
    """Where nothing ran out of memory; what the costs were taken from is right in sum."""
    of = {row["what"]: row for row in result["check"]}
    seen = [
        row
        for what, row in of.items()
        if "rows" in what or what in ("full: decode of a step, s", "full: a step, s")
    ]
    assert len(seen) == 8 and all(0.75 < row["ratio"] < 1.25 for row in seen), seen
    assert of["full: ms a token of 1 rows"]["ratio"] == pytest.approx(1)
    outside = [
        of[f"full: {name} of a step, s"]
        for name in ("prefill", "forward-backward", "optimizer")
    ]
    assert sum(row["predicted"] for row in outside) == pytest.approx(
        sum(row["measured"] for row in outside), rel=1e-4
    )


@pytest.mark.parametrize("what", ["bandwidth", "flops16", "flops32"])
@pytest.mark.parametrize("kind", ["full", "LoRA", "QLoRA"])
def test_a_slower_card_is_never_faster(kind, what):
    for card in CARDS[:4]:
        slower = replace(card, **{what: getattr(card, what) / 2})
        fast, slow = (expect.expected(kind, one, 512) for one in (card, slower))
        assert slow["step"] >= fast["step"] and slow["tokens/s"] <= fast["tokens/s"]
        if what == "bandwidth":
            assert slow["step"] > 1.1 * fast["step"]


def test_less_memory_is_never_faster_and_what_does_not_fit_is_said(result):
    card = CARDS[0]
    steps = [expect.expected("full", replace(card, gib=gib), 512) for gib in (24, 22, 20)]
    assert all(one["fits"] for one in steps[:2]) and steps[0]["step"] <= steps[1]["step"]
    assert "does not fit: " in expect.table(result).split("| T4 | full |")[1].splitlines()[0]
    for cells in result["expected"].values():
        for cell in (cell for kind in cells.values() for cell in kind.values()):
            assert cell["fits"] == (cell["peak GiB"] <= cell["usable GiB"])


def test_seconds_by_hand():
    costs = peaks.Costs(0.5, 0.25, 2e-6, 5e-5, 0.1)
    card = replace(H200, bandwidth=2e12, flops16=4e12, flops32=1e12)
    assert costs.card(Work(9, 3e12, 1e12, 2e12), card) == max(3, 1) + 2
    assert costs.card(Work(9, 3e12, 4e12, 2e12, 1e12), card) == max(3 + 4, 4) + 2
    assert costs.card(Work(flops=1e12, product_bytes=5e12), card) == 5
    assert costs.token(Work(1e6, 1e12), card) == 1 + 2
    assert costs.phase(Work(1e6, 1e12), card) == 50 and costs.phase(Work(10, 1e12), card) == 1


def test_a_decoded_token_reads_each_weight_once():
    counts = parameters(peaks.MODEL, 16)
    assert weight_bytes("full") == 2 * (counts.linear + counts.ends)
    one, many = (decoded("full", 64, rows) for rows in (1, 64))
    assert (
        one.launches == many.launches
        and one.product_bytes < 1.05 * weight_bytes("full") < many.product_bytes
    )
    assert many.flops == pytest.approx(64 * one.flops)


@pytest.mark.parametrize(("kind", "most"), [("full", 29), ("LoRA", 39)])
def test_launches_a_layer_are_those_that_the_pretend_card_counts(kind, most):
    """The ratchet of test_counts_on_a_card.py: who lowers it counts again, `python -m benchmarks.card.counts`."""
    ratchet = (RIG / "card_tests" / "test_counts_on_a_card.py").read_text()
    assert f'"launches a layer, {kind}": {most},' in ratchet
    for width in peaks.results(peaks.COUNTS)["widths"]:
        assert (
            counted(kind, f"decode fused {width}", "layer").launches == most * peaks.layers()
        ), width


def test_cards_are_the_pretend_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(RIG))
    spec = importlib.util.spec_from_file_location("pretend_cards", RIG / "card.py")
    rig = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rig)
    theirs = {
        (m.gib, m.bandwidth, m.flops16, m.flops32, m.capability >= (8, 0))
        for m in rig.CARDS.values()
    }
    assert theirs == {(c.gib, c.bandwidth, c.flops16, c.flops32, c.bf16) for c in CARDS}


def test_memory_at_full_scale_is_within_a_tenth_of_the_plan():
    rows = peaks.results("card_memory.json")["rows"]
    cards = {card.name: card for card in CARDS}
    assert {(row["card"], row["tuning"]) for row in rows} == {
        (c.name, k) for c in CARDS[:4] for k in ("full", "LoRA")
    }
    for row in rows:
        plan = expect.plan_of(row["tuning"], cards[row["card"]], 512)
        cut = (row["chunk tokens"], row["checkpointed layers"])
        assert cut == (plan.chunk_tokens, plan.checkpointed_layers), (
            "python -m benchmarks.card.full_memory"
        )
        assert (
            row["planned GiB"] == pytest.approx(row["allocated GiB"], rel=0.1)
            and row["ended"] == "fits"
        )
