"""`browse` in a page: from a second notebook while a run is written, and in a kernel that is busy training."""

from real_lab import wait_for
from steered import MAKE, step

FINISHED = MAKE.format(steps=4, name="finished") + "_ = trainer.train()"


def shown(page):
    """The step that the browser shows."""
    return int(page.tab.locator(".widget-readout").inner_text())


def move(page, key):
    """The step slider, by keyboard."""
    page.tab.locator(".noUi-handle, .ui-slider-handle").first.press(key)


def test_from_a_second_notebook(lab, server):
    server.write("runs.ipynb", MAKE.format(steps=3000, name="runs"), "trainer.train()")
    server.write("looks.ipynb", "import grpo_kit as kit", "kit.browse('../runs/runs')")
    page, folder = lab("runs.ipynb"), server.runs / "runs"
    page.run_all()
    wait_for(lambda: step(folder) >= 3, seconds=90, words="three steps")
    second = lab("looks.ipynb")
    second.run_all()
    second.tab.locator(".widget-readout").wait_for()
    first = shown(second)
    wait_for(
        lambda: shown(second) > first, seconds=20, words="the newest step, without a click"
    )
    second.wait_until_done()
    second.tab.get_by_placeholder("text to find").fill("no such text")
    second.tab.keyboard.press("Enter")
    second.tab.get_by_text("holds no such text").wait_for()
    assert second.too_wide() == []
    second.picture("browse")
    page.press_stop()
    page.wait_until_done()


def test_in_a_kernel_that_is_busy(lab, server):
    server.write(
        "busy.ipynb",
        FINISHED,
        "kit.browse(folder)",
        "import time\nfor _ in range(200): time.sleep(0.1)",
    )
    page = lab("busy.ipynb")
    page.run_all()
    page.tab.locator(".widget-readout").wait_for(timeout=90_000)
    wait_for(
        lambda: page.cell(2).locator(".jp-InputPrompt").inner_text() == "[*]:",
        words="the last cell",
    )
    page.tab.wait_for_timeout(500)
    page.tab.get_by_placeholder("text to find").fill("no such text")
    page.tab.keyboard.press("Enter")
    page.tab.get_by_text("holds no such text").wait_for(timeout=5_000)
    assert page.cell(2).locator(".jp-InputPrompt").inner_text() == "[*]:", "still busy"
    page.press_stop()
    page.wait_until_done()
