"""Every private name of trl and transformers the kit leans on: an upgrade that moves one fails here, by name."""

import inspect

import pytest
import transformers
import trl.trainer.grpo_trainer as trl_grpo
import trl.trainer.utils as trl_utils
from tiny_run import make

METHODS = {
    "_generate_and_score_completions": ["self", "inputs"],
    "_generate_single_turn": [
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ],
    "_get_per_token_logps_and_entropies": [
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
    ],
    "_compute_loss": ["self", "model", "inputs"],
    "_save_checkpoint": ["self", "model", "trial"],
    "prediction_step": ["self", "inputs"],
    "log": ["self", "logs", "start_time"],
}
ATTRIBUTES = [
    "_step", "_buffered_inputs", "_metrics", "_logs", "_pending_metrics", "_pending_extra_logs",
    "_current_train_step_time", "_tokenizer", "generation_config", "generation_kwargs", "use_vllm",
    "use_transformers_continuous_batching", "reward_func_names", "reward_weights", "max_completion_length",
    "ref_model", "temperature", "model_wrapped",
]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_method(name):
    parameters = list(inspect.signature(getattr(trl_grpo.GRPOTrainer, name)).parameters)
    wanted = METHODS[name]
    assert parameters[0] == "self" and set(wanted) <= set(parameters) | {"self"}, parameters


def test_attributes(tmp_path):
    trainer = make("plain", tmp_path)
    assert not [a for a in ATTRIBUTES if not hasattr(trainer, a)]
    assert set(trainer._logs) >= {"prompt", "completion", "rewards", "advantages", "extra"}


def test_module_functions():
    assert callable(trl_grpo.create_model_from_path)
    assert "compact = _use_triton(" in inspect.getsource(trl_utils.add_fused_lm_head)
    assert "_maybe_log_save_evaluate" in inspect.getsource(transformers.Trainer._run_epoch)
    assert "on_pre_optimizer_step" in inspect.getsource(transformers.Trainer._run_epoch)


def test_fused_head_keeps_its_temperature_in_a_closure(tmp_path):
    trainer = make("plain", tmp_path, temperature=0.7)
    function = trainer.model.forward.__func__
    cell = function.__closure__[function.__code__.co_freevars.index("temperature")]
    assert cell.cell_contents == 0.7
