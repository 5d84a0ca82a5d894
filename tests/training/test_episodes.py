"""Episodes are trained on exactly the tokens that were sampled; the gradient is that of the expected return."""

import inspect
from pathlib import Path

import pytest
import torch
import trl
from tiny_episodes import Letters, make, task
from tiny_run import difference, interrupted_once, letters, press_stop, same, settings, weights
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOTrainer as PlainTrainer

import grpo_kit.training.episode_trainer as module
from grpo_kit.episodes.environment import EpisodeError
from grpo_kit.episodes.episode_task import EpisodeTask
from grpo_kit.episodes.observation import View
from grpo_kit.episodes.rollout_episodes import Episode, Turn
from grpo_kit.episodes.template_audit import audit_turns
from grpo_kit.models import load_policy
from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.training.episode_trainer import EpisodeTrainer, Turns
from grpo_kit.training.trainer import GRPOTrainer

# ---- the gradient ---------------------------------------------------------------------------------------------

WORDS = ["<pad>", "<end>", "[user]", "[model]", "a", "b", "x", "y", "go", "."]
PAID = {("a", "a"): 1.0, ("a", "b"): 0.25, ("b", "b"): 0.75, ("b", "x"): 0.5}


class TwoSteps:
    """After "a" it says x, else y; what is paid depends on both words."""

    def reset(self, row):
        self.said = []
        return "go"

    def step(self, text):
        self.said.append(text.strip())
        if len(self.said) == 2:
            return ".", PAID.get(tuple(self.said), 0.0), True
        return ("x" if self.said[0] == "a" else "y"), 0.0, False


def small():
    """A model and a tokenizer of ten words."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>",
        additional_special_tokens=["[user]", "[model]"],
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %} [model] {{ m['content'] }} <end>{% else %} [user] "
        "{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %} [model]{% endif %}"
    )
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1,
        initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokenizer


@pytest.mark.parametrize(
    "view",
    [
        View(actions=0, write=lambda goal, actions, seen: seen),
        View(chat=True, thoughts="kept", write=lambda g, a, s: s),
    ],
    ids=["forked", "extended"],
)
@pytest.mark.parametrize("parts", [1, 4], ids=["one micro-batch", "four"])
def test_the_gradient_is_that_of_the_expected_return(view, parts, tmp_path, monkeypatch):
    """All 100 episodes of a decision process of two steps, each weighed by its probability: grad J, by enumeration."""
    model, tokenizer = small()
    two = EpisodeTask(
        "two", [{"question": "go", "n": i} for i in range(2)], [{"question": "go", "n": 9}], TwoSteps, view,
        max_turns=2, max_completion_tokens=1,
    )  # fmt: skip
    args = settings(
        tmp_path, max_steps=1, num_generations=100, per_device_train_batch_size=100 // parts, optim="sgd",
        gradient_accumulation_steps=parts, max_grad_norm=0.0, learning_rate=20.0, max_completion_length=1,
    )  # fmt: skip
    trainer = EpisodeTrainer(model, two, args, processing_class=tokenizer, live=None, warmup=0)
    before = weights(trainer)
    prompts = {}

    def every_way(trl_turn, prompt_ids, *rest):
        turn = len(prompts)
        prompts[turn] = list(prompt_ids)
        order = sorted(range(100), key=lambda e: e % 100) if turn == 0 else every_way.order
        return ([[e // 10 if turn == 0 else e % 10] for e in order], None), None

    real = module.rollout_episodes

    def play(of, rows, renderer, world, complete, **how):
        def noted(prompt_ids, who, turn):
            every_way.order = list(who)
            return complete(prompt_ids, who, turn)

        return real(of, rows, renderer, world, noted, **how)

    monkeypatch.setattr(trainer.sampling, "turn", every_way)
    monkeypatch.setattr(module, "rollout_episodes", play)
    exact, probabilities = expected_return(model, tokenizer, view)
    exact.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(
        module, "turn_advantages",
        lambda episodes, *rest, **how: [[p * e.total] * 2 for p, e in zip(probabilities, episodes, strict=True)],
    )  # fmt: skip
    trainer.train()
    assert exact.item() == pytest.approx(sum(p * PAID.get((WORDS[i // 10], WORDS[i % 10]), 0.0)
                                             for i, p in enumerate(probabilities)))  # fmt: skip
    moved = {n: (p.detach() - before[n]) * 200 / 20 for n, p in trainer.model.named_parameters()}
    size = torch.cat([g.flatten() for g in wanted.values()]).norm()
    apart = torch.cat([(moved[n] - wanted[n]).flatten() for n in wanted]).norm()
    assert size > 1e-3 and apart / size < 1e-4


def expected_return(model, tokenizer, view):
    """J with its graph, and each episode's probability: by plain forward passes over whole texts."""
    spread = lambda ids: model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)  # noqa: E731
    total, probabilities = 0.0, []
    head = tokenizer(" [user] go [model]")["input_ids"]
    first = spread(head)
    for one in range(10):
        seen = "x" if WORDS[one] == "a" else "y"
        said = [] if one == 1 else [one]
        prompt = tokenizer(f" [user] {seen} [model]")["input_ids"]
        second = spread([*head, *said, 1, *prompt] if view.chat else prompt)
        for two in range(10):
            p = (first[one] + second[two]).exp()
            probabilities.append(p.item())
            total = total + p * PAID.get((WORDS[one], WORDS[two]), 0.0)
    return total, probabilities


