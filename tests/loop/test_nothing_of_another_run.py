"""A run folder's files that are damaged, doctored or another run's: refused by name, and a change is never lost.

KIT_DRAWN_FAULTS=100 draws so many faults in place of a few.
"""

import json
import os
import random
import shutil
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from loop_runs import make, record, same, task, weights

from grpo_kit.evaluation.accuracy import Evaluation
from grpo_kit.evaluation.comparison import results
from grpo_kit.loop.protocols import Hook
from grpo_kit.models import load_policy
from grpo_kit.more.lab._job import model_in
from grpo_kit.record._digests import checkpoints, write_digests
from grpo_kit.record.files import (
    RunFolderError,
    next_run_folder,
    read_changes,
    read_completions,
    read_metrics,
)
from grpo_kit.rewards.scoring import RewardError, totals
from grpo_kit.watch._run_state import RunState
from grpo_kit.watch.run_card import model_card
from grpo_kit.watch.terminal import where_it_is

DEEP = b'{"a": ' * 100_000 + b"1" + b"}" * 100_000
SETTINGS = {"steps": 6, "save_steps": 2, "save_total_limit": 3}


class Killed(BaseException):
    """Ends train() as a kill does: nothing is saved."""


class Act(Hook):
    """Changes the rate after one step, and is killed after another."""

    def __init__(self, change=0, kill=0):
        self.change, self.kill = change, kill

    def after_step(self, trainer, row, batch):
        if trainer.step == self.change:
            trainer.change(learning_rate=3e-2)
        if trainer.step == self.kill:
            raise Killed


def train(folder, *, change=0, kill=0, resume=False, **config):
    trainer = make(folder, hooks=[Act(change, kill)], **(SETTINGS | config))
    try:
        trainer.train(resume=resume)
    except Killed:
        return None
    return trainer


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run that was changed after this step, and of one that was not (0)."""

    @cache
    def of(change):
        return weights(train(tmp_path_factory.mktemp("whole") / "run", change=change))

    return of


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two runs, killed after their fifth step: `own`, and `other` of another seed."""
    root = tmp_path_factory.mktemp("runs")
    train(root / "own", change=3, kill=5)
    train(root / "other", change=1, kill=5, seed=4)
    return root


@pytest.fixture
def run(runs, tmp_path):
    return shutil.copytree(runs / "own", tmp_path / "own")


# ---- a change is not lost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, kills",
    [
        (5, [5]),  # killed before its step was ever done: on no record, so not made again
        (4, [5, 4]),  # done once, taken back, killed again before it was done again
        (3, [5, 4]),
        (4, [5, 4, 4]),  # three processes
        (5, [6, 5]),
        (2, [4, 3]),
    ],
)
def test_a_change_is_made_again_by_every_later_process(change, kills, tmp_path, undisturbed):
    folder = tmp_path / "run"
    limit = {"save_steps": 100} if kills[0] == 4 else {}
    train(folder, change=change, kill=kills[0], **limit)
    for step in kills[1:]:
        if not checkpoints(folder):
            return
        shutil.rmtree(folder / "checkpoint-4", ignore_errors=True)
        assert train(folder, kill=step, resume=True) is None
    shutil.rmtree(folder / "checkpoint-4", ignore_errors=True)
    ended = train(folder, resume=True)
    assert same(weights(ended), undisturbed(0 if change == kills[0] else change))


# ---- another run's files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, words",
    [
        (["checkpoint-4"], "equal"),
        (
            ["checkpoint-2", "checkpoint-4"],
            "no whole checkpoint .*another run than the run.json",
        ),
        (["metrics.jsonl"], "metrics.jsonl is of another run"),
        (["completions.jsonl"], "completions.jsonl is of another run"),
        (["metrics.jsonl", "completions.jsonl"], "is of another run"),
        (["run.json"], "is of another run"),
    ],
)
def test_files_of_another_run_are_refused_by_name(names, words, run, runs, undisturbed, capsys):
    for name in names:
        there = run / name
        shutil.rmtree(there) if there.is_dir() else there.unlink()
        taken = runs / "other" / name
        shutil.copytree(taken, there) if taken.is_dir() else shutil.copy(taken, there)
    if words == "equal":
        assert same(weights(train(run, resume=True)), undisturbed(3))
        assert (
            "checkpoint-4 is damaged and is passed over: it is of another run"
            in capsys.readouterr().out
        )
        return
    with pytest.raises(RunFolderError, match=words):
        train(run, resume=True)


def test_a_run_of_an_older_kit_goes_on_without_an_id(run, undisturbed):
    settings = json.loads((run / "run.json").read_text())
    assert settings.pop("run_id")
    (run / "run.json").write_text(json.dumps(settings))
    for saved in checkpoints(run):
        state = json.loads((saved / "run_state.json").read_text())
        assert state.pop("run_id")
        (saved / "run_state.json").write_text(json.dumps(state))
        write_digests(saved)
    assert same(weights(train(run, resume=True)), undisturbed(3))


# ---- damaged and doctored files ---------------------------------------------------------------------------------


