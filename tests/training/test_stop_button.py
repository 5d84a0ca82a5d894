"""The notebook's stop button, pressed for real: a kernel is interrupted while a cell trains."""

import time

import jupyter_client
import pytest

TRAIN = """
import sys; sys.path.insert(0, {tests!r})
from tiny_run import make
trainer = make("kit", {folder!r}, max_steps=400, kit={{"live": False}})
print("ready", flush=True)
trainer.train()
print("stopped at", trainer.state.global_step, trainer.interrupted, flush=True)
"""
GO_ON = """
trainer.args.max_steps = trainer.state.global_step + 2
wanted = trainer.args.max_steps
trainer.train()
print("done", trainer.state.global_step == wanted, trainer.interrupted, flush=True)
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


def run(manager, client, code, press_after=None):
    """Execute, and press stop some seconds after "ready" was printed; returns (status, text)."""
    request, text, due = client.execute(code), "", None
    while True:
        if due is not None and time.monotonic() > due:
            manager.interrupt_kernel()
            due = None
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
            if press_after is not None and "ready" in text:
                due, press_after = time.monotonic() + press_after, None
        elif message["msg_type"] == "error":
            return "error", "\n".join(message["content"]["traceback"])
        elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return "ok", text


def test_stop_button_ends_the_cell_and_the_next_cell_goes_on(kernel, request, tmp_path):
    tests = str(request.path.parents[1])
    code = TRAIN.format(tests=tests, folder=str(tmp_path / "run"))
    status, text = run(*kernel, code, press_after=6)
    assert status == "ok", text
    assert "True" in text.split("stopped at")[1]
    status, text = run(*kernel, GO_ON)
    assert status == "ok", text
    assert "done True False" in text
