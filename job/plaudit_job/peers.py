"""Know the settings of verl and TRL by name, to answer a job that uses one with the field that does the same here."""

from __future__ import annotations

FIELDS_OF_TRL = {
    "adam_beta1": "algorithm.optimizer.beta1",
    "adam_beta2": "algorithm.optimizer.beta2",
    "beta": "algorithm.loss.klCoefficient",
    "bf16": "model.dtype",
    "chat_template_kwargs": "model.chatTemplateArguments",
    "entropy_coef": "algorithm.loss.entropyCoefficient",
    "epsilon": "algorithm.loss.clipLow",
    "epsilon_high": "algorithm.loss.clipHigh",
    "eval_steps": "data.validation.everySteps",
    "generation_batch_size": "algorithm.promptsPerStep",
    "gradient_checkpointing": "trainer.activationCheckpointing",
    "learning_rate": "algorithm.optimizer.learningRate",
    "loss_type": "algorithm.loss.aggregation",
    "lr_scheduler_type": "algorithm.optimizer.schedule",
    "mask_truncated_completions": "algorithm.maskTruncated",
    "max_completion_length": "rollout.sampling.maxTokens",
    "max_grad_norm": "algorithm.optimizer.maxGradNorm",
    "max_steps": "algorithm.steps",
    "max_tool_calling_iterations": "rollout.agent.maxTurns",
    "num_generations": "algorithm.samplesPerPrompt",
    "num_generations_eval": "data.validation.samplesPerPrompt",
    "num_iterations": "algorithm.epochs",
    "report_to": "trainer.sinks",
    "reward_weights": "reward.scorers[].weight",
    "save_steps": "trainer.checkpoint.everySteps",
    "save_total_limit": "trainer.checkpoint.keep",
    "shuffle_dataset": "data.train.shuffle",
    "steps_per_generation": "algorithm.miniBatchesPerStep",
    "stop_token_ids": "rollout.sampling.stopTokenIds",
    "temperature": "rollout.sampling.temperature",
    "top_k": "rollout.sampling.topK",
    "top_p": "rollout.sampling.topP",
    "use_bias_correction_kl": "algorithm.loss.klImportanceWeight",
    "vllm_enable_sleep_mode": "rollout.sleepDuringUpdates",
    "vllm_gpu_memory_utilization": "rollout.engine.gpuMemoryUtilization",
    "vllm_max_model_length": "rollout.engine.maxModelLength",
    "vllm_tensor_parallel_size": "rollout.engine.tensorParallelSize",
    "warmup_steps": "algorithm.optimizer.warmupSteps",
    "weight_decay": "algorithm.optimizer.weightDecay",
}
"""Fields of TRL's ``GRPOConfig`` → the field here; docs/coming-from-trl.md says more of each."""
FIELDS_OF_VERL = {
    "actor_rollout_ref": "rollout",
    "adv_estimator": "algorithm.advantage",
    "clip_ratio_c": "algorithm.loss.clipRatioC",
    "clip_ratio_high": "algorithm.loss.clipHigh",
    "clip_ratio_low": "algorithm.loss.clipLow",
    "custom_reward_function": "reward.scorers[].python",
    "entropy_coeff": "algorithm.loss.entropyCoefficient",
    "gpu_memory_utilization": "rollout.engine.gpuMemoryUtilization",
    "grad_clip": "algorithm.optimizer.maxGradNorm",
    "ignore_eos": "rollout.sampling.ignoreEos",
    "kl_loss_coef": "algorithm.loss.klCoefficient",
    "logger": "trainer.sinks",
    "loss_agg_mode": "algorithm.loss.aggregation",
    "lr": "algorithm.optimizer.learningRate",
    "lr_warmup_steps": "algorithm.optimizer.warmupSteps",
    "max_prompt_length": "data.train.maxPromptLength",
    "max_response_length": "rollout.sampling.maxTokens",
    "n": "algorithm.samplesPerPrompt",
    "ppo_epochs": "algorithm.epochs",
    "prompt_key": "data.columns.prompt",
    "reward_fn_key": "data.columns.dataSource",
    "save_freq": "trainer.checkpoint.everySteps",
    "tensor_model_parallel_size": "rollout.engine.tensorParallelSize",
    "test_freq": "data.validation.everySteps",
    "total_training_steps": "algorithm.steps",
    "train_batch_size": "algorithm.promptsPerStep",
    "train_files": "data.train.path",
    "val_files": "data.validation.path",
}
"""Settings of verl → the field here; docs/coming-from-verl.md says more of each."""


OF_VALIDATION = ("minP", "repetitionPenalty", "minTokens")
"""Settings that sample from another distribution than the one whose log-probabilities the trainer computes."""


def answer_for(name: str) -> str | None:
    """Return the remedy for a setting of another trainer or another section; None for a name that none has."""
    if name in OF_VALIDATION:
        return f"The trainer could not reproduce it; validation may use it: spec.data.validation.sampling.{name}"
    here = [(peer, fields[name]) for peer, fields in _PEERS if name in fields]
    if not here:
        return None
    peer, field = here[0]
    return f"{peer}'s {name} is spec.{field} here (docs/coming-from-{peer.lower()}.md)"


_PEERS = (("TRL", FIELDS_OF_TRL), ("verl", FIELDS_OF_VERL))
