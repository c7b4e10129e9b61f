"""Write the policy of a checkpoint as a whole model, tensor by tensor. Called by ``export``."""

from __future__ import annotations

from pathlib import Path

from plaudit_wire.errors import RefusedError
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.published_weights import ADAPTER_FILE, WEIGHTS_FILE


def export_checkpoint(job: RLJob, checkpoint: Path, output: Path) -> None:
    """Write a checkpoint's trained weights in ``model.dtype``, with configuration and tokenizer.

    Args:
        output: gets the model; with ``trainer.lora`` the adapter in peft's format.

    Raises:
        RefusedError: the checkpoint is damaged, of an earlier version, or its model's configuration cannot be loaded.
    """
    from plaudit_workers.images.processor import ImageProcessor
    from plaudit_workers.training.model.lora import adapter_config, published_name
    from plaudit_workers.training.model.model import DTYPES, build_empty, save_companions
    from plaudit_workers.training.shards.conversion import write_converted
    from plaudit_workers.training.shards.index import MODEL_PREFIX, ShardError
    from plaudit_workers.training.shards.reader import ShardReader

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
