"""The live chart is fresh and cheap: how that is counted, by hand, and that it is so."""

import json

import pytest

from benchmarks.live_chart import RUNS, freshness, measure, meets
from benchmarks.result import RESULTS


@pytest.mark.parametrize(
    "pictures, expected, why",
    [
        ([(10.1, 1), (20.1, 2), (30.1, 3)], (0.1, 0, 0.1), "a picture a step"),
        (
            [(10.0, 0), (12, 1), (33, 3)],
            (2, 1, 13),
            "an empty one does not count; step 2 came 13 s late",
        ),
        ([], (None, 3, 24), "none before the end"),
        ([(25, 2)], (15, 1, 15), "step 3 is seen at the end, 4 s after it"),
    ],
)
def test_freshness_by_hand(pictures, expected, why):
    found = freshness([10, 20, 30], pictures, over=34)
    assert tuple(found.values()) == pytest.approx(expected), why


@pytest.mark.parametrize("steps, seconds", RUNS)
def test_the_display_meets_all_three_in_a_real_kernel(steps, seconds):
    found = measure(steps, seconds)
    assert meets(found), found
    assert found["pictures"] == steps, "one a step"


def test_the_saved_result_says_the_same():
    saved = json.loads((RESULTS / "live_chart.json").read_text())
    assert saved["n"] >= 3 and saved["hardware"] and saved["date"]
    assert all(
        run["meets all three"] == all(map(meets, run["repeats"])) for run in saved["runs"]
    )
    # At commit 92c9213 ("before") short runs had no picture in time; at a minute a step every step had one.
    assert [run["meets all three"] for run in saved["runs"]][-3:] == [True] * 3
