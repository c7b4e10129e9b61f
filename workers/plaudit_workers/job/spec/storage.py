"""``spec.storage`` and ``spec.files``: the shared volume, and files that travel with the job."""

from __future__ import annotations

from pydantic import Field

from plaudit_workers.job.spec.section import Section


class StorageSpec(Section):
    """The volume that all processes share; under ``plaudit run``, the run's folder."""

    claim_name: str = ""
    """Name of an existing PersistentVolumeClaim of the job's namespace that many pods can mount (ReadWriteMany).
    Default empty: none, enough for a job that only scores."""
    mount_path: str = Field(default="/plaudit", pattern=r"^/")
    """Mount point in every pod; a run's folder is ``<mountPath>/runs/<namespace>/<run>/``. Default ``/plaudit``."""


class FileItem(Section):
    """One file of the ConfigMap."""

    key: str = Field(min_length=1)
    """Key in the ConfigMap that ``configMap`` names."""
    path: str = Field(min_length=1, pattern=r"^[^/]")
    """Relative path under which ``path`` fields of the job refer to it."""


class FilesSpec(Section):
    """Reward functions and templates for Kubernetes: a ConfigMap that is copied, with its digest, at admission."""

    config_map: str = ""
    """Name of a ConfigMap in the job's namespace. Default empty: files come from the image or the volume."""
    items: list[FileItem] = Field(default=[])
    """Keys to use. Default empty: all, under their own names."""
