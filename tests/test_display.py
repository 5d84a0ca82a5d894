"""The progress line: in one place, only where somebody can see it, and gone at the end."""

import io
import sys

from grpo_kit.display import duration, progress_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_it_is_written_over_and_gone_at_the_end(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with progress_line("largest, completions", after=-1) as progress:
        progress(0, 4)  # nothing to say yet
        progress(1, 4)
        progress(4, 4)
    lines = screen.getvalue().split("\r")
    assert [line.strip() for line in lines if line.strip()] == [
        "largest, completions: 1 of 4, 0 s left",
        "largest, completions: 4 of 4, 0 s left",
    ]
    assert len({len(line) for line in lines if line}) == 1  # each covers the one before
    assert lines[-2].isspace() and lines[-1] == ""


def test_nothing_where_it_is_quick_or_goes_to_a_file(monkeypatch):
    for screen, after in ((Terminal(), 60), (io.StringIO(), -1)):
        monkeypatch.setattr(sys, "stderr", screen)
        with progress_line("x", after=after) as progress:
            progress(1, 2)
        assert screen.getvalue() == ""


def test_in_a_notebook_it_is_one_output_that_ends_empty():
    import nbclient
    import nbformat

    cell = (
        "from grpo_kit.display import progress_line\n"
        "with progress_line('x', after=-1) as progress:\n"
        "    progress(1, 2)\n    progress(2, 2)"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    (output,) = nbclient.NotebookClient(notebook, timeout=120).execute().cells[0].outputs
    assert output["data"] == {"text/plain": ""}


def test_durations():
    assert [duration(s) for s in (0.4, 59.6, 125, 3725)] == ["0 s", "1 min 0 s", "2 min 5 s", "1 h 2 min"]
