"""The sandbox with ordinary programs: results, limits, batches, and what is left behind (nothing)."""

import pytest

from grpo_kit.sandbox import isolation, run_python, run_python_batch

pytestmark = pytest.mark.skipif(isolation() is None, reason="nothing here isolates programs")


def test_what_a_program_prints_and_reads():
    result = run_python("print(input()[::-1])", "äöü😀\n")
    assert (result.stdout, result.stderr, result.exit_code, result.status) == ("😀üöä\n", "", 0, "ok")
    assert result.ok


def test_a_batch_keeps_its_order():
    results = run_python_batch([(f"print({i} * int(input()))", str(i)) for i in range(8)], workers=2)
    assert [result.stdout for result in results] == [f"{i * i}\n" for i in range(8)]
