"""The campaign of faults: what is drawn, what an ending is called, and a few real faults, one of each kind."""

import json

import pytest
import torch

from benchmarks.faults import campaign
from benchmarks.faults.campaign import FINE, KINDS, LINES, LOST, MOMENTS, damage, drawn, ended
from benchmarks.faults.runs import ARMS
from benchmarks.result import RESULTS

WHOLE = {"weights": "a", "rows": "b", "completions": "c", "last checkpoint": "d", "kept": "e"}


def test_faults_are_a_function_of_seed_and_number():
    faults = [drawn(0, number) for number in range(256)]
    assert faults == [drawn(0, number) for number in range(256)]
    assert faults != [drawn(1, number) for number in range(256)]
    assert {f["arm"] for f in faults} == set(ARMS) and {f["kind"] for f in faults} == set(KINDS)
    for kind in KINDS:
        moments = {f["moment"] for f in faults if f["kind"] == kind}
        may = set(MOMENTS[kind in ("damage", "torn line", "damage at rest") :])
        # of few faults one moment may not be drawn
        assert moments <= may and len(may - moments) < 2, kind
    assert {0.0, 0.999} <= {f["place"] for f in faults}, "of the first step, and of the last"


@pytest.mark.parametrize(
    "first, last, outcome",
    [
        ({"killed": True}, WHOLE, "equal"),
        ({"hit": [3], "said": []} | WHOLE, None, "equal"),
        ({"hit": [3], "said": ["full"]} | WHOLE, None, "words, then equal"),
        ({"killed": True}, WHOLE | {"words": "checkpoint-4 is damaged"}, "words, then equal"),
        ({"hit": [], "said": []} | WHOLE, None, "equal; the fault came after the end"),
        (
            {"killed": True},
            {"nothing_yet": "holds no checkpoint"},
            "nothing saved yet, in words",
        ),
        ({"killed": True}, WHOLE | {"rows": "x"}, "different rows"),
        ({"hit": [3], "said": []} | WHOLE | {"weights": "x"}, None, "different weights"),
        (
            {"killed": True},
            WHOLE | {"weights": "x", "kept": "x", "words": "it cannot be kept"},
            LOST,
        ),
        (
            {"killed": True},
            WHOLE | {"rows": "x", "words": "it cannot be kept"},
            "different rows",
        ),
        (
            {"killed": True},
            WHOLE | {"weights": "x", "words": "is damaged"},
            "different weights",
        ),
        ({"killed": True}, {"error": "Traceback"}, "a raw error"),
        ({"hung": True}, None, "hung"),
    ],
)
def test_an_ending_has_one_name(first, last, outcome):
    assert ended(first, last or first, WHOLE | {"lasts": {}, "counts": {}}) == outcome


@pytest.mark.parametrize(
    "what, last, keep, outcome",
    [
        (
            "metrics.jsonl cut",
            {"rows": "x", "words": "metrics.jsonl lacks lines"},
            "last",
            LINES,
        ),
        ("metrics.jsonl cut", {"rows": "x"}, "last", "different rows"),
        ("metrics.jsonl changed", {"rows": "x"}, "last", "different rows"),
        (
            "metrics.jsonl changed",
            {"rows": "x", "words": "metrics.jsonl, line 1"},
            "last",
            LINES,
        ),
        (
            "run.json cut; metrics.jsonl changed",
            {"rows": "x", "weights": "x"},
            "last",
            "different weights, rows",
        ),
        (
            "metrics.jsonl emptied",
            {"kept": "x", "weights": "x", "words": "metrics.jsonl lacks"},
            "best",
            LINES,
        ),
        (
            "completions.jsonl removed",
            {"rows": "x", "words": "completions.jsonl"},
            "last",
            "different rows",
        ),
        ("checkpoint-2/optimizer.pt cut", {}, "last", "equal"),
    ],
)
def test_a_table_may_differ_where_it_was_damaged_and_named(what, last, keep, outcome):
    assert (
        ended({"killed": True}, WHOLE | last, WHOLE | {"lasts": {}, "counts": {}}, what, keep)
        == outcome
    )


