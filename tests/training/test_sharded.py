"""FSDP2 over two processes: trl's own path without being asked, the same weights as trl's, and a stop that is exact."""

from pathlib import Path

from ranks_run import launch

from grpo_kit.record.files import read_completions, read_metrics


def test_sharded_weights_train_as_in_trl(tmp_path):
    """The script asserts DTensors, who refuses what, and compares the weights, in both processes."""
    out = launch(Path(__file__).with_name("ranks_sharded.py"), tmp_path)[1]
    assert "done 0" in out and "done 1" in out
    assert out.count("FSDP2 shards the weights over 2 processes") == 3, "once a trainer, by the main process"
    assert "cannot do this run" not in out
    assert read_metrics(tmp_path / "kit")["step"].tolist() == [1, 2, 3, 4]
    assert read_completions(tmp_path / "kit").groupby("step").size().tolist() == [8] * 4
    assert (tmp_path / "stopped" / "checkpoint-2").is_dir() is False, (
        "one of a stop goes when the run is done"
    )
