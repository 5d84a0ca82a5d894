"""Models every test may ask for: a tiny random Llama and the real SmolLM2-135M-Instruct."""

import collections
import gc
import json
import os
import signal
from pathlib import Path

import pytest

# a shell's background jobs ignore the stop button
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# a process a core; threads of each would wait for the others'
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import few_words  # noqa: E402
import hypothesis  # noqa: E402
from campaigns import is_campaign  # noqa: E402

from grpo_kit.models import load_policy  # noqa: E402

hypothesis.settings.register_profile("test", max_examples=50, deadline=None)
hypothesis.settings.register_profile("campaign", max_examples=400, deadline=None)
LONGEST = ("test_pretend_card.py", "test_notebooks.py", "test_wheel.py", "test_three_doors.py")


def pytest_configure(config):
    """Before any test is imported: fifty draws a test, and as many as it takes where campaigns are asked for."""
    hypothesis.settings.load_profile(
        "test" if "not campaign" in config.option.markexpr else "campaign"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item):
    """Before pytest leaves campaigns out."""
    if is_campaign(item.nodeid):
        item.add_marker("campaign")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The longest tests first: one of a minute at the end of the queue lets the other process wait."""
    items.sort(
        key=lambda item: (
            LONGEST.index(name) if (name := item.path.name) in LONGEST else len(LONGEST)
        )
    )


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
    return few_words.policy()


@pytest.fixture(scope="session")
def smol():
    return load_policy("smollm2-135m-instruct", quiet=True)


@pytest.fixture
def read_here(monkeypatch):
    """An export is read by its reader in this process, as starting one takes seconds; a list of what it was asked."""
    from grpo_kit.more.export import _reader as reader
    from grpo_kit.more.export import verify

    asked = []

    def ask(request, path):
        asked.append(json.loads(json.dumps(request)))
        Path(request["answer"]).write_text(json.dumps(reader.read(asked[-1])), encoding="utf-8")

    monkeypatch.setattr(verify, "_ask", ask)
    return asked
