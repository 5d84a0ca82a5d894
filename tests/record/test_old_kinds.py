"""Runs that were recorded before there were lines, as in benchmarks/results, are tables of text, and are read."""

import pytest

from grpo_kit.record.files import RunFolderError, read_metrics

HEADER = "step,reward,reward/exact,kl,extra"


def recorded(path, *rows):
    path.mkdir()
    (path / "metrics.csv").write_text("\n".join([HEADER, *rows, ""]))
    return path


def test_they_are_read(tmp_path):
    quoted = '"{""eval/accuracy"": 0.5, ""kl"": 9}"'
    folder = recorded(
        tmp_path / "run", "1,0.1,0,,", f"2,0.2,1,,{quoted}", f"2,0.9,1,0.25,{quoted}"
    )
    table = read_metrics(folder)
    assert table["step"].tolist() == [1, 2] and table["reward"].tolist() == [0.1, 0.9]
    assert table["eval/accuracy"].tolist()[1] == 0.5 and table["kl"].isna().tolist() == [
        True,
        False,
    ]
    assert table["reward/exact"].dtype == float and table["kl"][1] == 0.25


@pytest.mark.parametrize("row", ["4,high,,,", "4,,,,{", "4,,,,,,,"])
def test_a_table_that_cannot_be_read_is_named(row, tmp_path):
    with pytest.raises(RunFolderError, match="metrics.csv cannot be read"):
        read_metrics(recorded(tmp_path / "run", "1,0.1,0,,", row))
