"""What a Config may be: every value that means nothing or harms is refused by name, with what would do."""

import inspect
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from grpo_kit import objectives
from grpo_kit._support.argument_checks import ELSEWHERE
from grpo_kit.loop import config_checks, policy_loss
from grpo_kit.loop.config import FIELDS, SETUP, Config, Preset
from grpo_kit.loop.config_checks import LOSSES
from grpo_kit.more.lab._arm import arm_of
from grpo_kit.objectives.group_losses import Options
from grpo_kit.record.files import run_settings
from grpo_kit.schedules import constant, cosine, linear, stepwise
from grpo_kit.trainer.presets import preset


@pytest.mark.parametrize("values, words", [
    ({"temperature": [1.2, 0.8]}, "kit.linear(1.2, 0.8)"),
    ({"temperature": "linear(1.2, 0.8)"}, "kit.linear(1.2, 0.8), without quotes"),
    ({"learning_rate": "cosine"}, "kit.cosine(start, end), without quotes"),
    ({"learning_rate": "cosin"}, "did you mean 'cosine'?"),
    ({"temperature": linear}, "must give a number for a progress in [0, 1]"),
    ({"temperature": 1e6}, "must lie in [0.01, 10]"),
    ({"temperature": 1e-6}, "must lie in [0.01, 10]"),
    ({"temperature": linear(1.2, 0)}, "temperature(1.0)=0.0"),
    ({"learning_rate": 1e6}, "1e-06 to 0.001 is usual"),
    ({"learning_rate": 0}, "moves no weight"),
    ({"learning_rate": constant(0)}, "moves no weight"),
    ({"positive_weight": 0, "negative_weight": 0}, "move no weight"),
    ({"reward_weights": [0, 0]}, "no weight of the model would move"),
    ({"reward_weights": [1e308, 1]}, "at most 1e+15 in size"),
    ({"reward_weights": [1, -1e16]}, "at most 1e+15 in size"),
    ({"epsilon": 20}, "at most 1"),
    ({"minibatches": 9}, "use at most 8"),
    ({"warmup": 101}, "steps=100"),
    ({"credit": "return"}, "credit= and discount= of a task of several turns"),
    ({"loss_options": {"zz": 1}}, "'zz', which dapo does not take; it takes correct_kl"),
    ({"loss_options": {"epsilon": 0.1}}, "is epsilon=0.1 a field?"),
    ({"loss_options": {"num_rows": 1}}, "the loop gives itself"),
    ({"loss_options": {"correct_kl": 0}}, "True or False"),
    ({"loss": "sapo", "loss_options": {"temperature_ned": 1}}, "did you mean 'temperature_neg'?"),
    ({"loss": "sapo", "loss_options": {"temperature_neg": -1}}, "above 0"),
    ({"task_options": {"numbers": (2, 3)}}, "task=None"),
    ({"preset": "gpu24"}, "kit.preset('gpu24')"),
    ({"top_k": -2}, "0 takes all tokens"),
    ({"model": object()}, "must be a name; the model itself goes to GRPOTrainer"),
    ({"max_tokens": 8}, "here it is max_completion_tokens"),
    ({"stop": ["x"]}, "completions end at the end tokens"),
    ({"frequency_penalty": 1}, "here it is repetition_penalty"),
    ({"temprature": 1}, "did you mean 'temperature'?"),
    ({"torch_compile": True}, "no graph for torch.compile"),
    ({"qqqqq": 1}, "it has preset, model"),
])  # fmt: skip
def test_is_refused_with_what_would_do(values, words):
    with pytest.raises(ValueError) as error:
        (Preset if SETUP.keys() & values.keys() else Config)(**values)
    assert words in str(error.value) and next(name for name in values) in str(error.value)


@pytest.mark.parametrize("name", SETUP)
def test_what_the_loop_does_not_read_is_a_presets(name):
    """A Config has neither the field nor an assignment of it; a preset holds both."""
    with pytest.raises(ValueError, match=f"{name}='x'.*kit.preset\\(.*'x'"):
        Config(**{name: "x"})
    config = Config(steps=3)
    with pytest.raises(ValueError, match=f"{name}='x'.*kit.preset"):
        setattr(config, name, "x")
    assert name not in config.values() and name in preset("smoke").values()
    assert isinstance(preset("smoke"), Config) and len(config.values()) <= 40


