"""Write the CEL rules of the CRDs: contradictions between fields, and fields that cannot change.

``SpecValid`` checks the rest: rules that are long or costly in CEL (sums over sections, Redis's memory, GPUs), and
rules for clusters only (a claim, absolute paths).

The API server keeps an object without its defaults, so a rule reads a field that may be missing with
``.?field.orDefault()``. That is not CEL: ``with_defaults`` puts the model's default in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from plaudit_job.spec.reward_service import FIXED_SECTIONS
from plaudit_job.spec.rewards import KINDS, kinds_with
from plaudit_job.spec.rljob import TRAINING_SECTIONS

CelRule = dict[str, str]


def _rule(rule: str, message: str) -> CelRule:
    return {"rule": rule, "message": message}


def _rules(*texts: str) -> list[CelRule]:
    """Return rules, given as expression and message in turn."""
    return [_rule(rule, message) for rule, message in zip(texts[::2], texts[1::2], strict=True)]


_OPAQUE_TO_CEL = ("ruleArguments",)
"""Objects without a schema, which CEL cannot read; ``SpecValid`` checks them."""


def _exactly_one(*fields: str) -> str:
    return f"[{', '.join(f'has(self.{field})' for field in fields)}].filter(given, given).size() == 1"


def _field_rules() -> Iterator[CelRule]:
    fields = dict.fromkeys(field for traits in KINDS.values() for field in traits.fields)
    for field in fields:
        if field not in _OPAQUE_TO_CEL:
            kinds = kinds_with(field)
            reads = " || ".join(f"self.kind == '{kind}'" for kind in kinds)
            yield _rule(
                f"{reads} || !has(self.{field})",
                f"{field} applies to kind {' or '.join(kinds)} only: set kind to {kinds[0]}, or remove {field}",
            )


_TRAINS = "(has(self.rollout) || has(self.trainer))"
_ONE_SERVICE = _rules(
    "(self.?name.orDefault() != '') != (self.?url.orDefault() != '')",
    "give exactly one of name and url",
    "self.?url.orDefault() == '' || has(self.tokenSecret)",
    "with url tokenSecret is required",
)
_PYTHON = (
    "self.?kind.orDefault() != 'python' || (has(self.path) && has(self.function))",
    "kind python needs path and function",
)
RULES: dict[str, list[CelRule]] = {
    "": [
        *(
            _rule(f"!{_TRAINS} || has(self.{name})", f"{name} is missing; a job with rollout or trainer requires it")
            for name in TRAINING_SECTIONS
        ),
        *(
            _rule(f"{_TRAINS} || !has(self.{name})", f"{name} is unused in a job without rollout and trainer")
            for name in ("model", "data", "algorithm")
        ),
    ],
    "algorithm": _rules(
        "self.?promptsPerStep.orDefault() % self.?miniBatchesPerStep.orDefault() == 0",
        "promptsPerStep must be a multiple of miniBatchesPerStep",
        "self.?order.orDefault() == 'step' || self.?maxStaleness.orDefault() > 0",
        "order ready trains groups across steps: set maxStaleness to 1 or more",
        "self.?samplesPerPrompt.orDefault() > 1 || self.?advantage.orDefault() == 'reinforcePlusPlus'",
        "with samplesPerPrompt 1 a group has nothing to compare: give at least 2, or advantage reinforcePlusPlus",
    ),
    "algorithm.loss": _rules(
        "!has(self.clipRatioC) || self.clipRatioC == 0.0 || self.clipRatioC > 1.0",
        "clipRatioC must be more than 1, or 0 for no bound",
        *_PYTHON,
        "self.?correctionFloor.orDefault() <= self.?correctionCap.orDefault()",
        "correctionFloor must not be more than correctionCap",
        "self.?correction.orDefault() != 'tis' || self.?correctionFloor.orDefault() == 0.0",
        "correction tis has no floor: set correction to decoupled or reject, or remove correctionFloor",
    ),
    "data.train": _rules(_exactly_one("path", "mixture", "tasks"), "give exactly one of path, mixture and tasks"),
    "data.validation": _rules(_exactly_one("path", "tasks"), "give exactly one of path and tasks"),
    "rollout": _rules(
        "!has(self.groups) || self.groups.size() == 0 || self.?replicas.orDefault() == 1",
        "replicas counts workers without groups: give each group replicas",
        "!has(self.groups) || self.groups.size() == 0 || self.groups.exists(group, group.?replicas.orDefault() > 0)",
        "groups have no replicas at all: give one of them at least 1, or set spec.suspend",
        "self.?engine.?kind.orDefault() != 'vllm' || (self.?engine.?tensorParallelSize.orDefault() * "
        "self.?engine.?pipelineParallelSize.orDefault()) % self.?podsPerReplica.orDefault() == 0 || "
        "(has(self.groups) && self.groups.size() > 0)",
        "podsPerReplica must divide tensorParallelSize × pipelineParallelSize, so that every pod has as many GPUs",
    ),
    "rollout.sampling": _rules(
        "!has(self.temperature) || self.temperature > 0.0", "with temperature 0 all samples of a group are the same"
    ),
    "rollout.agent": _rules(
        "self.?kind.orDefault() != 'tools' || (has(self.tools) && self.tools.size() > 0)",
        "kind tools needs tools: [{path: …, function: …}]",
        "self.?kind.orDefault() != 'custom' || (has(self.path) && has(self.class))",
        "kind custom needs path and class",
        "self.?kind.orDefault() != 'endpoint' || has(self.path) || has(self.command)",
        "kind endpoint needs path, path with function, or command",
        "!has(self.function) || has(self.path)",
        "function names a function in path: give path as well",
        "!has(self.function) || !has(self.command)",
        "give at most one of function and command",
        "self.?kind.orDefault() != 'environment' || "
        "[has(self.path) && has(self.class), has(self.url), has(self.environment)]"
        ".filter(given, given).size() == 1",
        "kind environment needs exactly one of path and class, url, and environment",
    ),
    "environments[]": _rules(
        "has(self.image) || has(self.command) || (has(self.pod) && has(self.pod.image))",
        "an environment needs image or command",
    ),
    "rollout.agent.tools[]": _rules(
        "has(self.path) == has(self.function)",
        "path and function belong together: give both",
        _exactly_one("path", "config", "mcp", "sandbox"),
        "give exactly one of path with function, config, mcp and sandbox",
    ),
    "rollout.agent.tools[].mcp": _rules("has(self.url) != has(self.command)", "give exactly one of url and command"),
    "reward.scorers[]": [
        *(
            _rule(f"self.kind != '{kind}' || has(self.{section})", f"kind {kind} needs the section {section}")
            for kind, traits in KINDS.items()
            if (section := traits.section)
        ),
        *_field_rules(),
        *_rules("!has(self.when) || self.when.scorer != self.name", "when must name a scorer earlier in the list"),
    ],
    **dict.fromkeys(("reward.scorers[].service", "reward.gateway.canary.service"), _ONE_SERVICE),
    "reward.scorers[].judge": _rules(
        "(self.?baseUrl.orDefault() != '') != has(self.serve)",
        "give exactly one of baseUrl and serve",
        "has(self.serve) || self.?model.orDefault() != ''",
        "with baseUrl model is required",
        "!has(self.serve) || !(has(self.model) || has(self.apiKeySecret))",
        "model and apiKeySecret are of an endpoint, but the job serves the judge: remove them",
    ),
    "reward.scorers[].judge.parse": _rules(
        _exactly_one("regex", "jsonPath", "python"), "give exactly one of regex, jsonPath and python"
    ),
    "reward.combine": _rules(*_PYTHON),
    "reward.workers.autoscaling": _rules(
        "self.?minReplicas.orDefault() <= self.?maxReplicas.orDefault()",
        "minReplicas must not be more than maxReplicas",
    ),
    "scheduling": _rules(
        "self.?gang.orDefault() == 'none' || self.?queueName.orDefault() == ''",
        "gang cannot be combined with queueName: remove gang, a queue also admits the pods together",
    ),
    "trainer": _rules(
        "self.?strategy.orDefault() != 'single' || self.?ranks.orDefault() == 1",
        "strategy single runs one process: set strategy to fsdp2, or ranks to 1",
        "self.?ranks.orDefault() <= self.?ranksPerPod.orDefault() || "
        "self.?ranks.orDefault() % self.?ranksPerPod.orDefault() == 0",
        "ranks must be a multiple of ranksPerPod, so that every pod has the same number",
    ),
    "transport": _rules(
        "self.?url.orDefault() != '' || !(has(self.username) || has(self.passwordSecret) || has(self.tls))",
        "username, passwordSecret and tls apply to an external Redis only: give url, or remove them",
        "!has(self.url) || !self.url.contains('@')",
        "url contains a user or a password: name the password's Secret in passwordSecret instead",
    ),
    "lifecycle.failurePolicy.rules[]": _rules(
        "has(self.onExitCodes) != (has(self.onReasons) && self.onReasons.size() > 0)",
        "give exactly one of onExitCodes and onReasons",
    ),
    "lifecycle.failurePolicy.backoff": _rules(
        "self.?initialSeconds.orDefault() <= self.?maxSeconds.orDefault()",
        "initialSeconds must not be more than maxSeconds",
    ),
    "files": _rules(
        "!has(self.items) || self.?configMap.orDefault() != ''", "items are listed, but configMap is empty"
    ),
    "storage": _rules(
        "!has(self.mountPath) || self.mountPath != '/'", "mountPath must not be the root of the container"
    ),
}
"""CEL rules by path under ``spec`` (``[]``: each item of a list)."""
_POD_RULES = {
    "pod.env[]": _rules("!has(self.valueFrom) || !has(self.value)", "give one of value and valueFrom"),
    "pod.env[].valueFrom": _rules(
        _exactly_one("secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef"),
        "give exactly one of secretKeyRef, configMapKeyRef, fieldRef and resourceFieldRef",
    ),
}
"""CEL rules of every ``pod`` section, by the end of the path."""


def rules_at(path: str, node: Mapping[str, Any], sections: Mapping[str, Any]) -> list[CelRule]:
    """Return the rules in CEL of the field at a path under ``spec``, whose JSON Schema is ``node``, with defaults."""
    of_pods = (rule for end in _POD_RULES if path.endswith(f".{end}") for rule in _POD_RULES[end])
    return [_filled(rule, node, sections) for rule in (*RULES.get(path, []), *of_pods)]


def _filled(rule: CelRule, node: Mapping[str, Any], sections: Mapping[str, Any]) -> CelRule:
    return _rule(with_defaults(rule["rule"], node, sections), rule["message"])


_DEFAULT = re.compile(r"(\w+)((?:\.\??\w+)+)\.orDefault\(\)")
_ITEM = re.compile(r"(?:self|oldSelf)((?:\.\??\w+)+)\.(?:all|exists|exists_one|filter|map)\((\w+),")
"""A list of the object, and the variable that stands for one of its items."""


def with_defaults(rule: str, node: Mapping[str, Any], sections: Mapping[str, Any]) -> str:
    """Replace every ``orDefault()`` by the default of the field before it; raise ``ValueError`` if it has none."""
    roots = {"self": node, "oldSelf": node}
    for chain, variable in _ITEM.findall(rule):
        roots[variable] = _resolved(_field(node, chain, sections).get("items", {}), sections)

    def filled(match: re.Match[str]) -> str:
        root, chain = match.groups()
        field = _field(roots.get(root, {}), chain, sections)
        if "default" not in field:
            raise ValueError(f"{root}{chain} has no default: the rule {rule!r} must ask for it with has()")
        return f"{root}{chain}.orValue({_literal(field)})"

    return _DEFAULT.sub(filled, rule)


def _field(node: Mapping[str, Any], chain: str, sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON Schema of ``.a.?b`` below a node."""
    for name in re.findall(r"\w+", chain):
        if name not in node.get("properties", {}):
            raise ValueError(f"a rule reads {chain}, but there is no field {name}")
        node = _resolved(node["properties"][name], sections)
    return node