def doctored(name, change):
    """The change of a checkpoint's file, its digests made anew."""

    def act(folder):
        saved = folder / "checkpoint-4"
        old = json.loads((saved / "digests.json").read_text())["run_id"]
        change(saved / name)
        write_digests(saved, old)

    return act


def of_state(**values):
    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return doctored("run_state.json", change)


def bytes_of(name, data):
    return doctored(name, lambda path: path.write_bytes(data))


def moments_of_others(path):
    state = torch.load(path)
    state["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(state, path)


@pytest.mark.parametrize(
    "act",
    [
        of_state(step="four"),
        of_state(tokens=None),
        of_state(config=[1]),
        of_state(seconds="a"),
        of_state(made_with=3),
        of_state(scaler=[]),
        of_state(config={"steps": {"a": []}}),
        bytes_of("run_state.json", DEEP),
        bytes_of("run_state.json", b"[]"),
        bytes_of("run_state.json", b"\xff\xfe"),
        bytes_of("optimizer.pt", b"no pickle"),
        bytes_of("model.safetensors", b"\xff" * 64),
        bytes_of("sample_state.pt", b"{}"),
        doctored("optimizer.pt", moments_of_others),
    ],
)
def test_a_doctored_checkpoint_is_refused_in_words(act, run):
    act(run)
    with pytest.raises(ValueError, match=str(run / "checkpoint-4")):
        train(run, resume=True)


DOORS = {
    "train": lambda run: train(run, resume=True),
    "metrics": read_metrics,
    "completions": read_completions,
    "changes": read_changes,
    "state": RunState.read,
    "card": model_card,
    "watch": where_it_is,
    "results": lambda run: results(run.parent),
    "model": model_in,
    "before": lambda run: Evaluation.load(run / "before.json"),
    "policy": lambda run: load_policy(run / "checkpoint-4", quiet=True),
}


def through(doors, run):
    """Each door opens, or says in words what it cannot read. Returns the words."""
    words = []
    for name in doors:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                DOORS[name](run)
            except FileNotFoundError as error:
                words.append(str(error))
            except ValueError as error:
                assert str(run) in str(error), (name, error)
                words.append(str(error))
        words += [str(each.message) for each in warned]
    return "\n".join(words)


@pytest.mark.parametrize(
    "data", [DEEP, b"[1]", b"{", b'{"before": 3, "after": 4}', b"\xff\xfe\0", b"null", None]
)
@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl", "completions.jsonl", "run.json", "results.json", "kept.json", "before.json", "flags.jsonl",
        "checkpoint-4/digests.json", "checkpoint-4/config.json", "checkpoint-4/tokenizer.json",
        "checkpoint-4/tokenizer_config.json",
    ],
)  # fmt: skip
def test_every_reader_names_the_damaged_file(name, data, run):
    path = run / name
    path.unlink(missing_ok=True)
    path.mkdir() if data is None else path.write_bytes(data + b"\n")
    (path.parent / "digests.json").unlink(
        missing_ok=True
    ) if "config" in name or "tokenizer" in name else None
    through([name for name in DOORS if name != "train"], run)


def test_one_damaged_result_hides_no_other_run(runs, tmp_path):
    one = {"before": {"accuracy": 0.5, "low": 0.4, "high": 0.6}, "n": 4}
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(
            json.dumps(one | {"after": one["before"]})
        )
    for damage in (DEEP, b"{", b"[]", b'{"before": 1, "after": {}}', b"\xff"):
        (tmp_path / "b" / "results.json").write_bytes(damage)
        with pytest.warns(RuntimeWarning, match="b/results.json cannot be read"):
            assert sorted(results(tmp_path).index) == ["a", "c"]


@pytest.mark.parametrize(
    "text", ["\ud800", "a\udfff", "\ud800\ud800 b", "\udc00\ud800", "ok \ud83d"]
)
def test_half_a_surrogate_pair_in_a_completion_is_read_as_a_sign(text, run):
    before = read_completions(run)
    path = run / "completions.jsonl"
    line = json.loads(path.read_text().splitlines()[1]) | {"completion": text + " \U0001f600"}
    line.pop("line_crc32")
    path.write_text("\n".join([*path.read_text().splitlines(), json.dumps(line)]) + "\n")
    table = read_completions(run)
    assert len(table) == len(before) + 1
    table["completion"].iloc[-1].encode()
    assert (
        "\ufffd" in table["completion"].iloc[-1]
        and "\U0001f600" in table["completion"].iloc[-1]
    )


@pytest.mark.parametrize("how", ["deleted", "emptied", "cut", "half a line cut", "replaced"])
def test_a_table_that_is_cut_while_it_trains_is_said_and_never_padded(how, tmp_path):
    class Cut(Hook):
        def after_step(self, trainer, row, batch):
            path = trainer.folder / "metrics.jsonl"
            if trainer.step == 2:
                data = path.read_bytes()
                path.unlink()
                if how != "deleted":
                    left = {
                        "emptied": 0,
                        "cut": data.index(b"\n") + 1,
                        "half a line cut": 50,
                        "replaced": 0,
                    }[how]
                    path.write_bytes(data[:left])

    trainer = make(tmp_path / "run", hooks=[Cut()])
    with pytest.warns(
        RuntimeWarning, match="metrics.jsonl .* were written: somebody else cut or deleted"
    ):
        trainer.train()
    assert b"\0" not in (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert [row["step"] for row in record(tmp_path / "run")[0]] == (
        [1, 3, 4] if how == "cut" else [3, 4]
    )


@pytest.mark.parametrize(
    "name", ["..", ".", "../x", "a/../..", "/tmp/x", "n" * 300, "ü" * 140, "a\0b"]
)
def test_a_name_that_is_no_folders_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="name="):
        next_run_folder(tmp_path, name)


