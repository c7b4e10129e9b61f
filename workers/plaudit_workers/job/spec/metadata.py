"""``metadata``: the job's name."""

from __future__ import annotations

from pydantic import Field

from plaudit_workers.job.spec.section import DNS_LABEL, Section


class Metadata(Section):
    """Name and labels, as on any Kubernetes object."""

    name: str = Field(min_length=1, max_length=40, pattern=DNS_LABEL)
    """Name of the job: a DNS label of at most 40 characters, because children get suffixes and pods are DNS labels
    too. A run's id is this name and a short uid."""
    namespace: str = Field(default="", max_length=63)
    """Kubernetes namespace. Default empty: the one of the context; ``plaudit run`` has none."""
    labels: dict[str, str] = Field(default={})
    """Labels of the object; Plaudit gives them no meaning."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the object; Plaudit gives them no meaning."""
