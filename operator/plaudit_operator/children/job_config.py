"""The job's ConfigMap: what its processes read, and what the operator froze. And the service account of its pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.runtime.kinds import CONFIG_MAP, SERVICE_ACCOUNT
from plaudit_workers.job.loading.dump import dump_json


def config_map(context: JobContext, templates: Mapping[str, Any]) -> Manifest:
    """The resolved job with its files and the frozen pod templates.

    Args:
        context: the job.
        templates: ``{"inputs": digest, "template": …}`` by child.
    """
    current, written = _json(context.written_spec), context.admitted.written
    data = {
        # As another version of the operator wrote it, unless the user changed something.
        "job.yaml": written["job.yaml"] if written.get("current.json") == current else dump_json(context.job),
        "spec.json": _json(context.admitted.spec),
        "current.json": current,
        "templates.json": _json(templates),
        "files.json": _json([{"key": f.key, "path": f.path, "sha256": f.digest} for f in context.files]),
        **{f.key: f.content for f in context.files},
    }
    return context.manifest(CONFIG_MAP, context.metadata(names.job_config(context.name), "job"), data=data)


def service_account(context: JobContext) -> Manifest:
    """The account of the job's pods: it may do nothing, and no pod gets its token."""
    metadata = context.metadata(names.role_object(context.name, "pods"), "pods")
    return context.manifest(SERVICE_ACCOUNT, metadata, automountServiceAccountToken=False)


def _json(data: Any) -> str:
    return msgspec.json.encode(data, order="sorted").decode()
