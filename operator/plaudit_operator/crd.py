"""Generate the CustomResourceDefinitions of RLJob and RewardService from the models.

Run as ``python -m plaudit_operator.crd [--check|--print]``.

The JSON Schema of ``plaudit_job.reference`` becomes a structural schema: references inlined, keywords of JSON Schema
2020 translated to OpenAPI 3.0, and a bound on every text, list and mapping (the API server estimates the cost of CEL
rules from them). Short rules between fields, and immutability, become CEL (``crd_rules.py``); the operator checks every
rule again with the models (condition ``SpecValid``). Defaults are omitted: an object keeps what its user wrote.

``status``, which ``status/status.py`` writes, and the columns of ``kubectl get`` are written by hand below.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from plaudit_job.reference import job_schema, reward_service_schema
from plaudit_operator import names
from plaudit_operator.crd_rules import LISTS, immutability_rules, item_immutability, rules_at, service_rules
from plaudit_operator.runtime.kinds import REWARD_SERVICE, RLJOB, Kind


def _text(description: str, most: int = 4096) -> dict[str, Any]:
    return {"type": "string", "maxLength": most, "description": description}


def _count(description: str) -> dict[str, Any]:
    return {"type": "integer", "format": "int64", "minimum": 0, "description": description}


def _time(description: str) -> dict[str, Any]:
    return {"type": "string", "format": "date-time", "description": description}


def _fields(properties: dict[str, Any], description: str = "", required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the schema of an object."""
    head = ({"required": list(required)} if required else {}) | ({"description": description} if description else {})
    return {"type": "object", **head, "properties": properties}


def _list_by(key: str, description: str, items: dict[str, Any], most: int = 64) -> dict[str, Any]:
    """Return the schema of a list whose items a key identifies."""
    keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return {"type": "array", "maxItems": most, **keys, "items": items, "description": description}


_CONDITION = _fields(
    required=("type", "status", "reason", "message", "lastTransitionTime"),
    properties={
        "type": _text("Type of the condition.", 64),
        "status": {"type": "string", "enum": ["True", "False", "Unknown"], "description": "Status of the condition."},
        "reason": _text("Reason, in one word.", 128),
        "message": _text("Explanation, with the remedy.", 32768),
        "observedGeneration": _count("Generation of the object that it describes."),
        "lastTransitionTime": _time("Time of the last transition."),
    },
)
_ROLE = _fields(
    required=("name",),
    properties={
        "name": _text(", ".join(facts.reported or role for role, facts in names.ROLES.items()) + ".", 64),
        "desired": _count("Desired pods."),
        "ready": _count("Pods that are ready."),
        "updated": _count("Pods of the newest template."),
        "restarts": _count("Restarts of their containers."),
        "lastFailure": _text("Last failure of one of its pods."),
    },
)
_ROLE_COST = _fields(
    required=("name",),
    properties={
        "name": _text("trainer, rollout, reward, or a reward model's scorer.", 64),
        "gpus": _count("GPUs that its pods hold now."),
        "gpuSeconds": _count("GPU seconds until countedTime."),
    },
)
STATUS = _fields(
    description="Observed state; written by the operator only.",
    properties={
        "observedGeneration": _count("Generation of the object that this status describes."),
        "phase": _text("Summary of the conditions in one word; output only.", 64),
        "run": _text("Id of the run: name and short uid; part of the run's folder and of every key in Redis.", 64),
        "conditions": _list_by(
            "type", "Conditions of the job; docs/kubernetes/conditions.md has the remedies.", _CONDITION, 32
        ),
        "roles": _list_by("name", "Pods by role.", _ROLE),
        "replicas": {
            "type": "object",
            "properties": {"rollout": _text("ready/desired.", 32), "reward": _text("ready/desired.", 32)},
            "description": "Text for the columns of kubectl get; the numbers are in roles.",
        },
        "rollouts": _count("Rollout workers whose pods exist, for the scale subresource."),
        "rolloutSelector": _text("Labels of one pod of each rollout worker, for the scale subresource.", 512),
        "url": _text("Address of the gateway of a job that only scores, inside the cluster.", 256),
        "progress": _fields(
            description="Progress from the metrics service, at most 10 s old while the job runs.",
            properties={
                "step": _count("Steps closed."),
                "totalSteps": _count("Steps of the run."),
                "rewardMean": {"type": "number", "description": "Mean reward of the last step."},
                "exposedRewardSeconds": {"type": "number", "description": "Exposed reward seconds of the last step."},
                "verdict": _text("What the last steps waited for.", 64),
                "backlog": _count("Samples that wait for a reward worker."),
                "troubles": {
                    "type": "array",
                    "maxItems": 64,
                    "items": _fields({"reason": _text("Reason, in one word.", 128), "message": _text("Explanation.")}),
                    "description": "Problems that no pod shows; the condition Degraded reports them.",
                },
            },
        ),
        "cost": _fields(
            description="GPU time of the job, counted whenever the status changes.",
            properties={
                "roles": _list_by("name", "GPU time by role.", _ROLE_COST),
                "exposedRewardGpuSeconds": _count("GPU seconds that the trainer waited for rewards."),
                "countedTime": _time("Time until which it is counted; later time is that of gpus."),
            },
        ),
        "attempt": _count("Number of the trainer's current attempt, from 0."),
        "restarts": _count("Failed attempts of the trainer that the cluster did not cause."),
        "disruptions": _count("Attempts of the trainer that the cluster ended."),
        "shortAttempts": _count(
            "Attempts in a row that closed no step in less than ten minutes; they lengthen the backoff."
        ),
        "lastAttemptStep": _count("Step at the end of the trainer's last attempt."),
        "nextAttemptTime": _time("Earliest start of the trainer's next attempt."),
        "startTime": _time("Time at which all roles first ran."),
        "completionTime": _time("Time of its end."),
    },
)