def _resolved(node: Mapping[str, Any], sections: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**sections[node["$ref"].removeprefix("#/$defs/")], **node} if "$ref" in node else node


def _literal(field: Mapping[str, Any]) -> str:
    """Return the default of a text, a number or a flag as CEL writes it."""
    match field["default"]:
        case str(text):
            return f"'{text}'"
        case bool(flag):
            return str(flag).lower()
        case int() | float() as number:
            return str(float(number) if field.get("type") == "number" else number)
        case other:
            raise ValueError(f"a rule cannot hold the default {other!r}")


def immutability_rules(sections: Mapping[str, Any]) -> list[CelRule]:
    """Return transition rules on ``spec``: a field that is not marked mutable cannot change, appear or disappear."""
    rules = [
        _rule(_unchanged(path), f"spec.{path} cannot change while the job exists")
        for path in _immutable(sections["Spec"], sections)
    ]
    message = "spec.rollout.groups cannot be added, removed or moved while the job exists"
    rules.append(_rule(_unchanged("rollout.groups", ".map(group, group.name)"), message))
    names = "self.reward.scorers.map(scorer, scorer.name) == oldSelf.reward.scorers.map(scorer, scorer.name)"
    rules.append(_rule(names, "spec.reward.scorers cannot be added, removed or moved while the job exists"))
    rules += [_rule(f"{_NO_GANG} || {same}", _GANG_MESSAGE) for same in (_SAME_REPLICAS, _SAME_GROUPS)]
    return [_filled(rule, sections["Spec"], sections) for rule in rules]


