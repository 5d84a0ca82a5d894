"""Displays that refresh themselves: only when files changed, until the run has ended, and never in anyone's way."""

import asyncio
import contextvars
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import ipykernel
import nbclient
import nbformat
import pytest

from grpo_kit.record._jsonl_run import RunLog
from grpo_kit.record._run_folder import GOING, MARK, alone, is_locked
from grpo_kit.watch import _follow as follow
from grpo_kit.watch._follow import Follower, signature
from grpo_kit.watch.browse import CompletionBrowser
from grpo_kit.watch.chart import RunChart, plot_run

ROOT = Path(__file__).parents[2]


class Run:
    """A run that trains, or seems to: it has its folder's lock until end()."""

    def __init__(self, path):
        self.log, self.path, self._held = RunLog.open(path, {}), Path(path), ExitStack()
        self._held.enter_context(alone(self.path))

    def step(self, number: int, text: str = "a", *, last: bool = False) -> None:
        one = {"group": [0], "prompt": ["q"], "prefill": [""], "completion": [text]}
        more = {"reward": [0.5], "advantage": [0.0], "temperature": [1.0]}
        self.log.write(number, {"progress": number / 10, "reward": 0.5}, one | more)
        if last:
            self.end()

    def end(self) -> None:
        self._held.close()


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    run.step(1)
    yield run
    run.end()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(follow, "_LOOK", 0.02)
    monkeypatch.setattr(follow, "_SHARE", 100.0)


def test_a_run_goes_on_as_long_as_its_process_has_the_lock(run, tmp_path):
    assert is_locked(run.path), "however long it is silent"
    code = "import pathlib, sys; from grpo_kit.record._run_folder import alone\n"
    code += "with alone(pathlib.Path(sys.argv[1])): pass"
    other = subprocess.run(
        [sys.executable, "-c", code, run.path], cwd=ROOT, capture_output=True, text=True
    )
    assert "is being trained into by another process" in other.stderr
    with alone(run.path):
        assert is_locked(run.path), (
            "once more in the same process, as a recipe and its trainer do"
        )
    assert is_locked(run.path)
    run.end()
    assert is_locked(run.path) is None and not (run.path / GOING).exists()
    (run.path / GOING).write_bytes(MARK)
    assert is_locked(run.path) is False, "its process was killed"
    assert is_locked(tmp_path / "nowhere") is None


def test_it_shows_when_files_changed_and_stops_at_the_end(run):
    shown, ended = [], []

    async def watch():
        follower = Follower(
            run.path, lambda: shown.append(len(signature(run.path))), lambda: ended.append(1)
        )
        assert follower.start("test") and follower._run
        await asyncio.sleep(0.2)
        assert not shown, "nothing has changed"
        run.step(2)
        await asyncio.sleep(0.2)
        assert len(shown) == 1 and follower._run
        run.step(3, last=True)
        await asyncio.sleep(0.2)
        assert len(shown) == 2 and ended == [1] and not follower._run, (
            "the last state is shown too"
        )

    asyncio.run(watch())


def test_what_cannot_be_read_this_moment_is_tried_again(run):
    tries = []

    def show():
        tries.append(1)
        if len(tries) < 3:
            raise OSError("moved away")

    async def watch():
        follower = Follower(run.path, show)
        follower.start("test")
        run.step(2, last=True)  # the end, but not shown yet
        await asyncio.sleep(0.3)
        assert len(tries) == 3 and not follower._run

    asyncio.run(watch())


def test_stop_and_a_second_one_at_the_same_folder(run):
    shown = {"first": 0, "second": 0}

    def count(name):
        shown[name] += 1

    async def watch():
        first = Follower(run.path, lambda: count("first"))
        second = Follower(run.path, lambda: count("second"))
        first.start("test")
        await asyncio.sleep(0.1)
        second.start("test")
        assert not first._run and second._run
        run.step(2)
        await asyncio.sleep(0.2)
        assert shown == {"first": 0, "second": 1}
        second.stop()
        run.step(3)
        await asyncio.sleep(0.2)
        assert shown["second"] == 1
        second.start("test")
        await asyncio.sleep(0.2)
        assert shown["second"] == 2, "on again, with what it has missed"

    asyncio.run(watch())


