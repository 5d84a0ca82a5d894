"""The gradient of an update on episodes is that of the expected return, by enumeration; episodes that never end."""

import copy
from pathlib import Path

import few_words
import pytest
import torch
import trl
from tiny_loop_episodes import Letters, make, rolled_out, task, written_as
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.more.episodes._episode_sample import EpisodeSample
from grpo_kit.more.episodes.environment import EpisodeError
from grpo_kit.more.episodes.episode_task import EpisodeTask
from grpo_kit.more.episodes.observation import View
from grpo_kit.more.episodes.template_audit import audit_turns
from grpo_kit.record.files import read_metrics

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


@pytest.mark.parametrize(
    "view",
    [
        View(actions=0, write=lambda goal, actions, seen: seen),
        View(chat=True, thoughts="kept", write=lambda g, a, s: s),
    ],
    ids=["forked", "extended"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_gradient_is_that_of_the_expected_return(view, packed):
    """All 100 episodes of a decision process of two steps, each weighed by its probability: grad J."""
    model, tokenizer = small()
    row = {"question": "go", "n": 0}
    two = EpisodeTask(
        "two",
        [row],
        [{"question": "go", "n": 9}],
        TwoSteps,
        view,
        max_turns=2,
        max_completion_tokens=1,
    )
    config = Config(prompts_per_step=1, group_size=100, max_completion_tokens=1, micro_batch=7)
    turns = [[[one], [two]] for one in range(10) for two in range(10)]
    batch = EpisodeSample(written_as(turns))(model, tokenizer, two, [row], config, config.at(0))
    exact, probabilities = expected_return(model, tokenizer, view)
    exact.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    assert exact.item() == pytest.approx(
        sum(p * r for p, r in zip(probabilities, batch.rewards[::2], strict=True))
    )
    batch.advantages = [
        probabilities[episode] * paid
        for episode, paid in zip(batch.extra["episode"], batch.rewards, strict=True)
    ]
    loss = PolicyLoss(batch, config, config.at(0))
    update = PackedUpdate(model, config) if packed else PaddedUpdate(config)
    update.gradients(model.train(), batch, loss, 1.0, lambda share: share.backward())
    size = torch.cat([g.flatten() for g in wanted.values()]).norm()
    apart = torch.cat(
        [(-200 * p.grad - wanted[name]).flatten() for name, p in model.named_parameters()]
    ).norm()
    assert len(batch) == 200 and size > 1e-3 and apart / size < 1e-4


class Endless(Letters):
    def step(self, text):
        return "on", 0.0, False


def test_one_that_never_ends_meets_the_most_turns(tmp_path):
    make(tmp_path / "run", of=task(environment=Endless, max_turns=2), steps=1).train()
    row = read_metrics(tmp_path / "run").iloc[0]
    assert (
        row["episodes/unfinished"] == 1
        and row["episodes/turns"] == 2
        and row["update/skipped"] == 1
    )


class Talks(Letters):
    def step(self, text):
        return "word " * 3000, 0.0, False


def test_observations_that_leave_no_room_are_named(tmp_path):
    with pytest.raises(
        EpisodeError, match="turn 2: the prompt has .* exceeds the model's context"
    ):
        make(tmp_path / "run", of=task(environment=Talks), steps=1).train()


@pytest.mark.parametrize(
    "template, thoughts, warned",
    [
        ("qwen3", "kept", True),
        ("qwen3", "as served", False),
        (None, "kept", False),
        ("qwen3_8", "kept", False),
    ],
)
def test_training_on_what_is_never_served_is_warned_of(
    template, thoughts, warned, tmp_path, recwarn
):
    tokenizer = copy.deepcopy(few_words.tokenizer())
    if template:
        text = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
        tokenizer.chat_template = text.read_text(encoding="utf-8")
    view = View(chat=True, thoughts=thoughts, prefill=audit_turns(tokenizer).opens)
    trainer = make(tmp_path / "run", of=task(view=view))
    trainer.tokenizer = tokenizer
    rolled_out(trainer)
    assert warned == any("will never read the prompts" in str(w.message) for w in recwarn)