@pytest.mark.parametrize(
    "ends", [SystemExit, SystemExit(3), SystemExit("bye"), KeyError, OSError]
)
def test_what_ends_the_process_in_a_hook_or_reward_saves_first(ends, tmp_path):
    class Ends(Hook):
        def after_step(self, trainer, row, batch):
            if trainer.step == 3:
                raise ends

    with pytest.raises(ends if isinstance(ends, type) else SystemExit):
        make(tmp_path / "run", hooks=[Ends()]).train()
    assert (tmp_path / "run" / "checkpoint-3").exists()

    def leaves(completions, **columns):
        called.append(1)
        if len(called) > 3:
            raise ends
        return [float(len(text)) for text in completions]

    called = []
    other = replace(task(), rewards=[leaves], reward_weights=[1.0])
    with pytest.raises(RewardError, match="reward 'leaves' raised .*\n.*row 0, completion"):
        make(tmp_path / "paid", task=other).train()
    assert (tmp_path / "paid" / "checkpoint-3").exists()


@pytest.mark.parametrize(
    "scores, weights",
    [
        ([1e15, 1e15], [1, 1]),
        ([1e10, 0], [1e10, 1]),
        ([1, 1], [1e308, 1e308]),
        ([1e10, -1e10], [1e308, 1e308]),
        ([-1e15], [2]),
        ([1e300], [1e300]),
    ],
)
def test_a_total_that_training_cannot_square_is_refused(scores, weights):
    with pytest.raises(RewardError, match="row 0: scores .*at most 1e\\+15 is taken"):
        totals([[score] for score in scores], weights, [0])


# ---- drawn faults -----------------------------------------------------------------------------------------------

HOWS = {
    "cut": lambda data, draw: data[: draw.randrange(len(data) + 1)],
    "noise": lambda data, draw: draw.randbytes(draw.randrange(1, 400)),
    "a byte": lambda data, draw: (
        data[: (at := draw.randrange(len(data)))] + draw.randbytes(1) + data[at + 1 :]
    ),
    "a stretch": lambda data, draw: (
        data[: (at := draw.randrange(len(data)))] + draw.randbytes(9) + data[at + 9 :]
    ),
    "deep": lambda data, draw: DEEP,
    "emptied": lambda data, draw: b"",
}


@pytest.mark.parametrize("number", range(int(os.environ.get("KIT_DRAWN_FAULTS", "8"))))
def test_a_drawn_fault_ends_equal_or_in_words(number, runs, tmp_path, undisturbed, capsys):
    """Killed, perhaps changed, one file damaged or another run's, perhaps killed again; then every door."""
    draw = random.Random(f"damage {number}")
    change, kill, again = (
        draw.choice([0, 2, 3, 4]),
        draw.choice([3, 4, 5]),
        draw.choice([0, 3, 4, 5]),
    )
    run = tmp_path / "own"
    train(run, change=change, kill=kill)
    change = 0 if change >= kill else change
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".going")
    beside = [path for path in files if path.parent == run]
    path = draw.choice(draw.choice([beside, files]))
    how = draw.choice([*HOWS, "removed", "a folder", "another run's", "nothing"])
    name = path.relative_to(run)
    if how in HOWS:
        path.write_bytes(HOWS[how](path.read_bytes(), draw) if path.stat().st_size else b"?")
    elif how == "another run's" and (runs / "other" / name).is_file():
        shutil.copy(runs / "other" / name, path)
    elif how in ("removed", "a folder"):
        path.unlink()
        path.mkdir() if how == "a folder" else None
    words = through([door for door in DOORS if door not in ("train", "card")], run)
    ended = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for stop in (again, 0):
            try:
                ended = train(run, kill=stop if stop > kill - 2 else 0, resume=True)
            except ValueError as error:
                assert str(run) in str(error), error
                words += str(error)
                break
            if ended is not None:
                break
    words += capsys.readouterr().out + "\n".join(str(each.message) for each in warned)
    outcome = "refused in words" if ended is None else "equal"
    if ended is not None and not same(weights(ended), undisturbed(change)):
        assert path.name == "metrics.jsonl" and f"{path} lacks lines" in words, (
            how,
            name,
            words,
        )
        outcome = "the lost lines are named"
    if report := os.environ.get("KIT_DRAWN_REPORT"):
        with open(report, "a") as file:
            file.write(
                json.dumps(
                    {"number": number, "how": how, "file": str(name), "outcome": outcome}
                )
                + "\n"
            )