def test_it_can_be_started_from_a_click_in_another_thread(run):
    """JupyterLab's clicks may come there; what is shown belongs to the cell that made it."""
    cell, shown = contextvars.ContextVar("cell", default="none"), []

    async def watch():
        cell.set("its own")
        follower = Follower(
            run.path, lambda: shown.append((cell.get(), threading.current_thread()))
        )
        thread = threading.Thread(target=follower.start, args=("test",))
        thread.start()
        thread.join()
        run.step(2, last=True)
        await asyncio.sleep(0.2)

    asyncio.run(watch())
    assert shown == [("its own", threading.main_thread())]


def test_the_browser_follows_a_run_that_goes_on(run):
    async def watch():
        browser = CompletionBrowser(run.path)
        assert browser.follow.value
        run.step(2, "fresh")
        await asyncio.sleep(0.2)
        assert browser.step.value == 2 and "fresh" in browser.view.value
        browser.step.value = 1
        before = browser.view.value
        run.step(3, "last", last=True)
        await asyncio.sleep(0.2)
        assert (
            browser.step.options[-1] == 3
            and browser.step.value == 1
            and browser.view.value == before
        )
        assert not browser.follow.value, "the run has ended"
        assert not CompletionBrowser(run.path).follow.value, (
            "and a new browser does not wait for more"
        )

    asyncio.run(watch())


def test_reading_goes_on_while_a_resumed_run_moves_files_away(run):
    browser = CompletionBrowser(run.path)
    assert not browser.follow.value, "there is no event loop to follow in"
    (run.path / "completions.jsonl").write_bytes(b"not whole\n")
    browser.button.click()
    assert "cannot be read" in browser.view.value, (
        "said, where an exception in a click would be lost"
    )


def test_outside_a_notebook_follow_is_harmless(run):
    assert type(plot_run(run.path, follow=True)) is RunChart


def test_in_a_kernel_chart_and_browser_follow_and_the_cell_ends_at_once(tmp_path):
    cells = [
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import asyncio, pathlib, time, grpo_kit as kit\n"
        "from tests.watch.test_follow import Run, follow\n"
        "follow._LOOK, follow._SHARE = 0.1, 10.0\n"
        "run = Run('run'); run.step(1)\n"
        "sent = []\n"
        "def look(message):\n"
        "    if 'image/png' in message['content'].get('data', {}):\n"
        "        sent.append((message['msg_type'], message['parent_header']['msg_id']))\n"
        "    return message\n"
        "get_ipython().display_pub.register_hook(look)",
        "kit.plot_run('run', follow=True)",
        "browser = kit.browse('run'); browser",
        "run.step(2, 'fresh')\nwhile browser.step.value < 2: await asyncio.sleep(0.1)",
        "run.step(3, 'last', last=True)\n"
        "while browser.follow.value: await asyncio.sleep(0.1)\n"
        "print(browser.step.value)",
        "while follow._TASKS: await asyncio.sleep(0.1)\n"
        "print('matplotlib.pyplot' in sys.modules, {kind for kind, _ in sent[1:]}, len({cell for _, cell in sent}))",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells]
    )
    where = {"metadata": {"path": str(tmp_path)}}
    done = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources=where
    ).execute()
    outputs = [cell.outputs for cell in done.cells]
    assert [output.output_type for output in outputs[1]] == ["display_data"], (
        "one picture, in its own cell"
    )
    assert {"image/svg+xml", "image/png"} < set(outputs[1][0].data)
    assert not outputs[3] and outputs[4][0].text == "3\n", outputs
    told = "False {'update_display_data'} "
    assert outputs[5][0].text.startswith(told)
    # before, what a thread shows belongs to the cell that runs
    if ipykernel.version_info >= (7,):
        assert outputs[5][0].text == f"{told}1\n", (
            "every update belongs to the cell of the first"
        )
