"""The main notebook as committed: opened, and run from top to bottom."""

import platform

import nbformat
from real_lab import red_boxes


def _code(page):
    return [
        cell
        for cell in nbformat.read(page.path, as_version=4).cells
        if cell.cell_type == "code"
    ]


def test_opening_it_does_not_make_it_dirty(lab, server):
    path = server.add("05_train_full.ipynb")
    notebook = nbformat.read(path, as_version=4)
    # Lab writes this kernel's
    notebook.metadata.language_info.version = platform.python_version()
    nbformat.write(notebook, path)
    before = open(path, "rb").read()
    page = lab("05_train_full.ipynb")
    page.wait_until_done()
    page.tab.wait_for_timeout(2000)
    assert page.tab.locator(".jp-mod-dirty").count() == 0
    page.save()
    assert open(path, "rb").read() == before


def test_run_all(lab, server):
    server.add("05_train_full.ipynb")
    page = lab("05_train_full.ipynb", dark=True)
    page.run_all()
    page.wait_until_done(seconds=150)
    train, compare = (
        next(n for n, cell in enumerate(_code(page)) if what in cell.source)
        for what in ("trainer.train()", "kit.compare(")
    )
    page.picture("trained-dark", cell=train)
    page.picture("compared-dark", cell=compare)
    assert page.too_wide() == []
    breaks = "[...document.querySelectorAll('.jp-OutputArea-output pre')].map(e => getComputedStyle(e).wordBreak)"
    assert {*page.tab.evaluate(breaks)} == {"normal"}, "no line is broken inside a word"
    assert page.hard_to_read() == [], "on the dark theme"
    saved = page.save()
    assert not red_boxes(saved)
    assert all(cell.execution_count for cell in saved.cells if cell.cell_type == "code")
    text = page.path.read_text()
    assert "kit-panel" not in text, "nothing of the control panel stays"
    assert "widgets" not in saved.metadata