def test_a_plain_config_is_in_run_json_as_a_presets_would_be(tmp_path):
    """So commands, reports and older readers find the same names."""
    from loop_runs import make

    trainer = make(tmp_path / "run", steps=1)
    trainer.train()
    assert type(trainer.config) is Config
    noted = run_settings(trainer.folder)["config"]
    assert noted.keys() == FIELDS.keys() and noted["held_out"] == 256 and noted["model"] is None
    assert {name: noted[name] for name in trainer.config.values()} == trainer.config.values()


def test_a_preset_made_of_a_plain_config_has_its_numbers():
    config = preset(Config(steps=7, learning_rate=linear(1e-5, 0)), tuning="lora")
    assert (config.steps, config.tuning, config.preset) == (7, "lora", None)
    assert repr(config.learning_rate) == repr(linear(1e-5, 0))


def test_without_names_it_says_what_fills_a_config():
    with pytest.raises(ValueError, match=r"kit.preset\('gpu24'\) fills one"):
        Config("gpu24")
    with pytest.raises(ValueError, match=r"Config\(\*\*values\)"):
        Config({"steps": 3})


def test_what_means_something_is_taken():
    assert Config(top_k=-1).top_k == 0
    assert Config(positive_weight=0, negative_weight=0, beta=0.1).beta == 0.1
    assert Config(learning_rate=stepwise([0, 1e-5, 0], at=[0.1, 0.3])).at(20).learning_rate > 0
    assert Config(epsilon=1, temperature=0.01).epsilon == 1
    assert str(inspect.signature(Config)).startswith("(*, steps")  # editors complete its fields


def between(low, high, bad, good):
    """A schedule that is good at 0, 1/2 and 1, and bad between low and high."""
    return lambda progress: bad if low < progress < high else good


IN_THE_MIDDLE = [  # of a run of 41 steps, one each fortieth
    ("temperature", between(0.2, 0.24, None, 1.0), "temperature(0.225)=None"),
    ("temperature", between(0.7, 0.74, 50.0, 1.0), "temperature(0.725)=50.0"),
    ("temperature", between(0.7, 0.9, -1.0, 1.0), "temperature(0.725)=-1.0"),
    ("temperature", stepwise([1.0, 1e-6, 1.0], at=[0.22, 0.24]), "temperature(0.225)=1e-06"),
    ("temperature", between(0.7, 0.9, "1.0", 1.0), "temperature(0.725)='1.0'"),
    ("beta", between(0.1, 0.2, -0.1, 0.1), "beta(0.125)=-0.1"),
    ("beta", lambda progress: 0.1 / abs(progress - 0.25), "ZeroDivisionError"),
    ("beta", between(0.6, 0.9, True, 0.1), "beta(0.625)=True"),
    ("learning_rate", between(0.6, 0.64, 2.0, 1e-5), "learning_rate(0.625)=2.0"),
    ("learning_rate", between(0.6, 0.9, float("nan"), 1e-5), "learning_rate(0.625)=nan"),
    ("learning_rate", lambda progress: [1e-5, 1e-6][int(progress * 2.9)], "IndexError"),
]


@pytest.mark.parametrize("name, schedule, words", IN_THE_MIDDLE)
def test_a_schedule_is_tried_at_every_step_before_the_first(tmp_path, name, schedule, words):
    """Made, assigned, changed while it trains, or reached by more steps alone."""
    from loop_runs import make

    with pytest.raises(ValueError, match=re.escape(words)):
        Config(steps=41, **{name: schedule})
    config = Config(steps=41)
    with pytest.raises(ValueError, match=re.escape(words)):
        setattr(config, name, schedule)
    assert getattr(config, name) == getattr(Config(), name)
    trainer = make(tmp_path / "run", steps=41, beta=0.1, warmup=0)
    with pytest.raises(ValueError, match=re.escape(words)):
        trainer.change(**{name: schedule})
    if "IndexError" not in words and "Zero" not in words:
        trainer = make(
            tmp_path / "other", steps=3, warmup=0, **{"beta": 0.1} | {name: schedule}
        )
        for more in (
            lambda: trainer.change(steps=41),
            lambda: setattr(trainer.config, "steps", 41),
        ):
            with pytest.raises(ValueError, match=re.escape(words)):
                more()
        assert trainer.config.steps == 3