def _column(name: str, kind: str, path: str, priority: int = 0) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})


PRINTER_COLUMNS: list[dict[str, Any]] = [
    _column("Phase", "string", ".status.phase"),
    _column("Step", "integer", ".status.progress.step"),
    _column("Rollout", "string", ".status.replicas.rollout"),
    _column("Reward", "string", ".status.replicas.reward"),
    _column("Verdict", "string", ".status.progress.verdict"),
    _column("Backlog", "integer", ".status.progress.backlog"),
    _column("Restarts", "integer", ".status.restarts", 1),
    _column("Run", "string", ".status.run", 1),
    _column("URL", "string", ".status.url", 1),
    _column("Age", "date", ".metadata.creationTimestamp"),
]
_OF_JOBS_ONLY = ("attempt", "restarts", "disruptions", "shortAttempts", "lastAttemptStep", "nextAttemptTime")
"""Fields about attempts of a trainer."""
SERVICE_STATUS: dict[str, Any] = {
    **STATUS,
    "properties": {name: field for name, field in STATUS["properties"].items() if name not in _OF_JOBS_ONLY}
    | {"revision": _text("Revision of the scoring in effect; results of its workers have it as their version.", 64)},
}
"""The schema of a RewardService's ``status``."""
SERVICE_COLUMNS: list[dict[str, Any]] = [
    _column("Phase", "string", ".status.phase"),
    _column("Revision", "string", ".status.revision"),
    _column("RolledOut", "string", ".status.conditions[?(@.type=='RolledOut')].status"),
    _column("Workers", "string", ".status.replicas.reward"),
    _column("Backlog", "integer", ".status.progress.backlog"),
    _column("URL", "string", ".status.url"),
    _column("Run", "string", ".status.run", 1),
    _column("Age", "date", ".metadata.creationTimestamp"),
]