# ---- beside trl -----------------------------------------------------------------------------------------------

VIEWS = {
    "forked": View(actions=1),
    "extended": View(chat=True),
    "no goal again": View(chat=True, repeat_goal=False),
}
LOSSES = ["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", VIEWS)
def test_packed_turns_move_the_weights_as_trls_padded_rows_do(name, loss, tmp_path):
    steps = {}  # of SGD: Adam's first step makes 1e-2 of a rounding error, and the next words are then others
    for pack in (False, True):
        trainer = make(
            tmp_path / str(pack), of=task(view=VIEWS[name]), kit={"pack": pack}, loss_type=loss, max_steps=2,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, optim="sgd", learning_rate=0.1,
        )  # fmt: skip
        before = weights(trainer)
        trainer.train()
        steps[pack] = trainer
        logged = [e for e in trainer.state.log_history if "loss" in e]
        assert len({e["reward"] for e in logged}) == 2
    a, b = (steps[p].state.log_history for p in (False, True))
    for one, other in zip(a[:2], b[:2], strict=True):
        for key in ("loss", "grad_norm", "reward", "entropy", "completions/mean_length"):
            assert other[key] == pytest.approx(one[key], rel=2e-4, abs=2e-6), key
    assert difference(weights(steps[False]), weights(steps[True])) < 2e-6
    assert difference(before, weights(trainer)) > 2e-4


class OneTurn(Letters):
    def step(self, text):
        return "", letters([text])[0], True


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_episodes_of_one_turn_are_plain_grpo(scale, tmp_path):
    """GRPOTrainer's weights, on the same prompts with the same rewards."""
    one = task(environment=OneTurn, max_turns=1)
    episodes = make(tmp_path / "a", of=one, scale_rewards=scale)
    episodes.train()
    model, tokenizer = load_policy("tiny-random", quiet=True)
    torch.manual_seed(0)
    data = one.dataset(tokenizer).remove_columns("row")
    args = settings(tmp_path / "b", max_steps=3, scale_rewards=scale)
    plain = GRPOTrainer(model, letters, args, data, processing_class=tokenizer, warmup=0, live=None)
    plain.train()
    assert (
        difference(weights(episodes), weights(plain)) < 2e-4
    )  # of steps of 1e-2; advantages here are float64 sums
    for one, other in zip(episodes.state.log_history[:3], plain.state.log_history[:3], strict=True):
        for key in ("loss", "reward", "reward_std", "frac_reward_zero_std", "grad_norm", "entropy"):
            assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), key


