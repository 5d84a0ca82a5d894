"""Each fault that the benchmark puts into a fast part is found in that part, and none where there is none."""

from benchmarks.check_card import FAULTS, rows_of


def test_every_fault_is_found_in_its_part():
    clean, *faulty = rows_of("full, float32", "tiny-random")
    assert clean["engine"].startswith("equal") and clean["packed update"].startswith("equal")
    assert [(row["part"], row["fault"]) for row in faulty] == list(FAULTS)
    assert all(row["as it should be"] for row in faulty), faulty
