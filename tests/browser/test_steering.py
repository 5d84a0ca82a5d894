"""A run is steered while its cell runs: by the buttons under the chart, from outside, by the stop button."""

import re

import psutil
import pytest
from real_lab import red_boxes, wait_for
from steered import MAKE_SLOW, TRAINERS, rows, step

from grpo_kit.record.files import CONTROL, read_changes
from grpo_kit.trainer.control_folder import control


def last(folder, column):
    return float(rows(folder)[-1][column] or "nan")


@pytest.fixture
def training(lab, server, request):
    """A page whose second cell trains, and the folder of its run."""
    name = re.sub(r"\W", "_", request.node.name.removeprefix("test_")).strip("_")
    make = TRAINERS[getattr(request, "param", "completions")]
    server.write(
        f"{name}.ipynb", make.format(steps=3000, name=name), "trainer.train()", "print('below')"
    )
    page, folder = lab(f"{name}.ipynb"), server.runs / name
    page.run_all()
    wait_for(lambda: step(folder) >= 3, seconds=180, words="three steps")
    page.panel.wait_for()
    return page, folder


@pytest.mark.parametrize("training", TRAINERS, indirect=True)
def test_buttons(training):
    page, folder = training
    height = page.height()
    page.press("Pause")
    wait_for(lambda: page.said.startswith("Paused after step"), words="the pause")
    paused_at = step(folder)
    page.tab.wait_for_timeout(1000)
    assert step(folder) == paused_at and page.said == f"Paused after step {paused_at}."
    page.picture("paused")
    page.press("Save now")
    wait_for(lambda: list(folder.glob(f"checkpoint-{paused_at}")), words="a checkpoint")
    page.press("Go on")
    wait_for(lambda: step(folder) > paused_at, words="a step after the pause")
    assert page.panel.get_by_role("button", name="Pause", exact=True).count() == 1

    page.set("learning rate", "not 1")
    assert page.said == "Not asked: learning rate must be a number above 0, such as 5e-6."
    page.set("learning rate", "2.5e-4")
    wait_for(
        lambda: last(folder, "learning_rate") == 2.5e-4,
        words="the learning rate in metrics.jsonl",
    )
    page.set("temperature", "0.75")
    wait_for(
        lambda: last(folder, "temperature") == 0.75, words="the temperature in metrics.jsonl"
    )
    wait_for(
        lambda: "temperature" in page.said and "From step" in page.said,
        words="what was done, in words",
    )
    assert [list(line["change"]) for line in read_changes(folder)] == [
        ["learning_rate"],
        ["temperature"],
    ]
    assert abs(page.height() - height) < 5, "the page does not jump"
    assert page.too_wide() == []
    page.picture(f"steered-{folder.name}")

    page.press("Stop after this step")
    page.wait_until_done()
    assert page.panel.count() == 0, "training is over: the buttons are gone"
    assert "kit-panel" not in page.path.read_text() and "kit-panel" not in str(page.save())
    assert "below" not in page.cell(2).inner_text().splitlines()
    assert not (folder / CONTROL).exists()


@pytest.mark.parametrize("how", ["page", "tab"])
def test_after_it_was_closed_and_opened_again(training, how):
    """The kernel's output reaches it no more: it reads the run's folder."""
    page, folder = training
    page.save()
    page.open() if how == "page" else page.close_and_open()
    page.panel.wait_for()
    at = step(folder)
    wait_for(lambda: page.shown_step > at + 1, seconds=60, words="the chart to go on")
    assert page.said == "This page was opened again: its chart is read from the run's folder."
    field = page.panel.locator('[data-kit-key="learning_rate"]')
    assert field.get_attribute("placeholder") == f"{last(folder, 'learning_rate'):.3g}"
    page.press("Pause")
    wait_for(lambda: page.said.startswith("Paused after step "), words="the pause")
    page.picture(f"opened-again-{how}")
    at = step(folder)
    assert (
        page.shown_step == at
        and "step</text>" in page.tab.locator("[data-kit-chart]").inner_html()
    )
    page.tab.wait_for_timeout(700)
    assert step(folder) == at
    page.press("Go on")
    wait_for(lambda: step(folder) > at, words="a step after the pause")
    page.press("Stop after this step")
    wait_for(
        lambda: page.said.startswith("This run trains no more. kit.plot_run("), words="the end"
    )
    assert not (folder / CONTROL).exists()


def test_from_outside(training):
    page, folder = training
    control(folder).change(learning_rate=3e-4, temperature=0.5)
    wait_for(
        lambda: (last(folder, "learning_rate"), last(folder, "temperature")) == (3e-4, 0.5),
        words="both in metrics.jsonl",
    )
    wait_for(
        lambda: "learning_rate" in page.said and "From step" in page.said, words="it in words"
    )
    control(folder).pause()
    wait_for(lambda: page.said.startswith("Paused"), words="the pause")
    page.press("Go on")  # the label follows whoever asked
    wait_for(lambda: page.said.startswith("Going on"), words="the end of the pause")
    control(folder).stop()
    page.wait_until_done()


