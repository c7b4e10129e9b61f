"""Hold the input of all manifests, and build the metadata that they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plaudit_job.spec.rljob import Spec
from plaudit_operator import names
from plaudit_operator.admission import Admitted
from plaudit_operator.platform import Platform, platform_of
from plaudit_operator.runtime.kinds import Kind
from plaudit_operator.settings import OperatorSettings

Manifest = dict[str, Any]
Frozen = Mapping[str, Any]
"""A pod template that is kept while the user's part of the spec is the same: ``inputs`` (its digest), ``template``."""
Templates = Mapping[str, Frozen]
"""Frozen templates by child: ``reward``, ``model/<scorer>``, ``rollout/<group>`` …"""


@dataclass(frozen=True)
class JobContext:
    """Hold an admitted RLJob or RewardService, with everything that its manifests depend on."""

    name: str
    namespace: str
    uid: str
    run_uid: str
    """Names the run and its Secrets; not ``uid`` if the job has adopted the objects of an earlier one."""
    admitted: Admitted
    settings: OperatorSettings
    served_revision: str = ""
    """The revision of a RewardService that is rolled out; empty while one is being rolled out."""

    @property
    def spec(self) -> Spec:
        """Return the job's spec."""
        return self.admitted.job.spec

    @property
    def platform(self) -> Platform:
        """Return the defaults for the job's pods."""
        return self.admitted.platform or platform_of(self.settings.job_defaults, self.namespace)

    @property
    def revision(self) -> str:
        """Return the revision of a RewardService's scoring; empty for an RLJob."""
        return self.admitted.revision

    @property
    def run(self) -> str:
        """Return the id of the run."""
        return names.run_id(self.name, self.run_uid)

    @property
    def run_folder(self) -> str:
        """Return the folder of checkpoints, weights and samples, which is the same in every pod."""
        return f"{self.spec.storage.mount_path.rstrip('/')}/runs/{self.namespace}/{self.run}"

    @property
    def redis_url(self) -> str:
        """Return the URL of the transport."""
        service = f"{self.role_object('redis')}.{self.namespace}.svc"
        return self.spec.transport.url or f"redis://{service}:{names.REDIS_PORT}/0"

    @property
    def uses_labels(self) -> dict[str, str]:
        """Return the labels of pods that may reach the RewardServices that the job names."""
        return {f"{names.LABEL_USES}/{service}": "true" for service in self.admitted.services}

    def role_object(self, role: str) -> str:
        """Return the name of the objects of a role."""
        return names.role_object(self.name, role)

    def labels(self, role: str) -> dict[str, str]:
        """Return the labels that select the pods of a role."""
        return {names.LABEL_JOB: self.name, names.LABEL_ROLE: role}

    def all_labels(self, role: str) -> dict[str, str]:
        """Return the labels of the objects and pods of a role."""
        return {
            "app.kubernetes.io/name": "plaudit",
            "app.kubernetes.io/component": role,
            names.MANAGED_BY: names.FIELD_MANAGER,
            **self.labels(role),
        }

    def metadata(self, name: str, role: str, **extra_labels: str) -> Manifest:
        """Return the metadata of a child: name, labels and owner."""
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": {**self.all_labels(role), **extra_labels},
            "ownerReferences": [
                {
                    "apiVersion": self.admitted.job.api_version,
                    "kind": self.admitted.kind,
                    "name": self.name,
                    "uid": self.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        }

    def manifest(self, kind: Kind, metadata: Manifest, spec: Manifest | None = None, **fields: Any) -> Manifest:
        """Return a complete manifest."""
        head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
        return head | ({"spec": spec} if spec is not None else {}) | fields
