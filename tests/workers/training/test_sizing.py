"""What ``plaudit plan`` computes, held against models on the meta device and what a forward pass really saves."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from live_bytes import LiveBytes
from plaudit_job.model_shape import DEVICES, ModelShape, find_device
from plaudit_job.rules.job import rule_problems
from plaudit_reward.attention import PACKED_ATTENTION
from plaudit_wire.errors import RefusedError
from plaudit_workers.cli import main
from plaudit_workers.commands.plan import (
    fit_problems,
    fits_rollout,
    fits_trainer,
    known_problems,
    nearest_rollout,
    nearest_trainer,
    read_shape,
    step_times,
)
from plaudit_workers.commands.sizing import LOGIT_COPIES, cache_tokens, host_parts, rollout_parts, trainer_parts
from plaudit_workers.training.model.head import FORWARD_DTYPES, TokenHead, reduced
from saved_bytes import QWEN_7B, saved_bytes

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
SHAPE_7B = ModelShape.from_config(QWEN_7B.to_dict())
LLAMA_70B = ModelShape(80, 8192, 28_672, 64, 8, 128, 128_256, tied=False)
H100 = DEVICES["h100-80"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral"])
def test_parameters_are_those_of_the_model(kind, tied):
    config = AutoConfig.for_model(kind, **SIZES, **EXPERTS.get(kind, {}), head_dim=16, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config.to_dict())
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


TOWERS = {
    "qwen2_vl": {"depth": 3, "embed_dim": 48, "hidden_size": 64, "num_heads": 4, "patch_size": 14},
    "qwen2_5_vl": {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 80,
        "out_hidden_size": 64,
        "num_heads": 4,
        "patch_size": 14,
    },
}


@pytest.mark.parametrize("kind", TOWERS)
def test_parameters_count_the_vision_tower(kind):
    config = AutoConfig.for_model(kind, text_config=SIZES | {"tie_word_embeddings": False}, vision_config=TOWERS[kind])
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    shape = ModelShape.from_config(config.to_dict())
    tower = sum(each.numel() for name, each in model.named_parameters() if "visual" in name)
    assert shape.vision == tower
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    # As in the model's files on the hub: the language model's sizes beside the tower's.
    flat = SIZES | {"model_type": kind, "tie_word_embeddings": False, "vision_config": config.vision_config.to_dict()}
    assert ModelShape.from_config(flat) == shape


def test_adapter_parameters_are_those_of_peft():
    config = AutoConfig.for_model("qwen2", **SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear"), model)
    trained = sum(each.numel() for name, each in model.named_parameters() if "lora_" in name)
    assert ModelShape.from_config(config.to_dict()).adapter_parameters(4) == trained


def test_saved_bytes_are_those_that_hooks_count():
    tokens = 64
    unfused = 4 * QWEN_7B.num_attention_heads * tokens
    head = 4 * QWEN_7B.vocab_size + 9 * QWEN_7B.hidden_size
    kept, _ = saved_bytes("none", tokens)
    assert kept == pytest.approx(SHAPE_7B.layers * (SHAPE_7B.layer_bytes() + unfused) + head, rel=0.1)
    kept, _ = saved_bytes("layers", 2048)
    assert kept == pytest.approx(SHAPE_7B.layers * 2 * SHAPE_7B.hidden, rel=0.2)


@pytest.fixture
def spec_of(make_job):
    def make(ranks=8, length=8192, trainer=None, **others):
        rollout = {"sampling": {"maxTokens": length - 1024}, "engine": {"maxModelLength": length}}
        strategy = {"ranks": ranks, "strategy": "fsdp2", "microBatchTokens": 16384}
        document = {"model": {"dtype": "bfloat16"}, "rollout": rollout, "trainer": strategy | (trainer or {})}
        return make_job(document | others).spec

    return make


def needed(spec, shape=SHAPE_7B):
    return sum(part.num_bytes for part in trainer_parts(spec, shape))


def test_states_are_sixteen_bytes_a_parameter_shared_by_the_ranks(spec_of):
    states = trainer_parts(spec_of(ranks=8), SHAPE_7B)[0]
    assert states.num_bytes == 16 * SHAPE_7B.parameters / 8
    kept = {"algorithm": {"miniBatchesPerStep": 4, "loss": {"klCoefficient": 0.1}}}
    assert trainer_parts(spec_of(**kept), SHAPE_7B)[1].num_bytes == 2 * 4 * SHAPE_7B.parameters / 8


def test_ranks_that_compute_a_row_together_divide_the_longest_sample(spec_of):
    long = {"microBatchTokens": 4096}
    activations = {
        size: trainer_parts(spec_of(length=131_072, trainer=long | {"sequenceParallelSize": size}), SHAPE_7B)[3]
        for size in (1, 4)
    }
    assert activations[1].name == "activations"
    assert activations[4].num_bytes == activations[1].num_bytes / 4


def test_a_long_sample_is_suggested_sequence_parallelism(spec_of):
    [problem, *_] = fit_problems(spec_of(ranks=8, length=131_072), SHAPE_7B, H100)
    assert problem.remedy == ("The nearest job that fits has trainer: {sequenceParallelSize: 2}")
    assert nearest_trainer(spec_of(ranks=32, trainer={"fsdpSize": 8}), LLAMA_70B, H100) == {
        "fsdp_size": 32,
        "micro_batch_tokens": 8192,
    }


def test_heads_that_ranks_cannot_share_are_a_problem(spec_of):
    problems = fit_problems(spec_of(ranks=8, trainer={"sequenceParallelSize": 8}), SHAPE_7B, H100)
    assert [str(problem) for problem in problems] == [
        "spec.trainer.sequenceParallelSize: 8 does not divide the model's 28 attention heads, or its 4 key/value heads "
        "neither divide it nor are divided by it. Set it to 4"
    ]


def test_replicas_hold_the_states_of_their_shards(spec_of):
    replicas = spec_of(ranks=32, trainer={"fsdpSize": 8})
    assert trainer_parts(replicas, SHAPE_7B)[0] == trainer_parts(spec_of(ranks=8), SHAPE_7B)[0]
    # A checkpoint holds each row once: the replicas share the writing.
    assert host_bytes(replicas)["checkpoint"] == host_bytes(spec_of(ranks=32))["checkpoint"]


def test_adapters_need_a_tenth_of_the_states(spec_of):
    adapters = trainer_parts(spec_of(trainer={"lora": {}}), SHAPE_7B)[0].num_bytes
    assert adapters < 0.2 * trainer_parts(spec_of(), SHAPE_7B)[0].num_bytes


@pytest.mark.parametrize("lora", [None, {"rank": 32}])
@pytest.mark.parametrize("dtype", FORWARD_DTYPES)
def test_memory_and_time_are_those_of_the_precision_in_which_the_trainer_computes(spec_of, dtype, lora):
    computed = str(FORWARD_DTYPES[dtype]).removeprefix("torch.")
    spec, same = (spec_of(model={"dtype": each}, trainer={"lora": lora}) for each in (dtype, computed))
    assert trainer_parts(spec, SHAPE_7B) == trainer_parts(same, SHAPE_7B)
    assert step_times(spec, SHAPE_7B, H100, 4096).update == step_times(same, SHAPE_7B, H100, 4096).update
    assert rollout_parts(spec, SHAPE_7B)[0].num_bytes < 2.2 * torch.finfo(getattr(torch, dtype)).bits / 16 * 7.7e9


def test_float32_takes_twice_the_memory_and_its_own_speed(spec_of):
    parts = [
        {part.name: part.num_bytes for part in trainer_parts(spec_of(model={"dtype": dtype}), SHAPE_7B)}
        for dtype in ("bfloat16", "float16")
    ]
    assert parts[1]["activations"] == 2 * parts[0]["activations"]
    assert parts[1]["gathered layers"] > 1.4 * parts[0]["gathered layers"]
    specs = (spec_of(model={"dtype": dtype}) for dtype in ("bfloat16", "float32"))
    fast, slow = (step_times(spec, SHAPE_7B, H100, 4096) for spec in specs)
    assert slow.update / fast.update == pytest.approx(H100.flops / H100.float32_flops)
    assert slow.generation > fast.generation


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {}),
        ("cohere", {}),
        ("cohere", {"logit_scale": 1.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("granite", {}),
        ("gemma2", {}),
        ("gemma2", {"final_logit_softcapping": None}),
    ],
)
def test_models_that_keep_whole_logits_are_those_of_the_trainer(kind, changes):
    sizes = SIZES | {"head_dim": 8} | ({"sliding_window": 8} if kind == "gemma2" else {})
    config = AutoConfig.for_model(kind, **sizes, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).eval()
    config.attn_logit_softcapping = None
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None
    assert ModelShape.from_config(config.to_dict()).whole_logits != TokenHead(model).chunked


def test_whole_logits_are_those_of_a_row(spec_of):
    logits = {part.name: part.num_bytes for part in trainer_parts(spec_of(), replace(SHAPE_7B, whole_logits=True))}
    assert logits["logits"] == LOGIT_COPIES * 4 * 16_384 * SHAPE_7B.vocabulary


def test_copies_of_logits_are_those_that_live_at_a_time():
    num_tokens, vocabulary = 64, 8000
    logits = torch.randn(num_tokens, vocabulary, requires_grad=True)
    with LiveBytes() as live:
        reduced(logits * 0.0625, torch.zeros(num_tokens, dtype=torch.long), 0.7, entropy="figure").sum().backward()
    copies = live.most / (4 * num_tokens * vocabulary)
    assert LOGIT_COPIES - 1.1 <= copies <= LOGIT_COPIES + 0.1


def test_checkpointing_ranks_and_short_rows_save_memory(spec_of):
    assert needed(spec_of()) < needed(spec_of(trainer={"activationCheckpointing": "selective"}))
    assert needed(spec_of()) < needed(spec_of(trainer={"activationCheckpointing": "none"})) / 2
    assert needed(spec_of(ranks=16)) < needed(spec_of())
    assert needed(spec_of()) < needed(spec_of(length=32_768))


@pytest.mark.parametrize(("shape", "length"), [(SHAPE_7B, 8192), (SHAPE_7B, 131_072), (LLAMA_70B, 8192)])
@pytest.mark.parametrize("device", ["a10g-24", "h100-80", "h200-141"])
def test_the_nearest_job_fits(spec_of, shape, length, device):
    gpu, spec = DEVICES[device], spec_of(ranks=1, length=length)
    changes = nearest_trainer(spec, shape, gpu)
    if changes is not None:
        changed = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=changes)})
        assert fits_trainer(changed, shape, gpu)
        ranks = changed.trainer.ranks
        fewer = spec.trainer.model_copy(update={**changes, "ranks": ranks // 2})
        assert ranks == 1 or not fits_trainer(spec.model_copy(update={"trainer": fewer}), shape, gpu)
    parallel = nearest_rollout(spec, shape, gpu)
    if parallel is not None:
        engine = spec.rollout.engine.model_copy(update=parallel)
        assert fits_rollout(
            spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"engine": engine})}), shape, gpu
        )


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [({"ranks": 3}, 16), ({"ranks": 5}, 16), ({"ranks": 6}, 16), ({"ranks": 4, "ranksPerPod": 6}, 12)],
)
def test_the_nearest_job_passes_the_rules(spec_of, trainer, ranks):
    spec = spec_of(trainer=trainer)
    changes = nearest_trainer(spec, LLAMA_70B, DEVICES["h200-141"])
    changed = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=changes)})
    assert changed.trainer.ranks == ranks
    assert rule_problems(changed) == []


def test_gpus_that_a_pod_states_are_part_of_the_remedy(spec_of):
    stated = {"pod": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}
    trainer, _ = fit_problems(spec_of(ranks=1, trainer={"strategy": "single", **stated}), LLAMA_70B, H100)
    assert trainer.remedy.endswith("and no GPUs in spec.trainer.pod.resources.limits, because their number follows")


def test_offload_is_no_remedy_for_one_rank(spec_of):
    rollout = {"sampling": {"maxTokens": 7168}, "engine": {"maxModelLength": 8192}, "sleepDuringUpdates": True}
    small = ModelShape(24, 896, 4864, 14, 2, 64, 151_936, tied=True)
    gpu = DEVICES["a10g-24"]
    [problem] = fit_problems(spec_of(ranks=1, trainer={"strategy": "single"}, rollout=rollout), small, gpu)
    assert "cpuOffload" not in problem.remedy
    assert "use more ranks with strategy fsdp2" in problem.remedy


def test_a_job_that_cannot_fit_is_refused_in_numbers_with_the_nearest_job(spec_of):
    trainer, rollout = fit_problems(spec_of(ranks=8), LLAMA_70B, H100)
    assert "each of 8 ranks needs 200.2" in trainer.message
    assert "weights, gradients, optimizer 141.1" in trainer.message
    assert trainer.remedy == "The nearest job that fits has trainer: {ranks: 32, microBatchTokens: 8192}"
    assert "the longest sample has" in rollout.message
    assert rollout.remedy == "The nearest job that fits has rollout.engine: {tensorParallelSize: 4}"
    assert fit_problems(spec_of(ranks=8), SHAPE_7B, H100) == []


def test_rollouts_that_take_turns_leave_room_for_what_the_trainer_keeps(spec_of):
    def spec(utilization, **trainer):
        engine = {"maxModelLength": 8192, "gpuMemoryUtilization": utilization}
        rollout = {"sampling": {"maxTokens": 7168}, "engine": engine, "sleepDuringUpdates": True}
        return spec_of(rollout=rollout, trainer=trainer)

    [problem] = fit_problems(spec(0.85), SHAPE_7B, H100)
    assert problem.field == "spec.rollout.engine.gpuMemoryUtilization"
    assert "of which 18.2 stay there while rollouts sample" in problem.message
    largest = float(problem.remedy.split(",")[0].rsplit(" ", 1)[1])
    assert largest == pytest.approx(1 - (3e9 + 16 * SHAPE_7B.parameters / 8) / H100.memory_bytes, abs=0.01)
    assert fit_problems(spec(largest), SHAPE_7B, H100) == []
    assert fit_problems(spec(0.85, cpuOffload=True), SHAPE_7B, H100) == []


def test_a_rollout_holds_the_adapters_that_its_engine_does(spec_of):
    weights = [
        rollout_parts(spec_of(trainer={"lora": {"rank": 32}}, algorithm={"maxStaleness": staleness}), SHAPE_7B)[0]
        for staleness in (0, 6, 100)
    ]
    adapter = 2 * SHAPE_7B.adapter_parameters(32)
    assert weights[0].num_bytes == 2 * SHAPE_7B.parameters + 2 * adapter
    assert weights[1].num_bytes == weights[2].num_bytes == 2 * SHAPE_7B.parameters + 8 * adapter


def test_the_cache_takes_the_memory_that_weights_leave(spec_of):
    spec = spec_of()
    weights = rollout_parts(spec, SHAPE_7B)[0].num_bytes
    assert weights == 2 * SHAPE_7B.parameters
    used = sum(part.num_bytes for part in rollout_parts(spec, SHAPE_7B))
    bytes_per_token = 2 * 28 * 4 * 128 * 2
    assert cache_tokens(spec, SHAPE_7B, 80e9) == pytest.approx((0.85 * 80e9 - used) / bytes_per_token)
    for given, cache in ((1 << 30, 1 << 30), (80 << 30, 80e9 - used)):
        own = spec_of(rollout={"engine": {"arguments": {"kv_cache_memory_bytes": given}}})
        assert cache_tokens(own, SHAPE_7B, 80e9) == pytest.approx(cache / bytes_per_token)


def test_ranks_that_read_their_rows_need_little_of_their_host(spec_of):
    parts = {ranks: host_bytes(spec_of(ranks)) for ranks in (8, 16)}
    whole = host_bytes(spec_of(1, trainer={"strategy": "single"}))
    assert whole["loading"] == 4 * SHAPE_7B.parameters
    assert parts[8]["loading"] == 4 * 152_064 * 3584  # the embedding, over the eight ranks of the host
    assert parts[8]["checkpoint"] == whole["checkpoint"] == 12 * SHAPE_7B.parameters
    assert parts[16]["checkpoint"] == whole["checkpoint"] / 2  # two hosts
    adapters = 4 * SHAPE_7B.adapter_parameters(16)  # whole on every rank until they are sharded
    of_adapters = host_bytes(spec_of(8, trainer={"lora": {"rank": 16}}))["loading"]
    assert of_adapters == parts[8]["loading"] + 8 * adapters
    with_code = {"model": {"dtype": "bfloat16", "trustRemoteCode": True}}
    assert host_bytes(spec_of(8, **with_code))["loading"] == 8 * whole["loading"]


def test_ranks_stack_the_experts_of_their_rows(spec_of):
    shape = replace(SHAPE_7B, experts=64, active_experts=8)
    stacked = 4 * 2 * 64 * 18944 * 3584  # gate beside up
    assert host_bytes(spec_of(8), shape)["loading"] == 2 * stacked


def host_bytes(spec, shape=SHAPE_7B):
    return {part.name: part.num_bytes for part in host_parts(spec, shape)}


def test_direct_transfer_needs_host_memory_and_saves_a_pass_over_the_weights(spec_of):
    files, direct = spec_of(), spec_of(trainer={"weights": {"transfer": "direct"}})
    offered = {part.name: part.num_bytes for part in host_parts(direct, SHAPE_7B)}["offered weights"]
    assert offered == 2 * 2 * SHAPE_7B.parameters
    assert "offered weights" not in {part.name for part in host_parts(files, SHAPE_7B)}
    times = [step_times(spec, SHAPE_7B, H100, 4096).publication for spec in (files, direct)]
    assert times[0] == 2 * times[1]


def test_deltas_need_the_published_bytes_on_the_ranks_hosts(spec_of):
    parts = host_bytes(spec_of(16, trainer={"weights": {"fullEvery": 10}}))
    assert parts["published weights"] == 2 * SHAPE_7B.parameters / 2  # two hosts
    assert "published weights" not in host_bytes(spec_of(16))


def test_what_is_offloaded_lies_on_the_host_and_takes_time(spec_of):
    plain, states = spec_of(), spec_of(trainer={"cpuOffload": True})
    on_gpu = [{part.name: part.num_bytes for part in trainer_parts(spec, SHAPE_7B)} for spec in (plain, states)]
    moved = on_gpu[0].keys() - on_gpu[1].keys()
    assert moved == {"weights, gradients, optimizer", "proximal and reference weights"}
    assert {name: host_bytes(states)[name] for name in moved} == {name: 8 * on_gpu[0][name] for name in moved}

    activations = spec_of(trainer={"activationOffload": True})
    kept, _ = saved_bytes("layers", 2048)
    assert host_bytes(activations)["activations"] == pytest.approx(8 * 16384 * kept, rel=0.2)
    assert needed(plain) - needed(activations) == pytest.approx(26 / 28 * host_bytes(activations)["activations"] / 8)
    updates = [step_times(spec, SHAPE_7B, H100, 4096).update for spec in (plain, activations, states)]
    assert updates == sorted(updates)
    assert updates[0] < updates[1]


def test_steps_overlap_with_staleness_and_shrink_with_gpus(spec_of):
    synchronous = step_times(spec_of(), SHAPE_7B, H100, 4096)
    phases = (synchronous.generation, synchronous.update, synchronous.publication)
    assert synchronous.step == pytest.approx(sum(phases))
    overlapped = step_times(spec_of(algorithm={"maxStaleness": 1}), SHAPE_7B, H100, 4096)
    assert overlapped.step < synchronous.step
    turns = {"sampling": {"maxTokens": 7168}, "engine": {"maxModelLength": 8192}, "sleepDuringUpdates": True}
    assert step_times(
        spec_of(algorithm={"maxStaleness": 1}, rollout=turns), SHAPE_7B, H100, 4096
    ).step == pytest.approx(synchronous.step)
    assert step_times(spec_of(ranks=16), SHAPE_7B, H100, 4096).update == pytest.approx(synchronous.update / 2)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA-H100-80GB-HBM3", "h100-80"),
        ("NVIDIA-A100-SXM4-40GB", "a100-40"),
        ("NVIDIA-A100-SXM4-80GB", "a100-80"),
        ("NVIDIA-H200", "h200-141"),
        ("h200-141", "h200-141"),
        ("NVIDIA-A100-80GB-PCIe", "a100-80"),
        ("NVIDIA H100 PCIe", "h100-pcie-80"),
        ("NVIDIA H100 NVL", "h100-nvl-94"),
        ("h100-pcie-80", "h100-pcie-80"),
        ("NVIDIA-GH200-480GB", "gh200-96"),
        ("NVIDIA-GH200-144G-HBM3e", "gh200-144"),
        ("NVIDIA H20", "h20-96"),
        ("NVIDIA-H800", "h800-80"),
        ("NVIDIA L40", "l40-48"),
        ("NVIDIA L40S", "l40s-48"),
        ("NVIDIA-A10", "a10-24"),
        ("NVIDIA-A10G", "a10g-24"),
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", None),
        ("Tesla-T4", None),
    ],
)
def test_gpus_are_found_by_their_node_labels(product, name):
    device = find_device(product)
    assert (device.name if device else None) == name


@pytest.fixture
def job_file(tmp_path):
    (tmp_path / "model").mkdir()

    def write(trainer, images="", **changes):
        (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_7B.to_dict() | changes, default=str))
        path = tmp_path / "job.yaml"
        path.write_text(
            "apiVersion: plaudit.dev/v1alpha1\nkind: RLJob\nmetadata: {name: big}\nspec:\n"
            f"  model: {{source: ./model}}\n  data: {{train: {{path: train.parquet}}{images}}}\n"
            "  algorithm: {steps: 1}\n"
            f"  rollout: {{}}\n  reward: {{scorers: [{{name: rule, kind: rule, rule: gsm8k}}]}}\n  trainer: {trainer}\n"
        )
        return str(path)

    return write


def test_the_command_prints_the_plan_or_refuses(job_file, capsys):
    assert main(["plan", job_file("{ranks: 8, strategy: fsdp2}"), "--gpu", "h100-80"]) == 0
    assert "7.62 billion parameters" in capsys.readouterr().out
    assert main(["plan", job_file("{ranks: 8, strategy: fsdp2}"), "--gpu", "h100-80", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == SHAPE_7B.parameters
    assert main(["plan", job_file("{ranks: 1}"), "--gpu", "h100-80"]) == 2
    assert (
        "The nearest job that fits has trainer: {ranks: 2, strategy: fsdp2, microBatchTokens: 2048}"
        in capsys.readouterr().err
    )
    assert main(["plan", job_file("{}"), "--gpu", "t4"]) == 2
    assert main(["plan", job_file("{}")]) == 2
    assert "nvidia.com/gpu.product" in capsys.readouterr().err


def test_a_job_with_images_is_planned_with_its_vision_tower(job_file, capsys):
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "patch_size": 14}
    changes = {"model_type": "qwen2_5_vl", "vision_config": tower}
    trainer, images = "{ranks: 8, strategy: fsdp2}", ", images: {}"
    assert main(["plan", job_file(trainer, images, **changes), "--gpu", "h100-80"]) == 0
    printed = capsys.readouterr().out
    assert "8.29 billion parameters" in printed
    assert "0.68 billion of these parameters are the vision tower's; its activations and its time are not" in printed
    assert main(["plan", job_file("{ranks: 1}", images, **changes), "--gpu", "h100-80"]) == 2
    assert "sequenceParallelSize" not in capsys.readouterr().err
    assert main(["plan", job_file(trainer, images, **changes | {"model_type": "other"}), "--gpu", "h100-80"]) == 2
    assert "has a vision tower that cannot be planned" in capsys.readouterr().err


def test_validate_knows_the_gpu_by_the_node_selector(job_file, capsys):
    labelled = "{pod: {nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}}"
    assert main(["validate", job_file(labelled)]) == 2
    assert "each of 1 ranks needs" in capsys.readouterr().err


def test_the_configuration_is_that_of_the_revision(make_job, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    for commit, layers in (("aaa", 1), ("bbb", 2), ("ccc", 3)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        sizes = QWEN_7B.to_dict() | {"num_hidden_layers": layers}
        (repository / "snapshots" / commit / "config.json").write_text(json.dumps(sizes, default=str))
    (repository / "refs" / "main").write_text("bbb")
    (repository / "refs" / "v2").write_text("ccc")

    def layers(**revision):
        return read_shape(make_job({"model": {"source": "org/name", **revision}}).spec.model).layers

    assert [layers(), layers(revision="v2"), layers(revision="aaa")] == [2, 3, 1]
    with pytest.raises(RefusedError, match="of revision 'v3'"):
        layers(revision="v3")


def test_a_job_without_a_named_gpu_or_model_has_no_known_problems(make_job, model_folder):
    assert known_problems(make_job({})) == []
    assert read_shape(make_job({}).spec.model).layers == 2
