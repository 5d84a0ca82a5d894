"""Records of earlier versions, a table of text and parquet parts, are read; what is damaged is named."""

import pandas as pd
import pytest

from grpo_kit.record.files import RunFolderError, read_completions, read_metrics

HEADER = "step,reward,reward/exact,kl,extra"


def recorded(path, *rows):
    path.mkdir()
    (path / "metrics.csv").write_text("\n".join([HEADER, *rows]))
    parts = path / "completions.parquet"
    parts.mkdir()
    for session, step, reward in ((0, 1, 0.1), (0, 2, 0.2), (1, 2, 0.9)):  # step 2 was done again
        table = {"step": [step] * 2, "completion": ["a", "b"], "reward": [reward] * 2}
        pd.DataFrame(table).to_parquet(parts / f"part-{session:03}-{step:06}.parquet")
    return path


def test_they_are_read(tmp_path):
    quoted = '"{""eval/accuracy"": 0.5}"'
    folder = recorded(tmp_path / "run", "1,0.1,0,,", f"2,0.2,1,,{quoted}", f"2,0.9,1,0.25,{quoted}", "3,0.")
    table = read_metrics(folder)
    assert table["step"].tolist() == [1, 2] and table["reward"].tolist() == [0.1, 0.9], (
        "half a row is left out"
    )
    assert table["eval/accuracy"].tolist()[1] == 0.5 and table["kl"].isna().tolist() == [True, False]
    seen = read_completions(folder)
    assert seen["step"].tolist() == [1, 1, 2, 2] and seen["reward"].tolist() == [0.1, 0.1, 0.9, 0.9]


@pytest.mark.parametrize(
    "row, words",
    [
        ("4,0.5", "line 3 cannot be read .2 cells where the header has 5"),
        ("4,high,,,", "line 3 cannot be read.*high"),
        ("4,,,,{", "line 3 cannot be read"),
        (",,,,", "line 3 cannot be read"),
    ],
)
def test_a_broken_row_is_named(row, words, tmp_path):
    with pytest.raises(RunFolderError, match=words):
        read_metrics(recorded(tmp_path / "run", "1,0.1,0,,", row, ""))


def test_a_foreign_file_among_the_parts_is_named(tmp_path):
    folder = recorded(tmp_path / "run", "1,0.1,0,,", "") / "completions.parquet"
    (folder / "notes.txt").write_text("mine")
    assert len(read_completions(tmp_path / "run")) == 4
    pd.DataFrame({"a": [1]}).to_parquet(folder / "part-mine.parquet")
    with pytest.raises(RunFolderError, match="part-mine.parquet is not a part"):
        read_completions(tmp_path / "run")
    (folder / "part-mine.parquet").rename(folder / "part-009-000000.parquet")
    with pytest.raises(RunFolderError, match="part-009-000000.parquet has no column 'step'"):
        read_completions(tmp_path / "run")
    (folder / "part-009-000000.parquet").write_text("no parquet")
    with pytest.raises(RunFolderError, match="part-009-000000.parquet cannot be read"):
        read_completions(tmp_path / "run")
