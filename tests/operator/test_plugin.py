"""``kubectl plaudit``: each command as the kubectl command that it becomes."""

from __future__ import annotations

import pytest

from plaudit_operator.plugin import command


def test_logs_of_a_role_are_selected_by_labels():
    line = " ".join(command(["-n", "team", "logs", "gsm", "reward", "--follow"]))
    assert line.startswith("kubectl --namespace team logs --selector plaudit.dev/job=gsm,plaudit.dev/role=reward")
    assert line.endswith("--follow")


def test_suspend_and_resume_change_one_field():
    assert command(["suspend", "gsm"])[-1] == '{"spec":{"scheduling":{"suspend":true}}}'
    assert command(["resume", "gsm"])[-1] == '{"spec":{"scheduling":{"suspend":false}}}'


def test_open_forwards_to_the_metrics_page():
    assert command(["open", "gsm", "--port", "8000"])[1:] == ["port-forward", "service/gsm-metrics", "8000:9090"]


def test_a_role_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command(["logs", "gsm", "driver"])
    assert "rollout" in capsys.readouterr().err
