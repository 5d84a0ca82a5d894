"""A benchmark of one step that was stopped goes on where it was, and a busy machine is refused or noted."""

import json

import pytest
from answered_here import answered_here

from benchmarks.step.__main__ import _parse, main, prepare
from benchmarks.step.run import Runner
from benchmarks.step.sizes import SIZES, qwen_config, tiny_config
from benchmarks.step.unfinished import Unfinished


def test_the_same_command_goes_on_where_it_was_stopped(children, tmp_path, monkeypatch):
    arguments = ["--size", "smoke", "--arms", "trl-hf,kit", "--out", str(tmp_path)]
    stop_at = iter([None, None, KeyboardInterrupt])

    def stopped(runner, arm, *args, **kwargs):
        if stop := next(stop_at):
            raise stop
        return measure_(runner, arm, *args, **kwargs)

    measure_ = Runner.measure
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Runner, "measure", stopped)
        main([*arguments, "--rounds", "2"])
    assert children == ["prepare", "trl-hf", "kit"]
    assert not list(tmp_path.glob("step_*"))

    children.clear()
    result = json.loads(main([*arguments, "--rounds", "2"]).read_text())
    assert children == ["prepare", "trl-hf", "kit"], "round 1 was kept, round 2 was left"
    assert [list(r) for r in result["rounds"]] == [["trl-hf", "kit"]] * 2

    children.clear()
    main([*arguments, "--rounds", "2"])
    assert len(children) == 5, "a finished command begins anew"


def test_what_other_code_measured_is_measured_anew(children, tmp_path, monkeypatch):
    arguments = ["--size", "smoke", "--arms", "kit", "--out", str(tmp_path), "--rounds", "1"]
    # stopped at the very end
    monkeypatch.setattr("benchmarks.step.__main__.make_result", lambda *args: 1 / 0)
    for state, asked in (("one", 2), ("one", 1), ("two", 2)):
        monkeypatch.setattr(
            "benchmarks.step.run.code_state", lambda kit, s=state: {"commit": s, "files": s}
        )
        children.clear()
        with pytest.raises(ZeroDivisionError):
            main(arguments)
        assert len(children) == asked, state


def test_unfinished_of_another_work_is_begun_anew(tmp_path):
    path, code = tmp_path / ".a.json", {"files": "x"}
    Unfinished(path, {"seed": 0}).add("1 kit", {"seconds": 2.0}, code)
    assert Unfinished(path, {"seed": 0}).get("1 kit", code) == {"seconds": 2.0}
    assert Unfinished(path, {"seed": 0}).get("1 kit", {"files": "y"}) is None
    assert Unfinished(path, {"seed": 1}).get("1 kit", code) is None


def test_a_busy_machine_is_refused_or_noted(children, tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(
        "benchmarks.step.run.wait_until_quiet", lambda patience: waited.append(patience) or 0.4
    )
    options = _parse(["--size", "smoke", "--out", str(tmp_path)])
    runner = prepare(options, SIZES["smoke"].realistic, "realistic")
    assert runner.measure("kit", (8, False)).before is None and not waited, (
        "smoke waits for nobody"
    )
    options.size = "cpu"
    with pytest.raises(SystemExit, match="before kit: other processes take 40%"):
        runner.measure("kit", (8, False), 1)
    options.busy = True
    measured = runner.measure("kit", (8, False), 1)
    assert waited == [60.0, 0.0] and measured.before == 0.4 and measured.busy


def test_where_no_arm_could_be_measured_the_command_says_so_and_begins_anew(
    children, tmp_path, monkeypatch
):
    arguments = ["--size", "smoke", "--arms", "kit", "--out", str(tmp_path)]
    killed = {"error": "killed"}

    def answered(request, kit, **how):
        return killed if "arm" in request else answered_here(request)

    with (
        monkeypatch.context() as patch,
        pytest.raises(SystemExit, match=r"no arm was measured \(kit: killed\)"),
    ):
        patch.setattr("benchmarks.step.run.in_a_child", answered)
        main(arguments)
    assert not list(tmp_path.iterdir()), "no result, and nothing that is read again"
    main(arguments)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_random_weights_of_the_smallest_size_are_tiny(tuning, children, tmp_path):
    arguments = ["--size", "smoke", "--random-weights", "--tuning", tuning, "--arms", "kit"]
    result = json.loads(main([*arguments, "--out", str(tmp_path)]).read_text())
    assert result["weights"] == "tiny shapes, random weights; made-up words as tokens"
    assert result["arms"]["kit"]["tokens"]["prefill"] == 12 + 20
    assert tiny_config().hidden_size < qwen_config().hidden_size