@pytest.mark.parametrize("rate", [
    1e-12, 1e-30, 5e-324, linear(1e-12, 0), cosine(1e-10, 1e-12), stepwise([0, 1e-11, 0], at=[0.1, 0.3]),
    lambda progress: 0.0, between(0.4005, 0.403, 1e-5, 0.0),
])  # fmt: skip
def test_a_rate_that_moves_nothing_at_any_step_is_refused(rate, tmp_path):
    from loop_runs import make

    with pytest.raises(ValueError, match="moves no weight: no step has a rate above"):
        Config(learning_rate=rate)
    trainer = make(tmp_path / "run")
    with pytest.raises(ValueError, match="moves no weight"):
        trainer.change(learning_rate=rate)


def test_of_a_long_run_ten_thousand_steps_are_tried():
    asked = []
    Config(steps=10**9, temperature=lambda progress: asked.append(progress) or 1.0)
    assert len(asked) <= 10_002 and asked[-1] == 1
    with pytest.raises(ValueError, match="=None"):
        Config(steps=10_000, temperature=between(4000.5 / 9999, 4001.5 / 9999, None, 1.0))


OWN = {  # written down here from the papers and from TRL's page of them
    "grpo": ("token", 0.2, 0.2, "group"),
    "dr_grpo": ("token", 0.2, 0.2, "none"),
    "bnpo": ("token", 0.2, 0.2, "group"),
    "dapo": ("token", 0.2, 0.28, "group"),
    "gspo": ("sequence", 3e-4, 4e-4, "group"),
    "cispo": ("token", 0.2, 5.0, "group"),
    "luspo": ("sequence", 2e-3, 2.5e-3, "group"),
}


def numbers(config):
    return config.level, config.epsilon, config.epsilon_high, config.scale


@pytest.mark.parametrize("loss", OWN)
def test_a_named_loss_brings_its_papers_numbers(loss):
    config = Config()
    config.loss = loss
    made = [
        config,
        Config(loss=loss),
        preset("smoke", loss=loss),
        preset(preset("cpu"), loss=loss),
    ]
    made += [replace(Config(loss="gspo"), loss=loss), arm_of("smoke", {"loss": loss}).config]
    made += [Config(loss=loss, epsilon=None, scale=None)]
    assert [numbers(each) for each in made] == [OWN[loss]] * len(made)
    assert json.loads(json.dumps(config.values()))["epsilon"] == OWN[loss][1]
    table, usual = config.table(), dict(zip(LOSSES[loss], OWN["dapo"], strict=True))
    for name, number in LOSSES[loss].items():
        assert (name in table.index) == (number != usual[name])
        assert name not in table.index or table.loc[name, "reason"] == f"{loss}'s own"
    defaults = inspect.signature(getattr(objectives, loss)).parameters
    if "epsilon" in defaults:  # the function's own are the same
        assert defaults["epsilon"].default == config.epsilon
        assert defaults["epsilon_high"].default in (config.epsilon_high, None)
    else:
        assert defaults["max_ratio"].default == config.epsilon_high


@pytest.mark.parametrize("name, value", [
    ("epsilon", 0.1), ("epsilon_high", 0.5), ("scale", "batch"), ("level", "sequence"),
])  # fmt: skip
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "cispo", "gspo", "luspo"])
def test_a_number_that_is_given_stays_with_any_loss(loss, name, value):
    later = Config(**{name: value})
    later.loss = loss
    for config in (
        Config(loss=loss, **{name: value}),
        preset("smoke", loss=loss, **{name: value}),
        later,
    ):
        assert getattr(config, name) == value
        others = {n: getattr(config, n) for n in LOSSES[loss] if n != name}
        assert others == {n: number for n, number in LOSSES[loss].items() if n != name}
    for given in (0.2, 0.28):  # as an older run.json has them
        assert Config(loss=loss, epsilon=given).epsilon == given