@pytest.mark.parametrize("training", TRAINERS, indirect=True)
def test_stop_button(training):
    page, folder = training
    page.press_stop()
    page.wait_until_done()
    saved = page.save()
    (only,) = red_boxes(saved)
    assert only == (1, "Stopped"), "the training cell says so, and nothing else"
    shown = page.cell(1).locator(".jp-OutputArea-output").last.inner_text()
    assert len(shown.strip().splitlines()) == 1 and "Traceback" not in shown
    assert "To go on: trainer.train()" in shown
    assert saved.cells[2].execution_count is None, "Run all ends here"
    page.picture(f"stopped-{folder.name}")
    at = step(folder)
    page.run_cell(1)
    wait_for(lambda: step(folder) >= at + 3, words="steps after the stop")
    assert [int(row["step"]) for row in rows(folder)] == list(range(1, step(folder) + 1)), (
        "no step twice"
    )
    page.press_stop()
    page.wait_until_done()


def test_fields_show_what_the_run_has_and_a_kernel_that_trains_no_more_is_said(
    training, server
):
    page, folder = training
    field = page.panel.locator('[data-kit-key="learning_rate"]')
    wait_for(
        lambda: field.get_attribute("placeholder") == f"{last(folder, 'learning_rate'):.3g}",
        words="the rate",
    )
    ids = [kernel["id"] for kernel in server.ask("kernels")]
    # killed, as by a full memory: the server begins it anew
    for process in psutil.process_iter(["cmdline"]):
        if any(known in " ".join(process.info["cmdline"] or []) for known in ids):
            process.kill()
    dialog = page.tab.locator(".jp-Dialog button.jp-mod-accept")
    dialog.wait_for()
    dialog.click()
    wait_for(
        lambda: all(k["execution_state"] == "idle" for k in server.ask("kernels")),
        words="the new kernel",
    )
    dead = "This run stopped when its kernel was restarted, at step "
    wait_for(
        lambda: page.said.startswith(dead), seconds=10, words="the page to say so by itself"
    )
    assert (
        f"at step {step(folder)} of 3000; to go on: run the cells up to the trainer"
        in page.said
    )
    page.press("Pause")
    wait_for(lambda: page.said.startswith(dead), seconds=10, words="the button to say so")
    page.picture("nobody-hears")


def test_a_slow_run_shows_its_numbers_at_once_and_says_within_a_second_that_it_heard(
    lab, server
):
    server.write("slow.ipynb", MAKE_SLOW.format(steps=3000, name="slow"), "trainer.train()")
    page, folder = lab("slow.ipynb"), server.runs / "slow"
    page.run_all()
    page.panel.wait_for(timeout=90_000)
    shown = {
        key: page.panel.locator(f'[data-kit-key="{key}"]').get_attribute("placeholder")
        for key in ("learning_rate", "temperature")
    }
    assert step(folder) == 0, "before the first step is done"
    assert shown == {"learning_rate": "0.0003", "temperature": "0.85"}
    wait_for(lambda: step(folder) == 3, seconds=30, words="the long step")
    page.tab.wait_for_timeout(500)
    page.press("Stop after this step")
    page.tab.wait_for_timeout(1000)
    assert page.said == "Heard. The run stops and is saved when this step is done."
    assert step(folder) == 3, "while the step goes on"
    page.wait_until_done()
    assert step(folder) == 4
    page.run_cell(1)
    page.panel.wait_for()
    wait_for(lambda: step(folder) >= 7, seconds=30, words="the run to go on")
    page.press_stop()
    wait_for(
        lambda: "Stop heard." in page.cell(1).inner_text(), seconds=1.5, words="the answer"
    )
    page.wait_until_done()


@pytest.mark.parametrize("dark", [False, True])
def test_letters_and_lines_at_three_widths(lab, server, dark):
    name = "dark" if dark else "light"
    server.write(f"{name}.ipynb", MAKE_SLOW.format(steps=3000, name=name), "trainer.train()")
    page, folder = lab(f"{name}.ipynb", dark=dark), server.runs / name
    page.run_all()
    wait_for(lambda: step(folder) >= 3, seconds=90, words="three steps")
    page.tab.wait_for_timeout(500)
    for width in (1366, 1024, 800):
        page.resize(width)
        page.picture(f"{name}-{width}", cell=1)
        assert page.letters() >= 9, width
        assert page.too_wide() == [], width
        if width >= 1024:
            assert page.cut() == [], width
    assert page.hard_to_read() == []
    page.resize(1366)
    page.press_stop()
    page.wait_until_done()


def test_a_run_outside_the_servers_folder_says_what_to_type(lab, server, tmp_path):
    cell = f"from grpo_kit.watch._live import LiveChart\nLiveChart().start(2, {str(tmp_path / 'run')!r})"
    server.write("outside.ipynb", cell)
    page = lab("outside.ipynb")
    page.run_all()
    page.panel.wait_for()
    said = page.panel.inner_text()
    assert said.startswith(
        f"Buttons need a run below {server.root}, where JupyterLab was started."
    )
    assert f"kit.control('{tmp_path}/run').pause()" in said
    assert page.panel.get_by_role("button").count() == 0
