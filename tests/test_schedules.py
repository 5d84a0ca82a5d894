"""Schedules: hand-computed values, exact ends, clamping, and refusals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.schedules import constant, cosine, exponential, linear, schedule_from, stepwise

POSITIVE = st.floats(min_value=1e-3, max_value=1e3)
PROGRESS = st.floats(min_value=0, max_value=1)


@pytest.mark.parametrize(
    ("schedule", "progress", "value"),
    [
        (constant(0.9), 0.3, 0.9),
        (linear(1.0, 0.5), 0.5, 0.75),
        (linear(1.0, 0.5), 0.2, 0.9),
        (linear(0.0, 1.0), 0.25, 0.25),  # may rise too
        (cosine(1.0, 0.0), 0.5, 0.5),
        (cosine(1.0, 0.0), 1 / 3, 0.75),  # (1 + cos 60°) / 2
        (exponential(1.0, 0.01), 0.5, 0.1),
        (exponential(8.0, 1.0), 1 / 3, 4.0),
        (stepwise([1.2, 0.9, 0.6], [0.5, 0.75]), 0.49, 1.2),
        # a step belongs to what comes after it
        (stepwise([1.2, 0.9, 0.6], [0.5, 0.75]), 0.5, 0.9),
        (stepwise([1.2, 0.9, 0.6], [0.5, 0.75]), 0.75, 0.6),
        (stepwise([1.2], []), 0.4, 1.2),
    ],
)
def test_hand_computed(schedule, progress, value):
    assert schedule(progress) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("make", [linear, cosine, exponential])
@given(start=POSITIVE, end=POSITIVE, progress=PROGRESS)
def test_exact_at_both_ends_clamped_and_between_them(make, start, end, progress):
    schedule = make(start, end)
    assert schedule(0) == schedule(-0.5) == start
    assert schedule(1) == schedule(7) == end
    assert min(start, end) <= schedule(progress) <= max(start, end)


@pytest.mark.parametrize("make", [linear, cosine, exponential])
@given(start=POSITIVE, end=POSITIVE, progress=st.tuples(PROGRESS, PROGRESS))
def test_never_turns_back(make, start, end, progress):
    early, late = sorted(progress)
    start, end = max(start, end), min(start, end)
    tolerance = 1e-12 * start
    assert make(start, end)(early) >= make(start, end)(late) - tolerance


def test_exact_end_where_plain_interpolation_misses_it():
    ends = [(a / 100, b / 100) for a in range(1, 100) for b in range(1, 100)]
    missed = [(a, b) for a, b in ends if a + (b - a) * 1.0 != b]
    assert missed  # the trap is real
    assert all(make(a, b)(1) == b for a, b in missed for make in (linear, cosine, exponential))


@pytest.mark.parametrize(
    "schedule", [constant(0.9), linear(1.2, 0.6), exponential(2, 1), stepwise([2, 1], [0.5])]
)
def test_prints_as_the_call_that_makes_it(schedule):
    names = {c.__name__: c for c in (constant, linear, exponential, stepwise)}
    assert eval(repr(schedule), names) == schedule
    assert isinstance(schedule(0.5), float)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constant(math.nan), "value=nan"),
        (lambda: linear(1.0, math.inf), "end=inf"),
        (lambda: cosine("1", 0.5), "start='1'"),
        (lambda: exponential(1.0, 0.0), "end=0.0 must be a number above 0"),
        (lambda: exponential(-1.0, -0.5), "start=-1.0 must be a number above 0"),
        (lambda: stepwise([1.0, 0.5], [0.3, 0.6]), "values has 2 entries and at has 2"),
        (lambda: stepwise([1.0, 0.5, 0.2], [0.6, 0.3]), r"at=\[0.6, 0.3\] must rise"),
        (lambda: stepwise([1.0, 0.5], [1.0]), r"at=\[1.0\] must rise and lie between"),
        (lambda: stepwise([1.0, True], [0.5]), r"values\[1\]=True"),
        (lambda: linear(1.0, 0.5)(math.nan), "progress=nan"),
        (lambda: constant(1.0)(math.nan), "progress=nan"),
    ],
)
def test_refusals_name_argument_and_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "schedule",
    [
        constant(0.9),
        linear(1.2, 0.6),
        cosine(1.2, 0.6),
        exponential(1.0, 0.25),
        stepwise([1.2, 0.9, 0.6], at=[0.5, 0.75]),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_a_schedule_is_read_back_from_what_it_prints(schedule):
    assert schedule_from(repr(schedule)) == schedule


def test_a_schedule_written_by_hand():
    assert schedule_from(" linear(1.2, end=0.6) ") == linear(1.2, 0.6)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1.0",
        "linear",
        "linear(1.2)",
        "linear(1.2, f())",
        "open('x')",
        "__import__('os')",
        "stepwise([1], at=2)",
    ],
)
def test_another_text_is_no_schedule(text):
    with pytest.raises(ValueError, match="cannot be read"):
        schedule_from(text)
