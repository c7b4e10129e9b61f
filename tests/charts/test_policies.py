"""The network policy of the operator itself."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

CHART = Path(__file__).parents[2] / "charts" / "plaudit"


def open_ports(helm: str, *values: str) -> list[set[int]]:
    """Return the ports of each rule of egress that has no destination."""
    options = [option for value in values for option in ("--set", value)]
    command = [helm, "template", "plaudit", CHART, *options, "-s", "templates/policies.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    policies: list[dict[str, Any]] = [each for each in YAML(typ="safe").load_all(done.stdout) if each]
    (policy,) = (each for each in policies if each["kind"] == "NetworkPolicy")
    return [{port["port"] for port in rule["ports"]} for rule in policy["spec"]["egress"] if "to" not in rule]


@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ((), {443, 6443, 8443, 16443}),
        (("networkPolicies.apiServerPorts={443,7443}",), {443, 7443}),
    ],
)
def test_the_operator_reaches_the_api_server_at_the_ports_of_the_values(helm: str, values: tuple[str], ports: set[int]):
    assert open_ports(helm, *values) == [{53}, ports]
