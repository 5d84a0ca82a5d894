"""from_trl against trl's own trainer on the same completions: advantages, loss, gradient norm, rates, weights."""

import warnings

import few_words
import pytest
from forced_runs import apart, arguments, by_loop, by_trl, chats, means, points, texts, vowels
from peft import LoraConfig

from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.evaluation.accuracy import evaluate
from grpo_kit.more.bridges.trl import from_trl
from grpo_kit.prompts import build_prompt

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
CASES = {
    "the defaults": {},
    "messages, two weights, Dr. GRPO": {
        "data": chats, "reward_weights": [0.5, 2.0], "loss_type": "dr_grpo", "scale_rewards": False,
    },
    "cut off, cosine, warmup, AdamW's numbers": {
        "mask_truncated_completions": True, "lr_scheduler_type": "cosine", "warmup_steps": 1, "adam_beta2": 0.9,
        "adam_epsilon": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.1, "max_steps": 3,
    },
    "KL to the start, adapters, two passes": {
        "lora": LORA, "beta": 0.1, "num_iterations": 2, "loss_type": "grpo", "lr_scheduler_type": "constant",
        "max_steps": 4, "data": chats,
    },
    "KL without its correction, sequences": {
        "lora": LORA, "beta": 10.0, "learning_rate": 0.05, "use_bias_correction_kl": False,
        "importance_sampling_level": "sequence",
        "num_iterations": 2, "epsilon": 3e-4, "epsilon_high": 4e-4, "lr_scheduler_type": "constant", "max_steps": 4,
    },
    "CISPO": {"loss_type": "cispo", "epsilon_high": 5.0},
    "SAPO": {"loss_type": "sapo", "sapo_temperature_neg": 1.5, "scale_rewards": "batch"},
    "LUSPO": {"loss_type": "luspo", "temperature": 0.7},
    "VESPO": {
        "loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 1.0, "num_iterations": 2, "max_steps": 4,
        "lr_scheduler_type": "constant",
    },
    "entropy, BNPO": {
        "loss_type": "bnpo", "entropy_coef": 0.1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers_as_trl(tmp_path, case):
    fields = dict(CASES[case])
    data, lora = fields.pop("data", texts)(), fields.pop("lora", None)
    adapters = lambda: LoraConfig(**lora) if lora else None  # noqa: E731
    rewards = [points, vowels]
    rollouts, updates, theirs = by_trl(
        tmp_path / "trl", data, rewards, lora=adapters(), **fields
    )
    steps, trainer = by_loop(
        tmp_path / "kit", data, rewards, rollouts, lora=adapters(), **fields
    )
    assert isinstance(trainer.update, PackedUpdate)
    assert len(steps) == len(rollouts) >= 2
    a_step = fields.get("num_iterations", 1)
    for step, rollout in zip(steps, rollouts, strict=True):
        assert step["advantages"] == pytest.approx(rollout["advantages"], rel=1e-4, abs=1e-6)
        assert max(map(abs, step["advantages"])) > 0.5
    for name in ("loss", "grad_norm", "rate"):
        ours, wanted = [step[name] for step in steps], means(updates, a_step, name)
        # a loss is a sum of terms near 1
        assert ours == pytest.approx(wanted, rel=1e-4, abs=1e-6), name
    assert apart(trainer.model, theirs) < 1e-4


def test_rewards_get_what_trl_gives_them(tmp_path):
    seen = {"trl": [], "kit": []}

    def watching(which):
        def watched(
            prompts,
            completions,
            completion_ids,
            size,
            trainer_state,
            log_extra,
            log_metric,
            **more,
        ):
            log_extra("twice", [2 * s for s in size])
            log_metric("longest", max(map(len, completion_ids)))
            state = (trainer_state.global_step, trainer_state.max_steps)
            seen[which].append(
                (prompts, completions, completion_ids, size, state, sorted(more))
            )
            return [float(len(ids)) for ids in completion_ids]

        return watched

    for data in (texts(), chats()):
        folder = tmp_path / str(len(seen["kit"]))
        rollouts, _, _ = by_trl(folder / "trl", data, watching("trl"))
        _, trainer = by_loop(folder / "kit", data, watching("kit"), rollouts)
    assert seen["trl"] == seen["kit"] and len(seen["kit"]) == 4
    assert (
        seen["kit"][0][1][0]
        != seen["kit"][2][1][0]
        == [{"role": "assistant", "content": seen["kit"][2][1][0][0]["content"]}]
    )
    lines = (
        (trainer.folder / "completions.jsonl").read_text(),
        (trainer.folder / "metrics.jsonl").read_text(),
    )
    assert '"twice"' in lines[0] and '"longest"' in lines[1] and '"reward/watched"' in lines[1]


def test_the_assistants_words_are_continued(tmp_path):
    model, tokenizer = few_words.policy()
    opened = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<answer>"},
    ]
    trainer = from_trl(
        model, vowels, arguments(tmp_path), [{"prompt": opened}] * 2, processing_class=tokenizer
    )
    (text,) = trainer.task.render(tokenizer, trainer.task.train[:1])
    assert text.endswith("assistant\n<answer>") and trainer.task.prefill == "<answer>"


def test_a_tokenizer_that_begins_texts_by_itself_begins_them_once(tmp_path):
    model, tokenizer = few_words.policy()
    data = chats()
    wanted = tokenizer.apply_chat_template(
        data[0]["prompt"], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    begin = wanted[0]

    class Begins:
        """Adds the first token of the template's text in front of every text."""

        chat_template, bos_token = tokenizer.chat_template, tokenizer.decode([begin])
        apply_chat_template = tokenizer.apply_chat_template

        def __call__(self, text, add_special_tokens=True):
            ids = tokenizer(text)["input_ids"]
            return {"input_ids": [begin] * add_special_tokens + ids}

    trainer = from_trl(model, points, arguments(tmp_path), data, processing_class=tokenizer)
    (text,) = trainer.task.render(Begins(), trainer.task.train[:1])
    assert Begins()(text)["input_ids"] == wanted
    Begins.bos_token = "nothing"
    with pytest.raises(ValueError, match="special tokens around"):
        trainer.task.render(Begins(), trainer.task.train[:1])


@pytest.mark.parametrize(
    "given, why",
    [
        ({"reward_funcs": "some/reward-model"}, "takes functions"),
        ({"reward_funcs": []}, "at least one reward"),
        ({"train_dataset": None}, "column 'prompt'"),
        ({"train_dataset": [{"question": "1 + 1?"}]}, "column 'prompt'"),
        ({"train_dataset": [{"prompt": "a", "image": 1}]}, "trains on text"),
        (
            {
                "train_dataset": [
                    {"prompt": "a"},
                    {"prompt": [{"role": "user", "content": "b"}]},
                ]
            },
            "one of the two",
        ),
        (
            {"train_dataset": [{"prompt": [{"role": "system", "content": "b"}]}] * 2},
            "ends in a message of 'system'",
        ),
        ({"train_dataset": iter([])}, "list of rows"),
        ({"tools": [max]}, "tools"),
        ({"callbacks": [object()]}, "hooks="),
        ({"eval_dataset": [{"question": "1 + 1?"}]}, "eval_dataset needs .* column 'prompt'"),
        ({"eval_dataset": None, "model_name": "x"}, "no such argument; here it is model"),
        ({"processing_class": object()}, "give a tokenizer"),
        ({"fields": {"reward_weights": [1.0, 2.0]}}, "one number each"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, given, why):
    model, tokenizer = few_words.policy()
    given = {
        "reward_funcs": letters,
        "train_dataset": texts(),
        "processing_class": tokenizer,
        **given,
    }
    args = arguments(tmp_path, **given.pop("fields", {}))
    with pytest.raises(ValueError, match=why):
        from_trl(model, args=args, **given)


def test_the_run_is_saved_at_its_end_and_goes_on(tmp_path):
    model, tokenizer = few_words.policy()
    fields = {
        "save_strategy": "steps",
        "save_steps": 500,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
    }
    make = lambda **more: from_trl(  # noqa: E731
        model, points, arguments(tmp_path, max_steps=3, adam_beta2=0.9, **fields, **more), texts(),
        processing_class=tokenizer,
    )  # fmt: skip
    make().train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    again = make()
    again.config.steps = 4
    again.train(resume=True)
    assert again.step == 4 and again.optimizer.param_groups[0]["betas"] == (0.9, 0.9)


def test_a_mixture_of_experts_is_refused_while_its_router_has_a_loss(tmp_path):
    model, tokenizer = few_words.policy()
    model.config.output_router_logits, model.config.router_aux_loss_coef = False, 0.01
    with pytest.raises(ValueError, match="router_aux_loss_coef=0.01"):
        from_trl(model, points, arguments(tmp_path), texts(), processing_class=tokenizer)
    from_trl(
        model,
        points,
        arguments(tmp_path, router_aux_loss_coef=0.0),
        texts(),
        processing_class=tokenizer,
    )


def letters(completions, **columns):
    return [len(text) / 100 for text in completions]


def asks_for_gold(completions, gold, **columns):
    return letters(completions)


def only_completions(completions):
    return letters(completions)


@pytest.mark.parametrize(
    "given, why",
    [
        (
            {"reward_funcs": asks_for_gold},
            r"'asks_for_gold' asks for the column \['gold'\].*train_dataset",
        ),
        (
            {"reward_funcs": only_completions},
            r"'only_completions' has the parameters .* add \*\*columns",
        ),
        (
            {"train_dataset": [{"prompt": "short"}, {"prompt": "word " * 1020}]},
            "'word .* context of 1024",
        ),
    ],
)
def test_rewards_and_prompts_are_checked_before_training(tmp_path, given, why):
    model, tokenizer = few_words.policy()
    given = {"reward_funcs": letters, "train_dataset": texts(), **given}
    with pytest.raises(ValueError, match=why):
        from_trl(model, args=arguments(tmp_path), processing_class=tokenizer, **given)


def test_bare_text_under_a_chat_template_is_said_once(tmp_path):
    model, tokenizer = few_words.policy()
    rendered = [{"prompt": build_prompt(tokenizer, f"Say {i}")} for i in range(8)]
    seen = {}
    for name, rows in (("bare", texts()), ("rendered", rendered), ("messages", chats())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from_trl(
                model, letters, arguments(tmp_path / name), rows, processing_class=tokenizer
            )
        seen[name] = sum("holds no '" in str(one.message) for one in caught)
    assert seen == {"bare": 1, "rendered": 0, "messages": 0}


def test_rows_of_a_script_are_evaluated_as_any_others(tmp_path):
    model, tokenizer = few_words.policy()
    rows = texts()
    script = {
        "args": arguments(tmp_path / "run", max_steps=1),
        "train_dataset": rows,
        "eval_dataset": rows,
    }
    trainer = from_trl(model, reward_funcs=vowels, processing_class=tokenizer, **script)
    trainer.train()
    evaluation = evaluate(trainer.model, tokenizer, trainer.task)
    assert evaluation.strict is None and evaluation.formatted is None
    assert evaluation.rows["reward"].tolist() == vowels(evaluation.rows["completion"].tolist())
