"""The pages for users of verl and TRL name every setting that they claim to cover: a silent one would be lost."""

from __future__ import annotations

import re

import pages
import pytest

from plaudit_job.fields import FIELDS_OF_TRL, FIELDS_OF_VERL, field_at
from plaudit_job.spec.rljob import RLJob


def code_of(page):
    """What the page sets as code, a line each."""
    return "\n".join(re.findall(r"`([^`\n]+)`", pages.text(pages.ROOT / "docs" / page)))


# The leaves of algorithm, actor_rollout_ref.actor and .model in verl 0.9.1's _generated_ppo_trainer.yaml.
SETTINGS = """
algorithm: adv_estimator gamma lam norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty
algorithm.kl_ctrl: type kl_coef horizon target_kl
algorithm.filter_groups: enable metric max_num_gen_batches max_inflight_gen_batches
algorithm.rollout_correction: rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold bypass_mode loss_type
algorithm.rollout_correction: rollout_is_batch_normalize
algorithm.pf_ppo: reweight_method weight_pow
actor: strategy rollout_n ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz
actor: ppo_max_token_len_per_gpu ppo_epochs shuffle data_loader_seed clip_ratio clip_ratio_low clip_ratio_high
actor: clip_ratio_c tau_pos tau_neg loss_agg_mode loss_scale_factor entropy_coeff calculate_entropy
actor: calculate_sum_pi_squared use_kl_loss kl_loss_coef kl_loss_type grad_clip freeze_vision_tower use_prefix_grouper
actor: use_torch_compile use_fused_kernels use_remove_padding pad_to_length ulysses_sequence_parallel_size
actor: entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing
actor.policy_loss: loss_mode clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta
actor.optim: optimizer optimizer_impl override_optimizer_config lr lr_warmup_steps lr_warmup_steps_ratio
actor.optim: total_training_steps weight_decay betas clip_grad min_lr_ratio num_cycles lr_scheduler_type
actor.optim: zero_indexed_step warmup_style
actor.fsdp_config: param_offload optimizer_offload offload_policy reshard_after_forward fsdp_size forward_prefetch
actor.fsdp_config: model_dtype dtype use_orig_params seed full_determinism use_torch_compile strategy forward_only
actor.fsdp_config: use_no_sync_for_gradient_accumulation pad_to_length_bucket wrap_policy
actor.checkpoint: save_contents load_contents async_save strict
actor.qat: enable mode group_size ignore_patterns activation_observer quantization_config_path
actor.profiler: tool enable all_ranks ranks save_path tool_config
model: path hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template external_lib override_config
model: enable_gradient_checkpointing enable_activation_offload use_remove_padding lora_rank lora_alpha target_modules
model: exclude_modules lora_adapter_path use_liger use_fused_kernels
model.fused_kernel_options: impl_backend
model.tiled_mlp: enabled num_shards
model.mtp: enable enable_train enable_rollout method
model.lora: type merge rank alpha dropout dtype adapter_path
"""
PAIRS = [
    (section, name)
    for section, _, names in (line.partition(": ") for line in SETTINGS.strip().splitlines())
    for name in names.split()
]
OF_VERL, OF_TRL = code_of("coming-from-verl.md"), code_of("coming-from-trl.md")

# The fields of GRPOConfig in TRL 1.16.0, and those of its base that the page maps.
FIELDS = """
learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32
remove_unused_columns num_generations num_generations_eval max_completion_length ds3_gather_for_generation
shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation temperature top_p top_k min_p
generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl
vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port
vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta
num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos
vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation scale_rewards
loss_type mask_truncated_completions
sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef
use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
num_completions_to_print log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap
max_steps num_train_epochs warmup_steps save_steps eval_steps gradient_accumulation_steps per_device_train_batch_size
weight_decay max_grad_norm adam_beta1 adam_beta2 lr_scheduler_type gradient_checkpointing bf16 fp16 report_to
"""


@pytest.mark.parametrize(("section", "name"), PAIRS, ids=[f"{section}.{name}" for section, name in PAIRS])
def test_every_setting_of_verl_has_a_row(section, name):
    """By its own name, or with its whole section (``mtp.*``)."""
    whole = rf"(?<!\w){re.escape(section.rpartition('.')[2])}\.\*" if "." in section else "(?!)"
    assert re.search(rf"(?<!\w){name}(?!\w)|{whole}", OF_VERL), f"{section}.{name} is not on the page"


@pytest.mark.parametrize(
    ("peer", "fields", "page"), [("TRL", FIELDS_OF_TRL, OF_TRL), ("verl", FIELDS_OF_VERL, OF_VERL)]
)
def test_what_messages_answer_for_a_setting_is_a_field_and_on_the_page(peer, fields, page):
    for name, field in fields.items():
        location = tuple(part.removesuffix("[]") for part in f"spec.{field}".split("."))
        assert field_at(RLJob, location) is not None, f"{field}, for {name} of {peer}, is no field"
        assert re.search(rf"(?<!\w){name}(?!\w)", page), f"{name} is not on the page"


@pytest.mark.parametrize("page", ["coming-from-trl.md", "coming-from-verl.md"])
def test_what_has_no_counterpart_says_why(page):
    rows = [row for row in pages.text(pages.ROOT / "docs" / page).splitlines() if row.startswith("|") and "—" in row]
    assert rows
    assert [row for row in rows if row.count("—") != row.count("— (")] == []


@pytest.mark.parametrize("name", FIELDS.split())
def test_every_setting_of_trl_has_a_row(name):
    """By its own name, or with those that begin alike (``vespo_*``)."""
    alike = [begin for begin in re.findall(r"(?<!\w)(\w+_)\*", OF_TRL) if name.startswith(begin)]
    assert alike or re.search(rf"(?<!\w){name}(?!\w)", OF_TRL), f"{name} is not on the page"