@pytest.mark.parametrize("given, line", [
    ({"loss": "gspo"}, ""),
    ({"loss": "cispo"}, ""),
    ({"loss": "dr_grpo"}, ""),
    ({}, ""),
    ({"loss": "gspo", "epsilon": 0.2, "epsilon_high": 0.28},
     "loss='gspo' with epsilon=0.2 (its own: 0.0003), epsilon_high=0.28 (its own: 0.0004)."),
    ({"loss": "dr_grpo", "scale": "group"}, "loss='dr_grpo' with scale='group' (its own: 'none')."),
    ({"loss": "cispo", "epsilon_high": 0.28}, "loss='cispo' with epsilon_high=0.28 (its own: 5.0)."),
    ({"level": "sequence"}, "loss='dapo' with level='sequence' (its own: 'token')."),
    ({"loss": "sapo", "epsilon": 0.1}, "loss='sapo' with epsilon=0.1 (it clips nothing)."),
])  # fmt: skip
def test_what_differs_from_a_losss_own_numbers_is_said_once(given, line, tmp_path, capsys):
    from loop_runs import make

    trainer = make(tmp_path / "run", steps=1, save_steps=1, **given)
    trainer.train()
    trainer.change(steps=2)
    trainer.train()
    make(tmp_path / "run", steps=3, **given).train(resume=True)
    said = [text for text in capsys.readouterr().out.splitlines() if text.startswith("loss=")]
    assert said == [line] * bool(line)


@pytest.mark.parametrize("loss, given, clips", [
    ("gspo", {}, True), ("gspo", {"epsilon": 0.2, "epsilon_high": 0.28}, False), ("gspo", {"level": "token"}, True),
    ("luspo", {}, True), ("cispo", {}, False), ("sapo", {"epsilon": 1e-4, "epsilon_high": 1e-4}, False),
    ("vespo", {}, False), ("grpo", {}, False),
])  # fmt: skip
def test_a_run_clips_by_the_losss_own_ratio(loss, given, clips, tmp_path):
    """A second pass at a rate of 1e-4: completions' ratios leave 1 by more than 3e-4, tokens' by less than 0.2."""
    from loop_runs import make, record

    make(
        tmp_path / "run", steps=2, loss=loss, iterations=2, learning_rate=1e-4, **given
    ).train()
    assert all((row["clip_ratio"] > 0) == clips for row in record(tmp_path / "run")[0])


@pytest.mark.parametrize("loss", LOSSES)
def test_every_argument_of_a_loss_that_is_not_the_loops_is_an_option(loss):
    """The loop gives all others: PolicyLoss takes these as they are."""
    named = inspect.signature(getattr(objectives, loss)).parameters.values()
    own = [p for p in named if p.kind is p.KEYWORD_ONLY and p.name[:2] in ("te", "k_", "la")]
    options = {p.name: p.default for p in own} | {"correct_kl": False}
    assert Config(loss=loss, loss_options=options).loss_options == options


def test_words_of_other_libraries_are_no_fields():
    words = [word for words in ELSEWHERE.values() for word in words.split()]
    assert not {*words} & {*FIELDS} and len(words) == len({*words})
    ours = [one.partition(",")[0] for one in ELSEWHERE if not {*"=:."} & {*one}]
    assert {name for one in ours for name in one.split(" or ")} <= {*FIELDS}


def test_fewer_steps_than_the_warmup_may_be_asked_for_while_a_run_trains():
    """change(steps=...) ends a run early: a warmup that was all right when it began does not stand in the way."""
    from grpo_kit.loop.run_checks import check_values

    class Trainer:
        config, reference, step = Config(steps=100, warmup=10), None, 3

        class task:  # noqa: N801
            rewards = [1]

    check_values(Trainer, {"steps": 3})
    with pytest.raises(
        ValueError, match="lr=1: Config has no such field; here it is learning_rate"
    ):
        check_values(Trainer, {"lr": 1})


def test_changes_that_together_move_no_weight_are_refused_while_a_run_trains(tmp_path):
    """Each may be; what counts is what the run then has, by change() or assigned one after the other."""
    from loop_runs import make

    trainer = make(tmp_path / "run", steps=2)
    trainer.change(positive_weight=0)
    for values in (
        {"negative_weight": 0},
        {"learning_rate": 0},
        {"learning_rate": constant(0.0)},
    ):
        with pytest.raises(ValueError, match="move.? no weight"):
            trainer.change(**values)
    trainer.change(negative_weight=0, entropy_bonus=0.1)
    trainer.config.entropy_bonus = 0.0
    with pytest.raises(ValueError, match="move no weight of the model; raise one"):
        trainer.train()
    assert trainer.step == 0


