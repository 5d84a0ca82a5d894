"""What each chat template that ships with trl does with thoughts, beside what its rendered text says."""

from pathlib import Path

import pytest
import trl
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import get_training_chat_template

from grpo_kit.models import load_policy
from grpo_kit.more.episodes.template_audit import FIELDS, audit_turns

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(
    path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training")
)

# Read off the templates by a person: before a user turn, a tool result, a system turn; what the template opens itself.
BY_HAND = {
    "qwen2_5": ("kept", "kept", "kept", ""),
    "qwen3": ("dropped", "kept", "kept", ""),
    "qwen3_instruct_2507": ("kept", "kept", "kept", ""),
    "qwen3_5_think": ("dropped", "kept", "refused", "<think>\n"),
    "qwen3_5_nothink": ("dropped", "kept", "refused", "<think>\n\n</think>\n\n"),
    "qwen3_8": ("kept", "kept", "refused", "<think>\n"),
    "deepseek_r1_distill": ("dropped", "dropped", "dropped", "<think>\n"),
    "glm4moe": ("dropped", "kept", "kept", ""),
    "nemotron_3_nano": ("dropped", "kept", "kept", "<think>\n"),
    "lfm2_2_5": ("dropped", "kept", "kept", ""),
    "llama3_1": ("kept", "dropped", "kept", ""),
    "gemma3": ("kept", "refused", "refused", ""),
    "phi3": ("kept", "no such turn", "kept", ""),
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_policy("tiny-random", quiet=True)[1]


@pytest.fixture(scope="module")
def audited(tokenizer):
    found, before = {}, tokenizer.chat_template
    for name in NAMES:
        tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
        found[name] = audit_turns(tokenizer)
    tokenizer.chat_template = before
    return found


def best(row):
    order = ("refused", "no such turn", "dropped", "kept")
    return max(row["in_text"], row["in_field"], key=order.index)


@pytest.mark.parametrize("name", BY_HAND)
def test_what_a_person_reads_in_the_template(name, audited):
    audit = audited[name]
    assert (*(best(row) for _, row in audit.table.iterrows()), audit.opens) == BY_HAND[name]


def texts(template, last, thought, call):
    """Every way of saying it that the template takes, as text."""
    asked, answer = (
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "second", **call},
    )
    ways = [{**answer, "content": f"<think>\n{thought}\n</think>\n\nsecond"}]
    ways += [{**answer, name: thought} for name in FIELDS]
    ways += [{**answer, "content": "", name: thought} for name in FIELDS] if call else []
    parameters = {
        "type": "object",
        "properties": {"x": {"type": "string", "description": "x"}},
        "required": ["x"],
    }
    tools = [
        {
            "type": "function",
            "function": {"name": "look", "description": "Look.", "parameters": parameters},
        }
    ]
    for way in ways:
        for parts in (False, True):
            turns = [asked, way, last]
            if parts:
                turns = [
                    {**t, "content": [{"type": "text", "text": t["content"]}]} for t in turns
                ]
            try:
                text = render_jinja_template(
                    [turns], chat_template=template, tools=tools if call else None, add_generation_prompt=True,
                    bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
                )[0][0]  # fmt: skip
            except Exception:  # templates raise whatever they like
                continue
            if "first" in text and "third" in text:
                yield text


@pytest.mark.parametrize("name", NAMES)
def test_kept_is_what_the_rendered_text_shows(name, audited):
    """By transformers' renderer alone: does a thought show in any way of handing it over?"""
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    call = {
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "look", "arguments": {"x": "y"}},
            }
        ]
    }
    lasts = {
        "a user turn": ({"role": "user", "content": "third"}, {}),
        "a tool result": (
            {"role": "tool", "name": "look", "tool_call_id": "abcdefghi", "content": "third"},
            call,
        ),
        "a system turn": ({"role": "system", "content": "third"}, {}),
    }
    for next_, (last, calls) in lasts.items():
        shown = list(texts(template, last, "pondering", calls))
        said = best(audited[name].table.loc[next_])
        if shown:
            assert said == (
                "kept" if any("pondering" in text for text in shown) else "dropped"
            ), next_
        else:
            assert said in ("refused", "no such turn"), next_


def test_trl_trains_with_templates_that_keep_what_is_dropped_in_serving(audited, tokenizer):
    """trl's own prefix check passes qwen3_5's template, which drops thoughts before a user turn."""
    before = tokenizer.chat_template
    for name in ("qwen3", "qwen3_5_think", "qwen3_6", "deepseek_r1_distill"):
        tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
        tokenizer.chat_template = get_training_chat_template(tokenizer)
        trained = audit_turns(tokenizer)
        assert best(trained.table.loc["a user turn"]) == "kept", name
        assert best(audited[name].table.loc["a user turn"]) == "dropped", name
    tokenizer.chat_template = before


def test_where_thoughts_are_dropped_turns_fork(audited):
    for audit in audited.values():
        for _, row in audit.table.iterrows():
            if best(row) == "dropped":
                assert row["extends"] is False
    assert audited["qwen3"].table.loc["a user turn", "extends_without"] is True
    assert audited["qwen3"].table.loc["a tool result", "extends"] is True


def test_empty_thoughts_that_a_template_puts_in_are_said(audited):
    assert audited["qwen3_5_think"].table.loc["a tool result", "empty_block"] is True
    assert any(
        "gets an empty one before a tool result" in s
        for s in audited["qwen3_5_think"].sentences
    )
    assert audited["qwen2_5"].table["empty_block"].eq(False).all()


def test_it_reads_as_sentences_and_as_a_page(audited):
    said = repr(audited["qwen3"])
    assert said.startswith(
        "Thoughts of earlier turns are dropped before a user turn; kept before a tool result"
    )
    assert "&lt;think&gt;" in audited["qwen3_5_think"]._repr_html_()


def test_what_is_no_chat_is_refused(tokenizer):
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match="no chat template"):
            audit_turns(tokenizer)
        tokenizer.chat_template = "{{ raise_exception('no') }}"
        with pytest.raises(ValueError, match="cannot render one question"):
            audit_turns(tokenizer)
    finally:
        tokenizer.chat_template = before
