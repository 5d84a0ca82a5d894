"""Training stops where evaluation does: at every end that tokenizer or model declares, and counts all as ends."""

import copy
import itertools
from dataclasses import replace

import few_words
import pytest
import torch
from loop_runs import letters, make, record

from grpo_kit.engine.complete import complete
from grpo_kit.evaluation.accuracy import evaluate
from grpo_kit.loop.protocols import Hook
from grpo_kit.models import load_policy
from grpo_kit.more.episodes.observation import Renderer, View
from grpo_kit.rewards import CallAccuracy, ExactAnswer, SoftFormat
from grpo_kit.tasks import from_rows

LIMIT = 6
ROWS = [{"question": f"Say {i} and {'more ' * (i % 3)}:", "answer": str(i)} for i in range(8)]
OTHER = [{"question": "Say no.", "answer": "1"}]


@pytest.fixture(scope="module")
def model_with_two_ends():
    """As a real Qwen2.5, whose tokenizer knows one end, and its generation_config two; with what evaluation writes."""
    model, tokenizer = load_policy("tiny-random", quiet=True)
    task = from_rows("ends", ROWS, OTHER, reward=letters, max_completion_tokens=LIMIT)
    for parameter in model.model.layers.parameters():  # else it repeats the prompt's last token
        parameter.data *= 6 if parameter.ndim > 1 else 1
    prompts = task.render(tokenizer, task.train)
    written = [c.ids for c in complete(model, tokenizer, prompts, max_completion_tokens=LIMIT)]
    # A token that some rows write early and others never.
    early = [t for ids in written for t in ids[1:4] if t not in ids[:1]]
    second = next(t for t in early if sum(t in ids for ids in written) < len(written))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, second]
    made = complete(model, tokenizer, prompts, max_completion_tokens=LIMIT)
    evaluated = {row["question"]: one for row, one in zip(task.train, made, strict=True)}
    assert {c.cut_off for c in evaluated.values()} == {False, True}
    assert all(c.cut_off or c.ids[-1] == second for c in evaluated.values())
    return model, task, evaluated


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seams", ["fast", "plain"])
def test_training_ends_completions_where_evaluation_does(
    model_with_two_ends, seams, masked, tmp_path
):
    """Greedy (top_k=1), so that both write the same; the weights stay."""
    model, task, evaluated = model_with_two_ends
    batches = []

    class Keep(Hook):
        def after_step(self, trainer, row, batch):
            batches.append((batch, trainer.update))

    trainer = make(
        tmp_path / "run", model=model, task=task, seams=seams, top_k=1, mask_truncated_completions=masked,
        learning_rate=1e-9, hooks=[Keep()], steps=len(task.train) // 2,
    )  # fmt: skip
    trainer.train()
    rows, cut = record(trainer.folder)[0], []
    for (batch, _), row in zip(batches, rows, strict=True):
        expected = [evaluated[one["question"]] for one in batch.rows]
        assert [tuple(ids) for ids in batch.completion_ids] == [e.ids for e in expected], (
            "the end is there"
        )
        assert batch.cut_off == [e.cut_off for e in expected]
        cut.append(sum(batch.cut_off) / len(batch))
        assert row["completion_length"] == pytest.approx(
            sum(e.tokens for e in expected) / len(expected)
        )
    assert len(set(cut)) > 1 and [row["completion_cut_off"] for row in rows] == pytest.approx(
        cut
    )


def writer_of(text, special):
    """(model, tokenizer) of a policy that writes a text and ends it, whatever the prompt is; no token of it twice.

    special: texts that are special tokens of the tokenizer.
    """
    model, tokenizer = few_words.policy()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(special, special_tokens=True)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for parameter in model.model.layers.parameters():  # the last token alone decides the next
        parameter.data.zero_()
    width = model.config.hidden_size
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(len(tokenizer), width))
    rows = torch.randn(len(tokenizer), width, generator=torch.Generator().manual_seed(0))
    model.model.embed_tokens.weight.data = rows / rows.norm(dim=1, keepdim=True)
    (prompt,) = SUMS.render(tokenizer, SUMS.train[:1])
    ids = tokenizer(text, add_special_tokens=False).input_ids
    chain = [tokenizer(prompt).input_ids[-1], *ids, tokenizer.eos_token_id]
    for token, following in itertools.pairwise(chain):
        model.lm_head.weight.data[following] += (
            1e3 * model.model.embed_tokens.weight.data[token]
        )
    return model, tokenizer


