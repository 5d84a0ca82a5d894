"""Every private name of trl and transformers the kit leans on: an upgrade that moves one fails here, by name."""

import inspect

import pytest
import torch
import transformers
import transformers.models.llama.modeling_llama as llama
import transformers.models.qwen2.modeling_qwen2 as qwen2
import transformers.models.qwen3.modeling_qwen3 as qwen3
import trl.generation.vllm_generation as trl_vllm
import trl.trainer.grpo_trainer as trl_grpo
import trl.trainer.utils as trl_utils
from tiny_run import make
from trl.distributed import DistributedBackend

from grpo_kit.models.renamed import cache_name
from grpo_kit.training.trl_internals import follow_epochs

METHODS = {
    "_generate_and_score_completions": ["self", "inputs"],
    "_tokenize_prompts": ["self", "prompts"],
    "_generate_single_turn": [
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_get_per_token_logps_and_entropies": [
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
    ],
    "_compute_loss": ["self", "model", "inputs"],
    "compute_loss": ["self", "model", "inputs"],
    "create_optimizer": ["self", "model"],
    "create_scheduler": ["self", "num_training_steps"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_get_output_dir": ["self", "trial"],
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
    "_load_rng_state": ["self", "checkpoint"],
    "_maybe_log_save_evaluate": [
        "self",
        "tr_loss",
        "grad_norm",
        "model",
        "trial",
        "epoch",
        "ignore_keys_for_eval",
        "start_time",
    ],
    "evaluate": ["self"],
    "prediction_step": ["self", "inputs"],
    "_run_epoch": ["self"],
    "_prepare_for_training": ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "get_high_entropy_mask": ["self", "entropies", "mask", "threshold"],
    "_determine_best_metric": ["self", "metrics", "trial"],
    "set_initial_training_values": ["self", "args", "dataloader"],
    "create_model_card": ["self"],
    "log": ["self", "logs", "start_time"],
    "_log_completion_extra": ["self", "column", "values"],
    "_log_metric": ["self", "name", "value"],
}
ATTRIBUTES = [
    "_step", "_buffered_inputs", "_metrics", "_logs", "_pending_metrics", "_pending_extra_logs",
    "_current_train_step_time", "_tokenizer", "generation_config", "generation_kwargs", "use_vllm",
    "use_transformers_continuous_batching", "reward_func_names", "reward_weights", "max_completion_length",
    "ref_model", "temperature", "model_wrapped", "loss_type", "beta", "num_iterations", "aux_loss_enabled",
    "top_entropy_quantile", "_entropy_bonus_enabled", "entropy_coef", "_last_world_entropy", "_entropy_window_stats",
    "epsilon_low", "epsilon_high", "_created_lr_scheduler", "callback_handler",
    "_is_vlm", "tools", "chat_template", "chat_template_kwargs", "environment_factories", "rollout_func",
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
    values = inspect.getsource(transformers.Trainer.set_initial_training_values)
    assert values.rstrip().split("return (")[1].split(",")[0].strip() == "num_train_epochs", "it comes first"
    assert "on_pre_optimizer_step" in inspect.getsource(transformers.Trainer._run_epoch)
    saving = inspect.getsource(transformers.Trainer._save_checkpoint)
    assert "output_dir = os.path.join(run_dir, checkpoint_folder)" in saving  # under _get_output_dir
    assert saving.index("save_model(") < saving.index("save_to_json(")  # trainer_state.json comes last
    assert "_buffered_inputs is None" in inspect.getsource(trl_grpo.GRPOTrainer._prepare_inputs)
    assert "_set_sync_gradients" in inspect.getsource(transformers.Trainer._run_epoch)
    assert "self._gradient_checkpointing_func(" in inspect.getsource(transformers.modeling_layers)


def test_what_trls_loss_reads_and_when_it_scores_for_old_log_probabilities():
    """The packed update calls the loss with scores at hand, and leaves that pass out by num_iterations."""
    loss = inspect.getsource(trl_grpo.GRPOTrainer._compute_loss)
    assert loss.count("self._get_per_token_logps_and_entropies(") == 1
    assert "self.accelerator.sync_gradients" in loss
    rollout = inspect.getsource(trl_grpo.GRPOTrainer._generate_and_score_completions)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in rollout
    assert rollout.count("self.num_iterations") == 1


def test_the_samplers_order_is_a_function_of_seed_and_epoch(tmp_path):
    sampler = make("plain", tmp_path)._get_train_sampler()
    assert (sampler.shuffle, sampler.seed, sampler.num_samples) == (True, 3, 8)
    order = list(sampler), list(sampler)
    followed = follow_epochs(make("plain", tmp_path / "b")._get_train_sampler())
    followed.set_epoch(1)
    assert order[0] != order[1] and list(followed) == order[1]


def test_what_warmup_cards_and_trackers_hang_on(tmp_path):
    trainer = make("plain", tmp_path)
    assert isinstance(trainer.callback_handler.callbacks, list)
    assert "logs=logs" in inspect.getsource(type(trainer.callback_handler).on_log), (
        "every callback gets one dict"
    )
    scheduler = trainer.create_scheduler(4, trainer.create_optimizer())
    assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
    assert scheduler.lr_lambdas and set(scheduler._last_lr) == {1e-2}
    assert "self._n_gpu" in inspect.getsource(transformers.TrainingArguments.n_gpu.fget)


def test_where_another_optimizer_takes_the_place_of_one_that_failed(tmp_path):
    trainer = make("plain", tmp_path)
    wrapped = trainer.accelerator.prepare(trainer.create_optimizer())
    assert trainer.accelerator._optimizers == [wrapped] and wrapped.scaler is None
    assert wrapped.optimizer is trainer.optimizer
    assert "_per_optimizer_states[id(optimizer)]" in inspect.getsource(torch.amp.GradScaler)


def test_fused_head_keeps_its_temperature_in_a_closure(tmp_path):
    trainer = make("plain", tmp_path, temperature=0.7)
    function = trainer.model.forward.__func__
    cell = function.__closure__[function.__code__.co_freevars.index("temperature")]
    assert cell.cell_contents == 0.7


def test_what_the_rollout_engine_reaches_for():
    """It runs transformers' layers with its own attention and cache, and torch's fused attention on a CPU."""
    schema = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema
    assert [r.name for r in schema.returns] == ["output", "logsumexp"]
    for module, attention in ((llama, "Llama"), (qwen2, "Qwen2"), (qwen3, "Qwen3")):
        source = inspect.getsource(module)
        assert "ALL_ATTENTION_FUNCTIONS.get_interface(" in source
        assert f"{cache_name(getattr(module, f'{attention}Attention').forward)}.update(" in source
        assert (
            source.count("**kwargs,\n        )") >= 1
        )  # what the decoder is called with reaches the attention


def test_what_vllm_is_started_and_given_weights_by():
    sampler = trl_vllm.VLLMGeneration
    assert trl_grpo.VLLMGeneration is sampler
    start = inspect.getsource(sampler._init_vllm)
    assert "self.llm = LLM(" in start and "self.vllm_client = VLLMClient(" in start
    assert "self._init_vllm()" in inspect.getsource(sampler.__init__)
    for name in ("_iter_named_params", "_fix_param_name_to_vllm", "sync_weights", "generate"):
        assert callable(getattr(sampler, name))
    assert "self._iter_named_params()" in inspect.getsource(sampler.sync_weights)
    turn = inspect.getsource(trl_grpo.GRPOTrainer._generate_single_turn)
    assert "self.state.global_step != self._last_loaded_step" in turn
    for name in ("_post", "get_server_info", "reset_prefix_cache"):
        assert callable(getattr(trl_vllm.VLLMClient, name))
    assert {"is_fsdp", "is_zero3"} <= set(dir(DistributedBackend))