TEMPLATES = Path(__file__).parents[2] / "charts" / "plaudit" / "templates"
MAX_TEXT, MAX_ITEMS, MAX_ENTRIES = 4096, 64, 64
"""Bounds of texts, lists and mappings whose models have none."""
_LIST_KEYS = {
    "reward.scorers": "name",
    "rollout.groups": "name",
    "files.items": "path",
    "env": "name",
    "volumeMounts": "mountPath",
}
"""Lists whose items have an identity, by the end of their path: server-side apply then merges them item by item."""
_MAY_CHANGE = "May change while the job runs."
"""Added to the description of mutable fields, for ``kubectl explain``; all others are fixed."""
_QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
_COPIED = ("description", "type", "enum", "pattern", "minLength", "maxLength", "minItems", "maxItems", "format")
_OPAQUE = "x-kubernetes-preserve-unknown-fields"
_INT_OR_STRING = "x-kubernetes-int-or-string"


def custom_resource_definition() -> dict[str, Any]:
    """Return the definition of RLJob as plain data."""
    definition = _definition(RLJOB, "rlj", _rljob(), PRINTER_COLUMNS)
    definition["spec"]["versions"][0]["subresources"]["scale"] = {
        "specReplicasPath": ".spec.rollout.replicas",
        "statusReplicasPath": ".status.rollouts",
        "labelSelectorPath": ".status.rolloutSelector",
    }
    return definition


def reward_service_definition() -> dict[str, Any]:
    """Return the definition of RewardService as plain data."""
    return _definition(REWARD_SERVICE, "rws", _reward_service(), SERVICE_COLUMNS)


DEFINITIONS = {"crd.yaml": custom_resource_definition, "crd-rewardservice.yaml": reward_service_definition}
"""The definitions, by the chart's template that holds each."""


