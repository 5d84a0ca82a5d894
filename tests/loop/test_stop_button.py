"""The notebook's stop button, pressed for real: a kernel is interrupted while a cell trains."""

import signal
import time

import forked
import jupyter_client
import pytest

from grpo_kit.record.files import read_metrics

TRAIN = """
import sys; sys.path.insert(0, {tests!r})
from loop_runs import make
from grpo_kit.trainer.watch_run import WatchRun
trainer = make({folder!r}, steps=400, hooks=[WatchRun(live=False)])
print("ready", flush=True)
trainer.train()
"""
BELOW = "print('half trained, taken for done')"
GO_ON = """
print("stopped at", trainer.step, trainer.step < trainer.config.steps, flush=True)
trainer.config.steps = wanted = trainer.step + 2
trainer.train()
print("done", trainer.step == wanted, flush=True)
"""


@pytest.fixture
def kernel():
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(manager, client, code, press_when=None, queued=None):
    """Execute, and press stop once press_when() holds; returns (status, text).

    queued: (code, list) of a cell that "Run all" has sent behind it.
    """
    request, text = client.execute(code), ""
    if queued:
        queued[1].append(client.execute(queued[0]))
    while True:
        if press_when is not None and press_when():
            manager.interrupt_kernel()
            press_when = None
        try:
            message = client.get_iopub_msg(timeout=0.5)
        except Exception as error:
            if type(error).__name__ != "Empty":
                raise
            continue
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "stream":
            text += message["content"]["text"]
        elif message["msg_type"] == "error":
            return "error", "\n".join(message["content"]["traceback"])
        elif (
            message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
        ):
            return "ok", text


def reply(client):
    """What became of the next cell. A kernel that was slow to start has answers to who it is before that."""
    while True:
        message = client.get_shell_msg(timeout=30)
        if message["msg_type"] == "execute_reply":
            return message["content"]["status"]


def test_stop_button_ends_run_all_in_one_line_and_the_next_cell_goes_on(
    kernel, request, tmp_path
):
    tests = str(request.path.parents[1])
    code = TRAIN.format(tests=tests, folder=str(tmp_path / "run"))
    below = []
    under_way = lambda: (tmp_path / "run").is_dir() and len(read_metrics(tmp_path / "run")) >= 2  # noqa: E731
    status, text = run(*kernel, code, press_when=under_way, queued=(BELOW, below))
    assert status == "error", text
    assert len(text.splitlines()) == 1 and text.startswith("Stopped after step "), text
    assert "To go on: trainer.train()" in text and "Traceback" not in text
    manager, client = kernel
    assert reply(client) == "error"
    assert reply(client) == "aborted", "the cell below was not run"
    time.sleep(1)  # an older ipykernel still throws away what comes within some milliseconds
    status, text = run(*kernel, GO_ON)
    assert status == "ok", text
    assert "True" in text.split("stopped at")[1].splitlines()[0]
    assert "done True" in text


def test_in_a_script_what_comes_after_training_is_not_run(request, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        TRAIN.format(tests=str(request.path.parents[1]), folder=str(tmp_path / "run"))
        + "\n"
        + BELOW
    )
    process = forked.start(script)
    while "\nstep 3" not in process.text("out"):
        assert process.poll() is None, process.text("err")
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert out.count("Stop heard. The run ends as soon as nothing is half done") == 1
    assert "half trained" not in out and "Stopped: Stopped after step" in err
    assert process.returncode not in (0, None) and list((tmp_path / "run").glob("checkpoint-*"))
