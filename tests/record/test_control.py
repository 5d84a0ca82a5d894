"""What `kit.control` asks of a run is what a running Config takes; anything else is refused before it is sent."""

import json

import pytest

import grpo_kit as kit
from grpo_kit.loop.config import FIELDS, Config
from grpo_kit.record._run_folder import alone
from grpo_kit.record.files import CONTROL, RunFolderError
from grpo_kit.trainer.control_folder import control, take_requests

TRIED = [
    0, 1, 2.5, 11, -1, 0.0, True, "linear(1.0, 0.5)", "hot", [], [0.5, 0.5], kit.linear(1.2, 0.8), "8", None,
]  # fmt: skip


@pytest.fixture
def of(tmp_path):
    """The control of a folder that this process trains into."""
    (tmp_path / "run.json").write_text("{}")
    with alone(tmp_path):
        yield control(tmp_path)


def taken(check, **named):
    try:
        check(**named)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "name", [name for name, field in FIELDS.items() if field.metadata["changes"]]
)
def test_what_is_sent_is_what_config_takes(name, of):
    for value in TRIED:
        schedule = isinstance(value, str) and name in ("temperature", "beta", "learning_rate")
        if not schedule or value == "hot":  # a text is a schedule in a file
            assert taken(of.change, **{name: value}) == taken(Config, **{name: value}), value


@pytest.mark.parametrize(
    "name", ["lr", "kl_coef", "lerning_rate", "num_generations", "max_steps", "warmup_ratio"]
)
def test_another_librarys_name_is_answered_as_config_does(name, of):
    with pytest.raises(ValueError) as asked:
        of.change(**{name: 3})
    with pytest.raises(ValueError) as made:
        Config(**{name: 3})
    assert str(asked.value) == str(made.value) and take_requests(of.folder) == []


def test_a_request_is_a_file_that_is_read_once(of, tmp_path):
    of.change(learning_rate=kit.cosine(1e-5, 1e-6), steps=9)
    of.pause()
    asked = {"learning_rate": "cosine(start=1e-05, end=1e-06)", "steps": 9}
    assert (
        take_requests(tmp_path) == [{"change": asked}, {"do": "pause"}]
        and take_requests(tmp_path) == []
    )
    with pytest.raises(
        ValueError,
        match="group_size=4 cannot be changed while a run goes on; what can: steps, ",
    ):
        of.change(group_size=4)
    with pytest.raises(ValueError, match="steps=0 must be a whole number of at least 1"):
        of.change(learning_rate=1e-5, steps=0)
    assert take_requests(tmp_path) == []
    for text in (
        "[" * 10**5,
        "[" * 250 + "]" * 250,
        '{"a":' * 300 + "1" + "}" * 300,
        '[{"a":' * 150 + "1" + "}]" * 150,
    ):
        (tmp_path / CONTROL / "deep.json").write_text(text)
        (said,) = take_requests(tmp_path)
        assert (
            "deep.json cannot be read (more than 200 lists" in said
            and take_requests(tmp_path) == []
        )
    half = tmp_path / CONTROL / "0.json"
    half.write_text('{"do": "sto')
    assert take_requests(tmp_path) == []
    half.write_text(json.dumps({"do": "stop"}))
    assert take_requests(tmp_path, before=half.stat().st_mtime) == [], (
        "written at this time, so not before"
    )
    assert take_requests(tmp_path) == [{"do": "stop"}]
    with pytest.raises(RunFolderError, match="holds no run"):
        control(tmp_path / "none")
