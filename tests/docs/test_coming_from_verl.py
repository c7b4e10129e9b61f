"""The page for users of verl names every setting of its algorithm, actor and model: a silent one would be lost."""

from __future__ import annotations

import re

import pages
import pytest

PAGE = pages.text(pages.ROOT / "docs" / "coming-from-verl.md")

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
CODE = "\n".join(re.findall(r"`([^`\n]+)`", PAGE))


@pytest.mark.parametrize(("section", "name"), PAIRS, ids=[f"{section}.{name}" for section, name in PAIRS])
def test_every_setting_has_a_row(section, name):
    """By its own name, or with its whole section (``mtp.*``)."""
    whole = rf"(?<!\w){re.escape(section.rpartition('.')[2])}\.\*" if "." in section else "(?!)"
    assert re.search(rf"(?<!\w){name}(?!\w)|{whole}", CODE), f"{section}.{name} is not on the page"
