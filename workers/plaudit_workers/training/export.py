"""Export weights that a run published, or those of a checkpoint, as one whole model (``plaudit export``).

Adapters are merged.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from plaudit_job.spec.algorithm import ModelSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_wire.errors import RefusedError
from plaudit_wire.printable import print_text
from plaudit_workers.files import whole_folder
from plaudit_workers.job_start import load_training_job
from plaudit_workers.process import EXIT_DONE
from plaudit_workers.weights.deltas import DeltaError, restore_version
from plaudit_workers.weights.published import ADAPTER_FILE, PROBE_FILE, WEIGHTS_FILE


def export(arguments: argparse.Namespace) -> int:
    """Run the command."""
    run: Path = arguments.run if arguments.run.is_dir() else arguments.runs_folder / arguments.run
    if not (run / "job.yaml").is_file():
        raise RefusedError(f"there is no run in {run}: give a run's folder, or its id and --runs-folder")
    job = load_training_job(run / "job.yaml")
    output: Path = arguments.output
    if output.exists():
        raise RefusedError(f"{output} exists; give --output a new folder")
    if arguments.step is None:
        weights = _weights(run, arguments.version)
        origin = f"policy version {weights.name}"
    elif arguments.version:
        raise RefusedError("--step and --version exclude each other: a step names a checkpoint, a version weights")
    else:
        checkpoint = _checkpoint(run, arguments.step)
        origin = f"checkpoint of step {arguments.step}"
    with whole_folder(output) as folder:
        if arguments.step is not None:
            _export_checkpoint(job, checkpoint, folder)
        elif (weights / ADAPTER_FILE).is_file():
            merge(job.spec.model, weights, folder)
        else:
            _export_weights(weights, folder)
    print_text(f"{output}: {origin}")
    return EXIT_DONE


def _weights(run: Path, version: str) -> Path:
    from plaudit_workers.training.publish import published_versions

    present = [str(each) for each in published_versions(run / "weights")]
    if not present:
        raise RefusedError(f"{run / 'weights'} holds no published weights. Is this the folder of a training run?")
    if version and version not in present:
        raise RefusedError(f"{run / 'weights'} has no version {version}; it has {', '.join(present)}")
    return run / "weights" / (version or present[-1])


def _checkpoint(run: Path, step: int) -> Path:
    from plaudit_workers.training.checkpoint import checkpoints

    present = {int(path.name.removeprefix("step-")): path for path in checkpoints(run / "checkpoints")}
    if step not in present:
        names = ", ".join(map(str, sorted(present))) or "none"
        raise RefusedError(f"{run / 'checkpoints'} has no step {step}; it has {names}")
    return present[step]


def _export_weights(weights: Path, output: Path) -> None:
    try:
        restore_version(weights, output)
    except (DeltaError, FileNotFoundError) as error:
        raise RefusedError(
            f"{weights} cannot be restored: {error}. Export another version, or a checkpoint with --step"
        ) from error
    (output / PROBE_FILE).unlink(missing_ok=True)


def _export_checkpoint(job: RLJob, checkpoint: Path, output: Path) -> None:
    if job.spec.trainer.lora is None:
        export_checkpoint(job, checkpoint, output)
        return
    with tempfile.TemporaryDirectory() as adapter:
        export_checkpoint(job, checkpoint, Path(adapter))
        merge(job.spec.model, Path(adapter), output)


def export_checkpoint(job: RLJob, checkpoint: Path, output: Path) -> None:
    """Write a checkpoint's trained weights in ``model.dtype``, with configuration and tokenizer.

    Args:
        output: gets the model; with ``trainer.lora`` the adapter in peft's format.
    """
    from plaudit_workers.images import ImageProcessor
    from plaudit_workers.training.model.head import DTYPES, build_empty, save_companions
    from plaudit_workers.training.model.lora import adapter_config, published_name
    from plaudit_workers.weights.files import ShardReader, write_converted
    from plaudit_workers.weights.index import MODEL_PREFIX, ShardError

    try:
        reader = ShardReader(checkpoint)
        lora = job.spec.trainer.lora
        stored = [name for name in reader.index.tensors if name.startswith(MODEL_PREFIX)]
        plain = {name.removeprefix(MODEL_PREFIX): name for name in stored}
        published = {published_name(name): own for name, own in plain.items()} if lora else plain
        file = ADAPTER_FILE if lora else WEIGHTS_FILE
        model = None if lora else build_empty(job.spec.model, images=job.spec.data.images is not None)
        parts = {} if model is None else model.published
        write_converted(output / file, reader, published, DTYPES[job.spec.model.dtype], parts)
    except (OSError, ShardError) as error:
        raise RefusedError(f"checkpoint {checkpoint} cannot be read: {error}. Export another step") from error
    if lora is None:
        save_companions(job.spec.model, output, ImageProcessor.of_job(job, output))
    else:
        adapter_config(lora, job.spec.model.source).save_pretrained(str(output))


def merge(model: ModelSpec, adapter: Path, output: Path) -> None:
    """Write the model with an adapter added to its weights: W + alpha / rank · B A, computed in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from plaudit_workers.tokenizer import load_tokenizer, loading_message
    from plaudit_workers.training.model.head import DTYPES

    try:
        base = AutoModelForCausalLM.from_pretrained(
            model.source, revision=model.revision, trust_remote_code=model.trust_remote_code, dtype=torch.float32
        )
    # Loading meets the network, the disk, other people's code and the memory's limit.
    except Exception as error:
        raise RefusedError(loading_message("model", "model.source", model.source, error)) from error
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.to(DTYPES[model.dtype]).save_pretrained(output)
    load_tokenizer(model).save_pretrained(output)