_GANG_MESSAGE = "spec.rollout.replicas cannot change while the job exists: it is part of a gang"
_NO_GANG = (
    "!has(self.scheduling) || "
    "(self.scheduling.?gang.orDefault() == 'none' && self.scheduling.?queueName.orDefault() == '')"
)
_SAME_REPLICAS = "self.?rollout.?replicas.orDefault() == oldSelf.?rollout.?replicas.orDefault()"
_SAME_GROUPS = (
    "!has(self.rollout) || !has(self.rollout.groups) || !has(oldSelf.rollout) || !has(oldSelf.rollout.groups) || "
    "self.rollout.groups.all(group, oldSelf.rollout.groups.exists(old, old.name == group.name && "
    "old.?replicas.orDefault() == group.?replicas.orDefault()))"
)


def _unchanged(path: str, part: str = "") -> str:
    """Return CEL for: absent in both, or equal (or equal in a part, such as ``.map(item, item.name)``).

    With optionals the API server cannot estimate the cost of the rule.
    """
    parts = path.split(".")
    ways = [".".join(parts[: i + 1]) for i in range(len(parts))]
    now, before = (" && ".join(f"has({root}.{way})" for way in ways) for root in ("self", "oldSelf"))
    return f"({now}) == ({before}) && (!({now}) || self.{path}{part} == oldSelf.{path}{part})"