def test_with_a_reference_too(tmp_path):
    runs = []
    for pack in (False, True):
        trainer = make(tmp_path / str(pack), kit={"pack": pack}, beta=0.1, num_iterations=2, max_steps=2)
        trainer.train()
        runs.append(trainer)
    assert difference(weights(runs[0]), weights(runs[1])) < 2e-4
    assert runs[1].state.log_history[1]["kl"] > 0


# ---- what is trained is what was sampled ----------------------------------------------------------------------


@pytest.mark.parametrize("name", VIEWS)
def test_rows_hold_the_sampled_tokens_behind_the_prompts_they_were_sampled_from(name, tmp_path, monkeypatch):
    trainer = make(tmp_path, of=task(view=VIEWS[name]), max_steps=1)
    sampled, rows = [], []
    turn, play = trainer.sampling.turn, module.rollout_episodes

    def noted(trl_turn, prompts, *rest):
        made = turn(trl_turn, prompts, *rest)
        sampled.extend(zip(map(tuple, prompts), map(tuple, made[0][0]), strict=True))
        return made

    def rows_of(trl_does, inputs):
        output = trl_does(inputs)
        for i in range(len(output["prompt_ids"])):
            prompt = output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist()
            completion = output["completion_ids"][i][output["completion_mask"][i].bool()].tolist()
            rows.append((tuple(prompt), tuple(completion)))
        return output

    monkeypatch.setattr(trainer.sampling, "turn", noted)
    inner = trainer._fill
    trainer._fill = lambda batch, trl: inner(batch, lambda rows: rows_of(trl, rows))
    trainer.train()
    assert sorted(sampled) == sorted(rows) and len(rows) > 8
    assert play is module.rollout_episodes


def test_the_record_has_a_row_a_turn_in_order(tmp_path):
    trainer = make(tmp_path, max_steps=2)
    trainer.train()
    table, metrics = read_completions(tmp_path), read_metrics(tmp_path)
    for step, rows in table.groupby("step"):
        assert rows["group"].nunique() == 2 and rows["episode"].nunique() == 8
        for _, turns in rows.groupby("episode"):
            assert turns["turn"].tolist() == list(range(1, len(turns) + 1))
            assert turns["done"].tolist() == [0] * (len(turns) - 1) + [1] and turns["reward"].nunique() == 1
            assert turns["turn_reward"].sum() == pytest.approx(turns["reward"].iloc[0], abs=1e-5)
            assert turns["result"].tolist()[:-1] == turns["observation"].tolist()[1:]
        row = metrics[metrics["step"] == step].iloc[0]
        assert row["episodes/turns"] == pytest.approx(len(rows) / 8)
        assert row["episodes/invalid"] == pytest.approx(rows["invalid"].mean())
        assert row["reward"] == pytest.approx(rows.groupby("episode")["reward"].first().mean(), abs=1e-5)
        assert row["completion_length"] == pytest.approx(rows["tokens"].map(len).mean())


def test_repeated_is_what_leads_nowhere_not_a_straight_way():
    def episode(*turns):
        made = [Turn([1], [2], None, "", said, reply, 0.0, False, False) for said, reply in turns]
        return Episode({"question": "?"}, made)

    straight = episode(("up", "at 2"), ("up", "at 1"), ("up", "door"))
    into_the_wall = episode(("up", "a wall"), ("up", "a wall"), ("left", "a wall"))
    rows = [{"question": "?"}] * 2
    made = Turns([straight, into_the_wall], rows, 2, 1, lambda ids: "")
    assert made.measured(1.0, chat=False)["repeated"] == 0.25


