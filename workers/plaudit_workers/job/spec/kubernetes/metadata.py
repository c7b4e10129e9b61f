"""``metadata``: the job's name."""

from __future__ import annotations

from pydantic import Field

from plaudit_workers.job.spec.section import DNS_LABEL, Section


class Metadata(Section):
    """Name and labels, as on any Kubernetes object."""

    name: str = Field(min_length=1, max_length=40, pattern=DNS_LABEL)
    """Name of the job: at most 40 of a-z, 0-9 and ``-``, because the names of its pods are this name and a suffix. A
    run's id is this name and a short uid."""
    namespace: str = Field(default="", max_length=63)
    """Kubernetes namespace. Default empty: that of the context; ``plaudit run`` ignores it."""
    labels: dict[str, str] = Field(default={})
    """Labels of the object; Plaudit ignores them."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the object; Plaudit ignores them."""
