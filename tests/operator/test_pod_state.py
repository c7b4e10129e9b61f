"""What is said of pods: the same words for the same trouble, and those that help."""

from __future__ import annotations

from typing import Any

import pytest

from plaudit_operator.pod_state import exit_of, is_disrupted, problem_of

NOW = 1_780_000_000.0


def pod(status: dict[str, Any], **container: Any) -> dict[str, Any]:
    statuses = [{"name": "rollout", "image": "x:1", "restartCount": 0, **container}] if container else []
    return {"metadata": {"name": "p"}, "status": {"containerStatuses": statuses, **status}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return pod({}, state={"waiting": {"reason": reason, "message": message}})


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return pod({}, state={"terminated": {"exitCode": code, "reason": reason, "message": message}})


@pytest.mark.parametrize(
    ("observed", "reason", "words"),
    [
        (waiting("ErrImagePull", "no such image"), "ImagePullFailed", "image x:1: no such image"),
        (waiting("CreateContainerConfigError", 'secret "a" not found'), "SecretOrConfigMissing", 'secret "a"'),
        (ended(137, "OOMKilled"), "OutOfMemory", "exceeded its memory limit"),
        (ended(1, message="ValueError: boom"), "Crashing", "exited with code 1: ValueError: boom"),
        (
            pod(
                {
                    "conditions": [
                        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2"}
                    ]
                }
            ),
            "Unschedulable",
            "0/2",
        ),
    ],
)
def test_trouble_is_reported_with_its_reason(observed: dict[str, Any], reason: str, words: str):
    found = problem_of(observed, NOW)
    assert found
    assert found[0] == reason
    assert words in found[1]


def test_an_image_that_cannot_be_pulled_gives_the_same_message_each_time():
    first = waiting("ErrImagePull", "failed to pull x:1: not found")
    later = waiting("ImagePullBackOff", 'Back-off pulling image "x:1": ErrImagePull: failed to pull x:1: not found')
    assert problem_of(first, NOW) == problem_of(later, NOW)


def test_a_crash_loop_tells_how_the_last_try_ended():
    last = {"terminated": {"exitCode": 2, "message": "refused"}}
    looping = pod({}, state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=last)
    found = problem_of(looping, NOW)
    assert found
    assert found[1] == "p: rollout exited with code 2: refused"


def test_a_pod_that_runs_or_ended_well_has_no_problem():
    assert problem_of(pod({"phase": "Running"}, state={"running": {}}), NOW) is None
    assert problem_of(ended(0, "Completed"), NOW) is None


def test_only_the_readable_part_of_a_json_line_is_shown():
    log = 'first line\n{"time": "2026", "level": "error", "worker": "w", "message": "refused", "error": "no such file"}'
    crashing = "p: rollout exited with code 2"
    assert problem_of(ended(2, message=log), NOW) == ("Crashing", f"{crashing}: refused: no such file")
    assert problem_of(ended(2, message='{"cut": '), NOW) == ("Crashing", 'p: rollout exited with code 2: {"cut":')


def test_only_the_end_of_long_output_is_shown():
    assert next(iter(exit_of(ended(1, message="x" * 5000 + "the error"), "rollout")))[1].endswith("the error")


@pytest.mark.parametrize(
    "status",
    [{"reason": "Evicted"}, {"reason": "NodeLost"}, {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}],
)
def test_a_pod_ended_by_the_cluster_is_a_disruption(status: dict[str, Any]):
    assert is_disrupted(pod(status))


def test_a_crash_is_no_disruption():
    assert not is_disrupted(ended(1))