def service_rules() -> list[CelRule]:
    """Return the transition rules on the ``spec`` of a RewardService."""
    return [_rule(_unchanged(name), f"spec.{name} cannot change while the service exists") for name in FIXED_SECTIONS]


LISTS = {"reward.scorers": "ScorerSpec", "rollout.groups": "RolloutGroupSpec"}
"""Lists with mutable fields in their items, which have names, and the section of an item."""


def item_immutability(section: str, sections: Mapping[str, Any]) -> list[CelRule]:
    """Return transition rules on each item of a list; the API server matches items by name."""
    fields = sections[section]["properties"]
    kind = {"ScorerSpec": "a scorer", "RolloutGroupSpec": "a rollout group"}[section]
    return [
        _rule(_unchanged(name), f"{name} of {kind} cannot change while the job exists")
        for name, field in fields.items()
        if name != "name" and not field.get("x-plaudit-mutable")
    ]


def _immutable(section: Mapping[str, Any], sections: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the topmost fields below which nothing may change."""
    for name, field in section["properties"].items():
        here = f"{path}.{name}".lstrip(".")
        if field.get("x-plaudit-mutable") or here in LISTS:
            continue
        inner = sections.get(field.get("$ref", "").removeprefix("#/$defs/"))
        if inner and _has_mutable(inner, sections):
            yield from _immutable(inner, sections, here)
        else:
            yield here


def _has_mutable(section: Mapping[str, Any], sections: Mapping[str, Any]) -> bool:
    for field in section.get("properties", {}).values():
        reference = field.get("$ref") or field.get("items", {}).get("$ref", "")
        inner = sections.get(reference.removeprefix("#/$defs/"), {})
        if field.get("x-plaudit-mutable") or _has_mutable(inner, sections):
            return True
    return False