def test_a_config_is_looked_at_as_it_is_when_a_trainer_is_made(tmp_path):
    from loop_runs import make

    config = Config(steps=8, prompts_per_step=2, minibatches=2, warmup=4)
    config.steps = 3
    with pytest.raises(ValueError, match="warmup=4 with steps=3"):
        make(
            tmp_path / "run", model=None, **{n: getattr(config, n) for n in ("steps", "warmup")}
        )
    trainer = make(tmp_path / "run", steps=8)
    trainer.config.positive_weight = trainer.config.negative_weight = 0.0
    with pytest.raises(ValueError, match="move no weight"):
        type(trainer)(
            trainer.model,
            trainer.task,
            trainer.config,
            tokenizer=trainer.tokenizer,
            folder=tmp_path / "other",
        )


def test_numpys_numbers_are_kept_as_pythons_own():
    """A sweep by np.linspace gives them, and no JSON takes them: the first checkpoint failed."""
    names = (
        "learning_rate",
        "temperature",
        "beta",
        "top_p",
        "max_grad_norm",
        "min_p",
        "importance_sampling_cap",
    )
    config = Config(
        **{name: np.float32(0.5) for name in names[1:]}, learning_rate=np.float32(1e-4)
    )
    assert all(type(getattr(config, name)) is float for name in names)
    assert json.loads(json.dumps(config.values()))["top_p"] == 0.5
    assert Config(temperature=1).temperature == 1 and type(Config(seed=np.int64(3)).seed) is int


def test_another_loss_does_not_take_the_options_of_the_one_before():
    config = Config(loss="sapo", loss_options={"temperature_neg": 1.1})
    with pytest.raises(
        ValueError,
        match="'temperature_neg', which dapo does not take; .* set loss_options=.. first",
    ):
        config.loss = "dapo"
    assert config.loss == "sapo"
    config.loss_options = {}
    config.loss = "dapo"
    config.loss_options = {"correct_kl": True}
    config.loss = "grpo"  # takes it too
    assert config.loss_options == {"correct_kl": True}


def test_a_copy_of_a_presets_config_keeps_its_name():
    assert replace(preset("smoke"), steps=3).preset == "smoke"


@pytest.mark.parametrize(
    "name, here",
    [
        (
            "per_device_train_batch_size",
            "prompts_per_step, which counts prompts, not completions",
        ),
        ("num_train_epochs", "steps, which counts steps, not passes"),
        ("gradient_accumulation_steps", "prompts_per_step, all in one update"),
        ("lora_r", "tuning='lora', and lora={'r': 8} of kit.load_policy"),
        ("target_modules", "tuning='lora', and lora={'r': 8} of kit.load_policy"),
        ("load_in_4bit", "tuning='qlora'"),
        ("reward_funcs", "reward= of tasks.from_rows"),
        ("processing_class", "tokenizer= of the trainer"),
        ("num_generations", "group_size"),
        ("resample", "dynamic_sampling"),
        ("sampler_weight_cap", "importance_sampling_cap"),
        ("mask_cut_off", "mask_truncated_completions"),
    ],
)
def test_hints_lead_to_what_is_meant(name, here):
    """One table, whoever is asked: a Config, a preset, a trainer without a task, a task of rows."""
    from grpo_kit import GRPOTrainer, preset
    from grpo_kit.tasks import from_rows

    calls = (
        Config,
        lambda **given: preset("smoke", **given),
        lambda **given: GRPOTrainer("a/model", **given),
    )
    for call in (*calls, lambda **given: from_rows("mine", [], **given)):
        with pytest.raises(
            ValueError,
            match=re.escape(f"{name}=8: ") + ".*" + re.escape(f"; here it is {here}"),
        ):
            call(**{name: 8})
    with pytest.raises(
        ValueError, match=re.escape("field of the config: config=kit.Config(steps=8)")
    ):
        GRPOTrainer("a/model", steps=8)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_tables_of_arguments_are_the_losses_own(loss):
    """loss_options takes what a loss takes besides the loop's numbers, and the loop gives each number that it takes."""
    parameters = inspect.signature(getattr(objectives, loss)).parameters.values()
    arguments = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} | {
        *Options.__annotations__
    }
    options = {*config_checks._LOSS_OPTIONS.get(loss, ()), "correct_kl"}
    assert options == arguments - {*config_checks._FROM_LOOP}
    given = {*policy_loss._ARGUMENTS[loss], "level", "beta", "ref_logprobs"}
    assert given == arguments & {*config_checks._FROM_LOOP}