def test_reread_is_what_a_fork_costs():
    def episode(*turns):
        made = [Turn(prompt, completion, None, "", "", "", 0.0, False, False) for prompt, completion in turns]
        return Episode({"question": "?"}, made)

    on = episode(([1, 2], [3, 9]), ([1, 2, 3, 4, 5], [6, 9]))
    dropped = episode(([1, 2, 7], [8, 3, 9]), ([1, 2, 3, 4, 7], [6, 9]))  # 7 opens a thought
    anew = episode(([1, 2, 3, 4], [5, 9]), ([0, 2, 3, 4, 5], [6, 9]))
    rows = [{"question": "?"}]
    found = [Turns([e], rows, 1, 1, lambda ids: "").measured(1.0, chat=True) for e in (on, dropped, anew)]
    assert [one["forked"] for one in found] == [0, 1, 1]
    assert [one["reread"] for one in found] == pytest.approx([0, 1 / 5, 4 / 5])


def test_rows_that_fill_up_the_last_micro_batch_are_not_recorded(tmp_path):
    """Twenty turns in eight micro-batches of three: four rows more, which train nothing."""
    of = task()
    for row in of.train:
        row["turns"] = 2 + int(row["question"][-1]) % 2
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_generations": 4}
    trainer = make(tmp_path, of=of, max_steps=4, **options)
    filled, inner = [], trainer._fill

    def fill(batch, trl_does):
        output = inner(batch, trl_does)
        filled.append(batch.fillers)
        return output

    trainer._fill = fill
    trainer.train()
    table, metrics = read_completions(tmp_path), read_metrics(tmp_path)
    assert any(filled) and not table.duplicated(["step", "episode", "turn"]).any()
    assert (table["tokens"].map(len) > 0).all()
    assert table.groupby("step").size().tolist() == (8 * metrics["episodes/turns"]).tolist()


# ---- stop and go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["rollout", "backward", "optimizer"])
@pytest.mark.parametrize("step", [0, 2])
def test_stopped_and_gone_on_is_as_never_stopped(where, step, tmp_path):
    straight = make(tmp_path / "a", max_steps=4)
    straight.train()
    stopped = make(tmp_path / "b", max_steps=4)
    if where == "rollout":  # in the middle of an episode
        pressed, inner = [], stopped.sampling.turn

        def turn(*args):
            made = inner(*args)
            if stopped.state.global_step == step and len(pressed) < 2:
                pressed.append(True)
                if len(pressed) == 2:
                    press_stop()
            return made

        stopped.sampling.turn = turn
    else:
        pressed = interrupted_once(stopped, where, step)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert pressed
    stopped.train()
    assert same(weights(straight), weights(stopped))


