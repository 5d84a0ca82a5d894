"""Prompts given as messages: an assistant message at the end is the prefill, and the model continues it."""

import warnings

import pytest
from datasets import Dataset
from tiny_run import data, letters, make
from trl_runs import CALL, FOUR, QWEN, add, scripted

from grpo_kit.models import load_policy
from grpo_kit.prompts import build_prompt
from grpo_kit.record.files import read_completions
from grpo_kit.rewards import on_response


def chat(rows=8, prefill="<answer>"):
    end = [{"role": "assistant", "content": prefill}] if prefill is not None else []
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"2 + {i}?"}, *end] for i in range(rows)]}
    )


def sampled(trainer):
    """The prompts, decoded, that completions are sampled behind."""
    seen, inner = [], trainer._generate_single_turn

    def turn(prompt_ids, *args, **kwargs):
        seen.extend(trainer._tokenizer.batch_decode(prompt_ids))
        return inner(prompt_ids, *args, **kwargs)

    trainer._generate_single_turn = turn
    trainer.train()
    return seen


def chat_letters(completions, **columns):
    return letters([c[-1]["content"] for c in completions])


def test_plain_trl_closes_the_prefill_and_opens_a_second_turn(tmp_path):
    prompts = sampled(make("plain", tmp_path, dataset=chat(), rewards=chat_letters, max_steps=1))
    assert all(p.endswith("<answer><|im_end|>\n<|im_start|>assistant\n") for p in prompts)


def test_the_kit_continues_it(tmp_path):
    trainer = make("kit", tmp_path, dataset=chat(), rewards=chat_letters, max_steps=1)
    prompts = sampled(trainer)
    assert prompts and all(p.endswith("<|im_start|>assistant\n<answer>") for p in prompts)
    rendered = {build_prompt(trainer._tokenizer, f"2 + {i}?", prefill="<answer>") for i in range(8)}
    assert set(prompts) <= rendered, "token for token what kit.build_prompt gives"


def test_prompts_with_and_without_a_prefill_may_share_a_batch(tmp_path):
    rows = [*chat(4)["prompt"], *chat(4, prefill=None)["prompt"]]
    trainer = make("kit", tmp_path, dataset=Dataset.from_dict({"prompt": rows}), rewards=chat_letters)
    ids = trainer._tokenize_prompts([rows[0], rows[0], rows[4], rows[4]])[0]
    texts = trainer._tokenizer.batch_decode(ids)
    assert [t.endswith("assistant\n<answer>") for t in texts] == [True, True, False, False]
    assert [t.endswith("assistant\n") for t in texts] == [False, False, True, True]


def test_rewards_see_the_prefill_and_so_does_the_record(tmp_path):
    seen = []

    @on_response
    def starts_well(responses):
        seen.extend(responses)
        return [0.5] * len(responses)

    make("kit", tmp_path, dataset=chat(), rewards=[starts_well, chat_letters], max_steps=1).train()
    assert seen and all(response.startswith("<answer>") for response in seen)
    assert set(read_completions(tmp_path)["prefill"]) == {"<answer>"}


def test_beside_tools_a_completion_does_not_hold_the_prefill_either(tmp_path):
    """Their response template parses prefill and completion together."""
    seen = []

    def responses(completions, prefill, **columns):
        seen.extend(start + c[0]["content"] for c, start in zip(completions, prefill, strict=True))
        return turns(completions)

    trainer = make(
        "kit", tmp_path, chat_template=QWEN, dataset=chat(prefill="Let me see:"), rewards=responses,
        trl={"tools": [add]}, max_completion_length=80, max_steps=1, **FOUR,
    )  # fmt: skip
    scripted(lambda row: CALL if row % 2 else " no<|im_end|>", lambda row: "3<|im_end|>")(trainer)
    trainer.train()
    assert seen == ["Let me see: no", "Let me see:"] * 2
    texts = read_completions(tmp_path)["completion"].tolist()
    assert (
        texts[0] == " no"
        and texts[1].startswith("<tool_call>")
        and texts[1].endswith("assistant\n3<|im_end|>")
    )


def turns(completions, **columns):
    return [len(c) / 10 for c in completions]


@pytest.mark.parametrize(
    ("prefill", "message"),
    [("<answer> ", "row 0: prefill='<answer> ' ends in a space"), ("", "row 0: .* content=''")],
    ids=["a space", "empty"],
)
def test_a_prefill_that_cannot_be_continued_is_refused_before_training(prefill, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make("kit", tmp_path, dataset=chat(prefill=prefill), rewards=chat_letters)


def test_a_template_that_writes_in_front_of_the_prefill_is_refused(tmp_path):
    tokenizer = load_policy("tiny-random", quiet=True)[1]
    thinks = tokenizer.chat_template.replace(
        "'<|im_start|>' + message['role'] + '\n' + message['content']",
        "'<|im_start|>' + message['role'] + '\n' + ('<think>\n\n</think>\n' if message['role'] == 'assistant' else '') "
        "+ message['content']",
    )
    assert thinks != tokenizer.chat_template
    with pytest.raises(ValueError, match="row 0: .*the chat template writes '<think>"):
        make("kit", tmp_path, dataset=chat(), rewards=chat_letters, chat_template=thinks)


def test_bare_text_under_a_chat_template_is_said_once(tmp_path):
    with pytest.warns(UserWarning, match=r"train_dataset: the first prompt, 'Say 0 and :', holds no") as said:
        make("kit", tmp_path / "a", eval_dataset=data(4))
    assert len([w for w in said if "holds no" in str(w.message)]) == 1
    tokenizer = load_policy("tiny-random", quiet=True)[1]
    rendered = Dataset.from_dict({"prompt": [build_prompt(tokenizer, f"Say {i}") for i in range(8)]})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*holds no.*")
        make("kit", tmp_path / "b", dataset=rendered)
        make("kit", tmp_path / "c", dataset=chat(), rewards=chat_letters)
        make("kit", tmp_path / "d", chat_template=None)
