"""Models every test may ask for: a tiny random Llama and the real SmolLM2-135M-Instruct."""

import collections
import gc
import os
import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs ignore the stop button
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core; threads of each would wait for the others'
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from grpo_kit.models import load_policy  # noqa: E402


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Notebooks first: a test of half a minute at the end of the queue lets the other process wait."""
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")


def pytest_terminal_summary(terminalreporter):
    """What was skipped, one line a reason."""
    why = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        if isinstance(report.longrepr, tuple)
        else str(report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
    )
    if why:
        terminalreporter.section("skipped")
        for reason, count in why.most_common():
            terminalreporter.line(f"{count:4} {' '.join(reason.split())[:150]}")


def pytest_collection_finish(session):
    """Every train() collects garbage; looking through torch, transformers and trl for it takes 0.4 s and finds none."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smol_tokenizer():
    return load_policy("tiny-random", quiet=True)[1]


@pytest.fixture
def tiny():
    return load_policy("tiny-random", quiet=True)


@pytest.fixture(scope="session")
def smol():
    return load_policy("smollm2-135m-instruct", quiet=True)
