"""The service's settings come from the environment, and a wrong one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from plaudit_metrics.service.settings import ServiceSettings, ServiceSettingsError

LEAST = {"PLAUDIT_RUN": "demo-1", "PLAUDIT_REDIS_URL": "redis://127.0.0.1:6379/0"}


def test_the_service_listens_on_loopback_by_default() -> None:
    settings = ServiceSettings.from_environment(LEAST)
    assert (settings.host, settings.port, settings.run_folder) == ("127.0.0.1", 0, None)


def test_everything_can_be_set() -> None:
    settings = ServiceSettings.from_environment(
        LEAST
        | {
            "PLAUDIT_METRICS_PORT": "9464",
            "PLAUDIT_METRICS_HOST": "0.0.0.0",
            "PLAUDIT_REDIS_PASSWORD": "secret",
            "PLAUDIT_RUN_FOLDER": "/runs/demo-1",
            "PLAUDIT_LOG_FILE": "/runs/demo-1/logs/metrics.log",
            "PLAUDIT_REWARD_LATENCY_THRESHOLD_S": "2.5",
            "PLAUDIT_METRICS_ALLOWED_HOSTS": "plaudit.example, metrics.example,",
        }
    )
    assert settings.port == 9464
    assert settings.run_folder == Path("/runs/demo-1")
    assert settings.latency_threshold_s == 2.5
    assert settings.allowed_hosts == ("plaudit.example", "metrics.example")


def test_the_port_of_the_process_is_the_services_port() -> None:
    assert ServiceSettings.from_environment(LEAST | {"PLAUDIT_HEALTH_PORT": "8080"}).port == 8080


@pytest.mark.parametrize("name", LEAST)
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(ServiceSettingsError, match=name):
        ServiceSettings.from_environment({key: value for key, value in LEAST.items() if key != name})


def test_a_port_that_is_no_number_is_named() -> None:
    with pytest.raises(ServiceSettingsError, match="PLAUDIT_METRICS_PORT is 'http'"):
        ServiceSettings.from_environment(LEAST | {"PLAUDIT_METRICS_PORT": "http"})