def test_resumed_from_a_checkpoint_is_as_never_stopped(tmp_path):
    straight = make(tmp_path / "a", max_steps=4, save_strategy="steps", save_steps=2)
    straight.train()
    resumed = make(tmp_path / "a", max_steps=4, save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert same(weights(straight), weights(resumed))


class Fails(Letters):
    calls = 0

    def step(self, text):
        Fails.calls += 1
        if Fails.calls > 30:
            raise KeyError("the server went away")
        return super().step(text)


def test_an_environment_that_raises_stops_by_name_and_loses_nothing(tmp_path):
    Fails.calls = 0
    trainer = make(tmp_path, of=task(environment=Fails), max_steps=4)
    with pytest.raises(
        EpisodeError, match="environment Fails, row 'row .' .*, turn .: KeyError: 'the server went away'"
    ):
        trainer.train()
    done = trainer.state.global_step
    assert done >= 1 and (tmp_path / f"checkpoint-{done}").is_dir() and len(read_metrics(tmp_path)) == done
    Fails.calls = -1000
    trainer.train()
    assert trainer.state.global_step == 4


class Endless(Letters):
    def step(self, text):
        return "on", 0.0, False


def test_one_that_never_ends_meets_the_most_turns(tmp_path):
    trainer = make(tmp_path, of=task(environment=Endless, max_turns=2), max_steps=1)
    trainer.train()
    row = read_metrics(tmp_path).iloc[0]
    assert row["episodes/unfinished"] == 1 and row["episodes/turns"] == 2 and row["update/skipped"] == 1


class Talks(Letters):
    def step(self, text):
        return "word " * 3000, 0.0, False


def test_observations_that_leave_no_room_are_named(tmp_path):
    trainer = make(tmp_path, of=task(environment=Talks), max_steps=1)
    with pytest.raises(EpisodeError, match="turn 2: the prompt has .* exceeds the model's context"):
        trainer.train()


@pytest.mark.parametrize("name", ["reward_funcs", "train_dataset", "tools", "environment_factory"])
def test_what_the_task_has_is_not_given_again(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} is not for EpisodeTrainer"):
        make(tmp_path, kit={name: [letters]})


@pytest.mark.parametrize(
    "template, thoughts, warned",
    [
        ("qwen3", "kept", True),
        ("qwen3", "as served", False),
        (None, "kept", False),
        ("qwen3_8", "kept", False),
    ],
)
def test_training_on_what_is_never_served_is_warned_of(template, thoughts, warned, tmp_path, recwarn):
    model, tokenizer = load_policy("tiny-random", quiet=True)
    if template:
        text = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
        tokenizer.chat_template = text.read_text(encoding="utf-8")
    prefill = audit_turns(tokenizer).opens
    of = task(view=View(chat=True, thoughts=thoughts, prefill=prefill))
    EpisodeTrainer(model, of, settings(tmp_path), processing_class=tokenizer, live=None)
    assert warned == any("will never read the prompts" in str(w.message) for w in recwarn)


def test_an_unknown_credit_and_discount_are_refused(tmp_path):
    with pytest.raises(ValueError, match="credit='token' is not known"):
        make(tmp_path, credit="token")
    with pytest.raises(ValueError, match="discount=0 must lie in"):
        make(tmp_path, kit={"discount": 0})
    with pytest.raises(ValueError, match="discount=0.9 is not used by credit='episode'"):
        make(tmp_path, kit={"discount": 0.9})
    with pytest.raises(ValueError, match="reward_weights=.0.25.: the environment's is the one reward"):
        make(tmp_path, reward_weights=[0.25])


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_rows_that_fill_up_weigh_nothing_in_the_kl_term_either(loss, tmp_path, monkeypatch):
    """Twenty-odd turns in eight micro-batches, or all in one, which needs no filling up: the same weights."""
    of = task()
    for row in of.train:
        row["turns"] = 1 + int(row["question"][-1]) // 3
    found, filled, inner = [], [], Turns.__init__

    def counted(self, *args):
        inner(self, *args)
        filled[-1].append(self.fillers)

    monkeypatch.setattr(Turns, "__init__", counted)
    for size in (8, 1):
        filled.append([])
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        trainer = make(
            tmp_path / str(size), of=of, max_steps=1, beta=0.5, loss_type=loss, num_generations=2, **options
        )
        torch.manual_seed(5)
        for parameter in trainer.ref_model.parameters():  # else the term is flat at its first step
            parameter.data += 0.1 * torch.randn_like(parameter)
        trainer.train()
        found.append(weights(trainer))
    assert not any(filled[0]) and any(filled[1])
    assert difference(*found) < 2e-4


@pytest.mark.parametrize("changed", ["credit", "view", "max_turns"])
def test_a_run_does_not_go_on_with_other_credit_view_or_turns(changed, tmp_path):
    make(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    options = {
        "credit": {"credit": "return"},
        "view": {"of": task(view=View(actions=2))},
        "max_turns": {"of": task(max_turns=2)},
    }[changed]
    trainer = make(tmp_path, max_steps=2, **options)
    with pytest.raises(
        ValueError, match=f"begun with other options: {changed} was .* and is .*new output_dir"
    ):
        trainer.train(resume_from_checkpoint=True)
    make(tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    assert read_metrics(tmp_path)["step"].tolist() == [1, 2]


def test_the_table_of_completions_can_be_printed(tmp_path, capsys):
    of = task()
    for row in of.train:
        row["turns"] = 1 + int(row["question"][-1]) % 3
    make(tmp_path, of=of, max_steps=4, log_completions=True).train()
    assert read_completions(tmp_path)["step"].nunique() == 4


def test_trl_has_the_hook_that_rows_are_handed_over_by():
    assert "rollout_func" in inspect.signature(PlainTrainer.__init__).parameters
