"""Clean up after an ended job: keep the RLJob alone (All), its Redis too (KeepTransport), or everything (None)."""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.actions import Action, Delete, Patch
from plaudit_operator.observed import Observed
from plaudit_operator.runtime.kinds import CHILDREN


def cleanup_actions(observed: Observed) -> list[Action]:
    """Return the deletions and stops that are due; empty once they are done."""
    policy = (observed.job["spec"].get("lifecycle") or {}).get("cleanup", "All")
    if policy == "None":
        return _stop_trainer(observed)
    kept = names.role_object(observed.name, "redis") if policy == "KeepTransport" else ""
    return [
        Delete(kind.kind, child["metadata"]["name"], child["metadata"]["uid"])
        for kind in CHILDREN
        for child in observed.own(kind.kind)
        if child["metadata"]["name"] != kept and not child["metadata"].get("deletionTimestamp")
    ]


def _stop_trainer(observed: Observed) -> list[Action]:
    """Keep the objects for inspection, but stop the trainer of a failed job."""
    running = [job for job in observed.jobs_of("trainer") if (job.get("status") or {}).get("active")]
    return [
        Patch("Job", job["metadata"]["name"], {"metadata": {"uid": job["metadata"]["uid"]}, "spec": {"suspend": True}})
        for job in running
        if not job["spec"].get("suspend")
    ]