SUMS = from_rows(
    "sums", [{"question": f"{i} + {9 - i}?", "answer": "9"} for i in range(9)], reward=ExactAnswer(),
    max_completion_tokens=12,
)  # fmt: skip
CALL = from_rows(
    "calls", [{"question": f"Call f, {i}.", "answer": "f(a=1)"} for i in range(9)],
    reward=CallAccuracy(column="answer"), max_completion_tokens=24,
)  # fmt: skip
THINKING = replace(SUMS, rewards=[ExactAnswer(), SoftFormat()], reward_weights=[0.5, 0.5])
TAGS = {
    "both tags": (["<answer>", "</answer>"], "<answer>9</answer>", SUMS),
    "the closing tag alone": (["</answer>"], "<answer>9</answer>", SUMS),
    "the opening tag alone": (["<answer>"], "<answer>9</answer>", SUMS),
    "thinking tags": (
        ["<think>", "</think>", "<answer>", "</answer>"], "<think>So</think><answer>9</answer>", THINKING,
    ),
    "another tag": (
        ["<final>", "</final>"], "<final>9</final>",
        replace(SUMS, rewards=[ExactAnswer(tag="final")], answer_tag="final"),
    ),
    "a mark of calls": (["[TOOL_CALLS]", "<answer>", "</answer>"], "<answer>[TOOL_CALLS]f(a=1)</answer>", CALL),
    "a part of a tag": (["<answer>", "</answer"], "<answer>9</answer>", SUMS),
}  # fmt: skip


@pytest.mark.parametrize("tags", TAGS)
def test_rewards_see_tags_that_are_special_tokens(tags, tmp_path):
    """A right answer earns everything, by the plain way, the engine, in evaluation and in an episode's turn."""
    special, text, task = TAGS[tags]
    model, tokenizer = writer_of(text, special)
    for seams in ("plain", "fast"):
        trainer = make(
            tmp_path / seams, model=copy.deepcopy(model), tokenizer=tokenizer, task=task, seams=seams, steps=1,
            learning_rate=1e-9,
        )  # fmt: skip
        trainer.train()
        assert record(trainer.folder)[0][0]["reward"] == 1.0, seams
    assert evaluate(model, tokenizer, task).strict.value == 1.0
    (made,) = complete(
        model, tokenizer, task.render(tokenizer, task.train[:1]), max_completion_tokens=24
    )
    assert made.text == text and made.ids[-1] == tokenizer.eos_token_id
    assert Renderer(tokenizer, View()).text_of(made.ids) == text


@pytest.mark.parametrize("special, ends, text", [
    (["</answer>"], "tokenizer", ""), (["</answer>"], "model", ""), (["<answer>"], "model", ""),
    (["answer>"], "model", ""), (["</think>"], "model", ""), (["<halt>"], "model", "Write <halt> last."),
])  # fmt: skip
def test_a_tag_that_ends_completions_is_refused_at_the_start(special, ends, text, tmp_path):
    model, tokenizer = writer_of("9", special)
    end = tokenizer.convert_tokens_to_ids(special[0])
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
    if ends == "tokenizer":
        tokenizer.eos_token = special[0]
    task = replace(THINKING, system=text or None)
    with pytest.raises(ValueError, match=f"special token '{special[0]}'"):
        make(tmp_path / "run", model=model, tokenizer=tokenizer, task=task)
    with pytest.raises(ValueError, match=f"special token '{special[0]}'"):
        evaluate(model, tokenizer, task)
