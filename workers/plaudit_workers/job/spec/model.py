"""``spec.model``: the policy that is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plaudit_workers.job.spec.section import FilePath, Opaque, Section, SourcePath


class ModelSpec(Section):
    """The policy: weights, tokenizer and precision."""

    source: SourcePath = Field(min_length=1)
    """The starting weights: a hub id (``Qwen/Qwen2.5-0.5B-Instruct``) or a folder with ``config.json`` and safetensors.
    A folder starts with ``./`` or ``/``, or is next to the job file under that name."""
    revision: str = "main"
    """Branch, tag or commit on the hub; name a commit to make a run repeatable. Default ``main``. Ignored for a folder.
    """
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the forward passes of trainer and rollout, and of published weights. Default bfloat16: the usual
    choice on GPUs; use float32 on a CPU, or to compare log-probabilities exactly."""
    trust_remote_code: bool = False
    """Run Python code of the model. Default false: it would run with the rights of every worker."""
    tokenizer: SourcePath = ""
    """Hub id or folder of the tokenizer. Default empty: the one in ``source``."""
    tokenizer_revision: str = "main"
    """Branch, tag or commit of ``tokenizer`` on the hub. Default ``main``. Ignored for a folder, and without
    ``tokenizer``: then ``revision`` applies to both."""
    chat_template: FilePath = ""
    """A Jinja file that turns messages into text. Default empty: the tokenizer's own template; without one, the
    messages' contents are joined."""
    chat_template_arguments: Opaque = Field(default={})
    """Further variables of the chat template, such as ``enable_thinking: false``. Default: none."""