def _definition(kind: Kind, short: str, schema: dict[str, Any], columns: list[dict[str, Any]]) -> dict[str, Any]:
    group, version = kind.api_version.split("/")
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{group}"},
        "spec": {
            "group": group,
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": [short],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def _rljob() -> dict[str, Any]:
    schema = job_schema()
    sections = schema["$defs"]
    spec = _structural(sections["Spec"], sections, "")
    spec["x-kubernetes-validations"] += immutability_rules(sections)
    for path, section in LISTS.items():
        parent, _, name = path.partition(".")
        items = spec["properties"][parent]["properties"][name]["items"]
        items.setdefault("x-kubernetes-validations", []).extend(item_immutability(section, sections))
    return _root("A job: reinforcement learning of a language model, or a service that scores samples.", spec, STATUS)


def _reward_service() -> dict[str, Any]:
    sections = reward_service_schema()["$defs"]
    spec = _structural(sections["RewardServiceSpec"], sections, "")
    spec["x-kubernetes-validations"] = service_rules()
    described = "A lasting reward service: a change of its scorers, models or images is rolled out."
    return _root(described, spec, SERVICE_STATUS)


def _root(description: str, spec: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    name_rule = "self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')"
    name_message = "metadata.name must be at most 40 of a-z, 0-9 and '-', for example my-job"
    letter_rule = "oldSelf.hasValue() || self.metadata.name.matches('^[a-z]')"
    letter_message = "metadata.name must begin with a-z: Services have its name, for example job-7b instead of 7b-job"
    return {
        "description": description,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        "x-kubernetes-validations": [
            {"rule": name_rule, "message": name_message},
            # An object that an earlier definition accepted has to stay changeable.
            {"rule": letter_rule, "message": letter_message, "optionalOldSelf": True},
        ],
    }


def _structural(node: Mapping[str, Any], sections: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Convert a node of the JSON Schema, at a path under ``spec`` without indices, into one of a structural schema."""
    if "$ref" in node:
        node = {**sections[node["$ref"].removeprefix("#/$defs/")], **{k: v for k, v in node.items() if k != "$ref"}}
    if node.get("x-plaudit-mutable") and "description" in node:
        node = {**node, "description": f"{node['description']} {_MAY_CHANGE}"}
    if node.get(_OPAQUE):
        return {**_described(node), "type": "object", _OPAQUE: True}
    if node.get(_INT_OR_STRING):
        kinds = [{"type": "integer"}, {"type": "string"}]
        return {**_described(node), "anyOf": kinds, "pattern": _QUANTITY_PATTERN, _INT_OR_STRING: True}
    schema = {key: node[key] for key in _COPIED if key in node} | _limits(node)
    match node.get("type"):
        case "string" if "enum" not in node and "const" not in node:
            schema.setdefault("maxLength", MAX_TEXT)
        case "array":
            schema |= _list(node, sections, path)
        case "object":
            schema |= _object(node, sections, path)
    if rules := rules_at(path, node, sections):
        schema["x-kubernetes-validations"] = rules
    return schema


def _described(node: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": node["description"]} if "description" in node else {}


def _limits(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bounds of a number; OpenAPI 3.0 marks an exclusive bound with a flag."""
    limits: dict[str, Any] = {}
    for key, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if key in node:
            limits[key] = node[key]
        if exclusive in node:
            limits |= {key: node[exclusive], exclusive: True}
    return limits


def _list(node: Mapping[str, Any], sections: Mapping[str, Any], path: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"items": _structural(node["items"], sections, f"{path}[]")}
    schema["maxItems"] = node.get("maxItems", MAX_ITEMS)
    key = next((key for end, key in _LIST_KEYS.items() if f".{path}".endswith(f".{end}")), None)
    if key is None:
        return schema | {"x-kubernetes-list-type": "atomic"}
    return schema | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def _object(node: Mapping[str, Any], sections: Mapping[str, Any], path: str) -> dict[str, Any]:
    if "properties" not in node:
        values = _structural(node["additionalProperties"], sections, f"{path}{{}}")
        return {"additionalProperties": values, "maxProperties": MAX_ENTRIES}
    properties = {
        name: _structural(field, sections, f"{path}.{name}".lstrip(".")) for name, field in node["properties"].items()
    }
    required = {"required": list(node["required"])} if node.get("required") else {}
    return {"properties": properties} | required


def chart_template(definition: dict[str, Any] | None = None) -> str:
    """Return a definition (default: RLJob's) as the chart's template.

    Values of the chart decide on its installation, and on keeping it at uninstall.
    """
    definition = definition or custom_resource_definition()
    definition["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    text = as_yaml(definition)
    if "{{" in text:
        fields = ", ".join(_holding_templates(definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"], ""))
        raise ValueError(f"{fields}: the field's text contains '{{{{', which Helm would take for a template")
    kept = "  annotations:\n    helm.sh/resource-policy: keep\n"
    labelled = '  labels:\n    {{- include "plaudit.labels" . | nindent 4 }}\n'
    text = text.replace(kept, labelled + "  {{- if .Values.crds.keep }}\n" + kept + "  {{- end }}\n", 1)
    head = "# Generated by `python -m plaudit_operator.crd` from plaudit_job.\n"
    return head + "{{- if .Values.crds.install }}\n" + text + "{{- end }}\n"


def _holding_templates(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the fields whose own text, without that of the fields below, contains ``{{``."""
    if "{{" in str({key: value for key, value in schema.items() if key not in ("properties", "items")}):
        yield path or "the root"
    for name, field in schema.get("properties", {}).items():
        yield from _holding_templates(field, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from _holding_templates(schema["items"], f"{path}[]")


def as_yaml(definition: Mapping[str, Any]) -> str:
    """Return block-style YAML."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 120
    yaml.representer.ignore_aliases = lambda _: True
    stream = io.StringIO()
    yaml.dump(definition, stream)
    return stream.getvalue()


def main() -> int:
    """Write the chart's templates, check that they are up to date, or print the definitions for kubectl."""
    parser = argparse.ArgumentParser(prog="python -m plaudit_operator.crd", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a template is out of date")
    parser.add_argument("--print", action="store_true", help="print the definitions: kubectl apply --server-side -f -")
    arguments = parser.parse_args()
    if arguments.print:
        sys.stdout.write("---\n".join(as_yaml(definition()) for definition in DEFINITIONS.values()))
        return 0
    texts = {TEMPLATES / name: chart_template(definition()) for name, definition in DEFINITIONS.items()}
    outdated = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in outdated:
        if arguments.check:
            sys.stderr.write(f"{path} is out of date: run make generate\n")
        else:
            path.write_text(texts[path], encoding="utf-8")
    return 1 if arguments.check and outdated else 0


if __name__ == "__main__":
    raise SystemExit(main())