def test_damage_at_rest_meets_any_file_of_the_run(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    for path in (
        tmp_path / "checkpoint-2/weights",
        tmp_path / "metrics.jsonl",
        tmp_path / "run.json",
    ):
        path.write_bytes(b"abcd")
    fault = {
        "kind": "damage at rest",
        "files": [[0.1, "emptied"], [0.9, "cut"], [0.4, "removed"]],
    }
    assert (
        damage(fault, tmp_path)
        == "metrics.jsonl emptied; checkpoint-2/weights cut; run.json removed"
    )
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"" and not (
        tmp_path / "run.json"
    ).exists()
    assert (tmp_path / "checkpoint-2/weights").read_bytes() == b"ab"


@pytest.mark.parametrize(
    "how, left", [("cut", b"ab"), ("changed", b"abbd"), ("removed", None), ("emptied", b"")]
)
def test_a_checkpoint_is_damaged_as_drawn(tmp_path, how, left):
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "weights").write_bytes(b"abcd")
    fault = {"kind": "damage", "damage": how, "file": 0.3, "checkpoint": -1}
    assert "checkpoint-4/weights" in damage(fault, tmp_path)
    path = tmp_path / "checkpoint-4" / "weights"
    assert (path.read_bytes() if path.exists() else None) == left
    assert (tmp_path / "checkpoint-2" / "weights").read_bytes() == b"abcd"
    assert damage(fault | {"kind": "kill"}, tmp_path) == ""


@pytest.fixture(autouse=True)
def threads():
    """Forked processes have one; what comes after has as many as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chosen(kind, arm, **more):
    """A fault in the middle of a run of the arm, which does not depend on how fast the machine is."""
    fault = drawn(0, 0) | {
        "number": 0,
        "arm": arm,
        "kind": kind,
        "moment": "sampling",
        "place": 0.8,
        "at": 0.3,
    }
    return fault | {"room": 4_000, "new_process": True, "whom": 0} | more


@pytest.mark.parametrize(
    "fault, outcomes",
    [
        (chosen("kill", "full", moment="update"), {"equal"}),
        (chosen("press", "episodes, 2 iterations", whom=0), {"equal"}),
        (chosen("file size limit", "best kept"), {"words, then equal"}),
        (chosen("damage", "LoRA", file=0.2, damage="cut"), {"words, then equal"}),
        (chosen("kill", "two processes", whom=1), {"equal"}),
        (chosen("read-only folder", "full"), {"words, then equal"}),
        (
            chosen("damage at rest", "full", files=[[0.0, "emptied"], [0.3, "cut"]]),
            {LINES, "words, then equal"},
        ),
    ],
    ids=lambda value: f"{value['kind']}, {value['arm']}" if "kind" in value else "",
)
def test_a_run_that_was_struck_is_the_undisturbed_one(tmp_path, fault, outcomes):
    campaign.ready(fault["arm"])
    found = campaign.one(fault, campaign.reference_of(fault["arm"], tmp_path), tmp_path)
    assert found["outcome"] in outcomes and found["hit"], found


def test_a_loop_that_loses_a_row_is_seen(tmp_path, monkeypatch):
    """What goes on drops the first row that it writes."""
    from grpo_kit.record._jsonl_run import RunLog

    inner, arm = RunLog.go_on_from, "full"
    campaign.ready(arm)
    reference = campaign.reference_of(arm, tmp_path)

    def loses(self, step):
        inner(self, step)
        if step:
            write = self.write
            self.write = lambda *args: setattr(self, "write", write)

    monkeypatch.setattr(RunLog, "go_on_from", loses)
    assert "rows" in campaign.one(chosen("kill", arm), reference, tmp_path)["outcome"]


def test_the_committed_campaign_adds_up():
    result = json.loads((RESULTS / "faults.json").read_text())
    assert (
        result["n"] >= 256
        and sum(result["outcomes"].values()) == result["n"]
        and not result["wrong"]
    )
    assert sum(row["n"] for row in result["counts"]) == result["n"]
    assert sum(sum(by.values()) for by in result["by_arm"].values()) == result["n"]
    assert set(result["outcomes"]) <= set(FINE) and result["arms"] == list(ARMS)
