"""The figure of how a step grows: every point once, kept when stopped, the floor in it."""

import json

import matplotlib.pyplot as plt
import pytest

from benchmarks.step import scaling


def test_points_vary_one_thing_at_a_time_and_meet_in_the_middle():
    every = list(scaling.points("cpu"))
    middle = {"completion": 128, "group_size": 8, "prompts": 2}
    assert len(every) == 7 and middle in every
    for point in every:
        assert sum(point[axis] != middle[axis] for axis in middle) <= 1
    for axis, values in {
        "completion": (32, 128, 512),
        "group_size": (4, 8, 16),
        "prompts": (1, 2, 4),
    }.items():
        assert {point[axis] for point in every} == set(values)


def test_scaling_is_kept_when_stopped_and_drawn(children, tmp_path, monkeypatch):
    few = {"completion": (2, 4, 4), "group_size": (4, 4, 4), "prompts": (2, 2, 2)}
    monkeypatch.setitem(scaling.POINTS, "smoke", few)
    arguments = ["--size", "smoke", "--arms", "kit", "--out", str(tmp_path)]
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(scaling, "save", lambda *args: 1 / 0)
        scaling.main(arguments)
    assert children == ["prepare", "kit"] * 2
    children.clear()
    path = scaling.main(arguments)
    assert children == ["prepare"] * 2, "what was measured is kept"
    result = json.loads(path.read_text())
    assert [point["completion"] for point in result["points"]] == [2, 4]
    for point in result["points"]:
        assert point["floor tokens"]["decode"] == 2 * 4 * (point["completion"] - 1)
        assert point["arms"]["kit"]["tokens"]["prefill"] == 2 * 16
        assert 0 < point["floor"]["seconds"]["step"] < point["arms"]["kit"]["seconds"]
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "step_scaling_smoke.json",
        "step_scaling_smoke.png",
    ]
    path.with_suffix(".png").unlink()
    scaling.main([*arguments, "--draw"])
    assert plt.imread(path.with_suffix(".png")).shape[1] > 800


def test_lines_of_the_figure_are_the_points(tmp_path, monkeypatch):
    """Two arms and the floor in each panel, at the values of its axis, seconds as measured."""
    seconds = lambda point, k: k * point["completion"] * point["group_size"] * point["prompts"]  # noqa: E731
    found = []
    for point in scaling.points("cpu"):
        arms = {
            arm: {"seconds": seconds(point, k), "busy": k == 9}
            for arm, k in (("kit", 2), ("other", 9))
        }
        found.append({**point, "arms": arms, "floor": {"seconds": {"step": seconds(point, 1)}}})
    result = {
        "points": found,
        "axes": scaling.POINTS["cpu"],
        "weights": "w",
        "prompt tokens": 256,
    }
    figures = []
    monkeypatch.setattr(scaling.plt, "close", figures.append)
    scaling.draw(result | {"hardware": "h", "date": "d"}, tmp_path / "a.png")
    assert "beside other load" in figures[0].get_suptitle()
    middle = {"completion": 128, "group_size": 8, "prompts": 2}
    for panel, axis in zip(figures[0].axes, scaling.AXES, strict=True):
        lines = {line.get_label(): line.get_xydata().tolist() for line in panel.get_lines()}
        for label, k in (("kit", 2), ("other", 9), ("floor", 1)):
            expected = [
                [v, seconds({**middle, axis: v}, k)] for v in scaling.POINTS["cpu"][axis]
            ]
            assert lines[label] == expected, (axis, label)
