"""Every rule of a job, broken once: what is said names the field, the value and the remedy."""

from typing import Any
from urllib.parse import urlsplit

import pytest

from plaudit_job.problem import Problem
from plaudit_job.rules.scorers import is_private
from small_job import changed, problems_of

RULE = {"name": "first", "kind": "rule"}
PYTHON = {"name": "second", "kind": "python", "python": {"path": "r.py"}}
JUDGE = {"baseUrl": "https://judge/v1", "model": "big", "promptTemplate": {"path": "j.j2"}, "parse": {"regex": "(.)"}}
WORLD = {"name": "world", "kind": "environment"}
PER_TURN: dict[str, Any] = {
    "algorithm.advantagePer": "turn",
    "rollout.agent": {"kind": "environment", "path": "w.py", "class": "World"},
    "reward.scorers": [WORLD],
}
SLEEPING = {"source": "some/rm", "sleepDuringUpdates": True, "arguments": {"middleware": "a.b"}}
GPUS = {"resources": {"limits": {"nvidia.com/gpu": 3}}}

SINGLE_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"seed": -1}, "spec.seed: -1 is not at least 0. Give a number at least 0"),
    ({"seed": True}, "spec.seed: True is not a whole number. Write digits without quotes"),
    ({"algorithm.steps": "100"}, "spec.algorithm.steps: '100' is not a whole number. Write digits without quotes"),
    ({"algorithm.steps": 1.5}, "spec.algorithm.steps: 1.5 is not a whole number. Write digits without quotes"),
    ({"algorithm.steps": None, "algorithm.seed": 1}, "spec.algorithm.steps: is missing. Add steps: …"),
    (
        {"algorithm.promptPerStep": 8},
        "spec.algorithm.promptPerStep: is not a field of this section. Did you mean promptsPerStep? Fields here: ",
    ),
    (
        {"algorithm.prompts_per_step": 8},
        "spec.algorithm.prompts_per_step: is not a field of this section. Did you mean",
    ),
    (
        {"rollout.sampling": {"minP": 0.1}},
        "spec.rollout.sampling.minP: is not a field of this section. The trainer could not reproduce it; validation "
        "may use it: spec.data.validation.sampling.minP",
    ),
    (
        {"rollout.sampling": {"maxTokens": 8, "ignoreEos": True}, **PER_TURN},
        "spec.rollout.sampling.ignoreEos: is set, but agent kind environment has turns, which would all go on to",
    ),
    (
        {"algorithm": {"steps": 1, "maskTruncated": True, "filterTruncated": True}},
        "spec.algorithm.filterTruncated: and maskTruncated are both set. Remove one: maskTruncated keeps",
    ),
    (
        {"data.validation": {"path": "v.jsonl", "sampling": {"minTokens": 9}}, "rollout.sampling": {"maxTokens": 8}},
        "spec.data.validation.sampling.minTokens: is 9, above the 8 tokens that a response may have. Lower it",
    ),
    ({"algorithm.order": "soon"}, "spec.algorithm.order: 'soon' is not supported. Give 'step' or 'ready'"),
    (
        {"algorithm.loss": {"clipLow": 1.0}},
        "spec.algorithm.loss.clipLow: 1.0 is not below 1.0. Give a number below 1.0",
    ),
    (
        {"algorithm.optimizer": {"learningRate": float("nan")}},
        "spec.algorithm.optimizer.learningRate: nan is not a finite number. Give a finite number",
    ),
    ({"model.source": ""}, "spec.model.source: is empty. Give a value"),
    ({"model.dtype": "fp8"}, "spec.model.dtype: 'fp8' is not supported. Give 'bfloat16', 'float16' or 'float32'"),
    ({"model.trustRemoteCode": "yes"}, "spec.model.trustRemoteCode: 'yes' is not true or false. Write true or false"),
    ({"rollout": []}, "spec.rollout: [] is not a mapping. Write {key: value}"),
    ({"rollout.sampling": {"topP": 0}}, "spec.rollout.sampling.topP: 0 is not above 0.0. Give a number above 0.0"),
    ({"reward.scorers": {}}, "spec.reward.scorers: {} is not a list. Write [a, b]"),
    ({"reward.scorers": []}, "spec.reward.scorers: is empty. Give at least one: - {name: …, kind: rule|python|"),
    (
        {"reward.scorers.0.name": "Digits!"},
        "spec.reward.scorers[0].name: 'Digits!' is not a valid name. Use a-z, 0-9, '-' and '_', for example",
    ),
    ({"reward.scorers.0.name": "d" * 21}, "has 21 characters. Give at most 20"),
    (
        {"reward.scorers.0.kind": "pyton"},
        "spec.reward.scorers[0].kind: 'pyton' is not supported. Give 'rule', 'python', 'judge', 'http', 'service', "
        "'model', 'environment' or 'verifier'",
    ),
    (
        {"reward.scorers.0.python.function": "a b"},
        "'a b' is not the name of a Python function. Give the name as the file defines it",
    ),
    (
        {"transport": {"url": "http://x"}},
        "spec.transport.url: 'http://x' is not the URL of a Redis. Write redis://host:port/0, or rediss:// for",
    ),
    ({"transport": {"managed": {"memory": "4GB"}}}, "'4GB' is not a number of bytes. Write it like 512Mi or 4Gi"),
    ({"storage": {"mountPath": "here"}}, "spec.storage.mountPath: 'here' is not an absolute path. Start it with /"),
    (
        {"trainer.pod": {"resources": {"limits": {"cpu": [1]}}}},
        "spec.trainer.pod.resources.limits.cpu: [1] is not text or a whole number. Write it like 4, 500m or 16Gi",
    ),
    ({"metrics": {"rewardLatency": {"target": 1.0}}}, "spec.metrics.rewardLatency.target: 1.0 is not below 1.0"),
]

RULES: list[tuple[dict[str, Any], str]] = [
    (
        {"trainer": None},
        "spec.trainer: is missing; a job with rollout or trainer requires it. Add trainer: {} for its defaults,",
    ),
    (
        {"rollout": None},
        "spec.rollout: is missing; a job with rollout or trainer requires it. Add rollout: {} for its defaults,",
    ),
    ({"model": None}, "spec.model: is missing; a job with rollout or trainer requires it. Add model: {source: …}"),
    (
        {"rollout": None, "trainer": None, "data": None, "algorithm": None},
        "spec.model: is unused in a job without rollout and trainer. Add rollout: {} and trainer: {} to train,",
    ),
    (
        {"algorithm.promptsPerStep": 10, "algorithm.miniBatchesPerStep": 4},
        "spec.algorithm.promptsPerStep: 10 is not a multiple of miniBatchesPerStep 4. Give a multiple of 4, such",
    ),
    (
        {"algorithm.order": "ready"},
        "spec.algorithm.order: order ready trains groups across steps, but maxStaleness is 0. Set maxStaleness",
    ),
    (
        {"algorithm.loss": {"correctionFloor": 0.5}},
        "spec.algorithm.loss.correctionFloor: is 0.5, but correction tis truncates weights above the cap only and has "
        "no floor. Set correction to decoupled or reject",
    ),
    (
        {"algorithm.loss": {"klIn": "reward"}},
        "spec.algorithm.loss.klIn: is reward, but klCoefficient is 0",
    ),
    (
        {"algorithm.loss": {"klIn": "reward", "klCoefficient": 0.1}, "algorithm.advantage": "reinforcePlusPlus"},
        "spec.algorithm.loss.klIn: is reward, but under advantage reinforcePlusPlus each token would have",
    ),
    (
        {"algorithm.loss": {"klCoefficient": 0.1, "adaptiveKl": {}}},
        "spec.algorithm.loss.adaptiveKl: changes the coefficient of a divergence in the reward, but klIn is loss",
    ),
    (
        {"algorithm.dynamicSampling": {}, "algorithm.advantage": "reinforcePlusPlus"},
        "spec.algorithm.dynamicSampling: drops groups with equal scores, but under advantage reinforcePlusPlus they",
    ),
    (
        PER_TURN | {"rollout.agent": {"kind": "singleTurn"}},
        "spec.algorithm.advantagePer: is turn, but agent kind singleTurn has no rewards of turns. Remove advantagePer",
    ),
    (
        PER_TURN | {"reward.scorers": [{**WORLD, "weight": 0}, RULE]},
        "spec.algorithm.advantagePer: is turn, but no scorer makes the environment's reward a part of the sample's.",
    ),
    (
        PER_TURN | {"reward.combine": {"kind": "python", "path": "r.py", "function": "f"}},
        "spec.algorithm.advantagePer: is turn, which subtracts rewards of turns from the sample's, but combine.kind",
    ),
    (
        PER_TURN | {"reward.combine": {"normalize": "group"}, "algorithm.advantage": "drGrpo"},
        "spec.algorithm.advantagePer: is turn, which subtracts rewards of turns from the sample's, but combine.norm",
    ),
    (
        PER_TURN | {"algorithm.loss": {"klIn": "reward", "klCoefficient": 0.1}},
        "spec.algorithm.advantagePer: is turn, but klIn: reward lowers the reward of whole samples: a turn would pay",
    ),
    (
        PER_TURN | {"algorithm.dynamicSampling": {}},
        "spec.algorithm.advantagePer: is turn, but dynamicSampling drops groups with equal scores, whose turns may",
    ),
    (
        {"algorithm.dynamicSampling": {"maxFactor": 1.5}, "algorithm.promptsPerStep": 1},
        "spec.algorithm.dynamicSampling.maxFactor: 1.5 allows no further prompt beside 1. Give at least 2",
    ),
    (
        {"trainer.lora": {}, "rollout.inFlight": "recompute"},
        "spec.rollout.inFlight: is recompute, but with trainer.lora samples finish under the adapter that began them.",
    ),
    (
        {"trainer.lora": {}, "trainer.weights": {"transfer": "direct"}},
        "spec.trainer.weights.transfer: is direct, but with trainer.lora only adapters of a few megabytes are",
    ),
    (
        {"trainer.lora": {}, "trainer.weights": {"fullEvery": 10}},
        "spec.trainer.weights.fullEvery: is 10, but with trainer.lora only adapters of a few megabytes are published",
    ),
    (
        {"trainer.weights": {"transfer": "direct", "fullEvery": 10}},
        "spec.trainer.weights.fullEvery: is 10, but with transfer: direct rollouts receive every version whole",
    ),
    (
        {"rollout.podsPerReplica": 2, "rollout.engine": {"tensorParallelSize": 2, "pipelineParallelSize": 2}}
        | {"trainer.weights": {"fullEvery": 10}},
        "spec.trainer.weights.fullEvery: is 10, but the pods of a rollout replica read whole weights from the run's",
    ),
    (
        {"rollout.podsPerReplica": 2, "rollout.engine": {"tensorParallelSize": 2, "pipelineParallelSize": 2}}
        | {"trainer.weights": {"transfer": "direct"}},
        "spec.trainer.weights.transfer: is direct, but a rollout replica of several pods reads its weights from files.",
    ),
    (
        {"algorithm.samplesPerPrompt": 1},
        "spec.algorithm.samplesPerPrompt: with 1, a group has nothing to compare and advantage grpo is always 0.",
    ),
    (
        {"algorithm.samplesPerPrompt": 4, "reward.minSamplesPerGroup": 5},
        "spec.reward.minSamplesPerGroup: 5 is more than samplesPerPrompt 4, so every group would be dropped.",
    ),
    (
        {"rollout.engine": {"maxModelLength": 2000}},
        "spec.rollout.engine.maxModelLength: 2000 is less than maxPromptLength 1024 + maxTokens 1024 = 2048. Give at",
    ),
    (
        {"data.validation": {"path": "v.jsonl", "sampling": {"maxTokens": 4000}}},
        "spec.rollout.engine.maxModelLength: 4096 is less than maxPromptLength 1024 + validation's maxTokens 4000",
    ),
    (
        {"rollout.sampling": {"temperature": 0}},
        "spec.rollout.sampling.temperature: with 0, all samples of a group are the same and nothing is learned.",
    ),
    (
        {"reward.scorers": [RULE, {**RULE, "name": "second", "audit": {}}], "metrics.keepSamples": False},
        "spec.reward.scorers[1].audit: reads stored samples, but metrics.keepSamples is false. Remove keepSamples",
    ),
    (
        {"reward.scorers": [{"name": "world", "kind": "environment"}]},
        "spec.rollout.agent.kind: is singleTurn: no environment gives the reward that scorer 'world' (kind environment)"
        " passes on, so it would skip every sample. Choose agent kind environment, tools, endpoint or custom",
    ),
    (
        {
            "reward.scorers": [{"name": "world", "kind": "environment"}],
            "rollout.agent": {"kind": "tools", "toolParser": "hermes", "tools": [{"sandbox": "bash"}]},
        },
        "spec.rollout.agent.kind: is tools: no tool of kind sandbox or mcp gives the reward that scorer 'world' (kind "
        "environment) passes on, so it would skip every sample. Add a tool that returns a reward",
    ),
    (
        {"rollout.agent": {"kind": "tools"}},
        "spec.rollout.agent.tools: is empty; kind tools requires it. List the tools: [{path: …, function: …}]",
    ),
    (
        {"rollout.agent": {"tools": [{"path": "tools.py", "function": "search"}]}},
        "spec.rollout.agent.kind: is missing, and without it samples have a single turn without tools or environment",
    ),
    (
        {"rollout.agent": {"kind": "custom", "path": "a.py"}},
        "spec.rollout.agent.path: or class is missing; kind custom requires both. Give path: … and class: …",
    ),
    (
        {"rollout.agent": {"kind": "endpoint"}},
        "spec.rollout.agent.path: and command are missing. Give path: …, path: … with function: …, or command: […]",
    ),
    (
        {"rollout.agent": {"kind": "endpoint", "command": ["agent"], "function": "run"}},
        "spec.rollout.agent.path: is missing; function names a function in it. Give path: …",
    ),
    (
        {"rollout.agent": {"kind": "endpoint", "path": "a.py", "command": ["agent"], "function": "run"}},
        "spec.rollout.agent.command: and function are both given. Give command: […] or function: …",
    ),
    (
        {"rollout.agent": {"kind": "environment", "url": "localhost:8000"}},
        "spec.rollout.agent.url: 'localhost:8000' is not a URL. Start it with http:// or https://",
    ),
    (
        {"rollout.agent": {"kind": "environment", "path": "a.py", "class": "A", "url": "http://a:8000"}},
        "spec.rollout.agent.path: with class, url or environment is required for kind environment; exactly one of "
        "them. Give path: … and class: …, or url: …, or environment: …",
    ),
    (
        {"rollout.agent": {"kind": "environment", "environment": "box"}, "environments": [{"name": "a", "image": "b"}]},
        "spec.rollout.agent.environment: names 'box'; spec.environments has a. Name one of spec.environments",
    ),
    (
        {"environments": [{"name": "a", "image": "b"}, {"name": "a", "command": ["c"]}]},
        "spec.environments[1].name: 'a' is used twice. Give each environment its own name",
    ),
    (
        {"environments": [{"name": "a"}]},
        "spec.environments[0].image: and command are missing. Give image: …, command: […] or both",
    ),
    (
        {"data.images": {}, "rollout.agent": {"kind": "environment", "path": "w.py", "class": "World"}},
        "spec.rollout.agent.kind: is environment: agents continue prompts of text, and data.images is set. Set it to "
        "singleTurn, or remove data.images",
    ),
    (
        {"data.images": {}, "rollout.engine": {"kind": "scripted"}},
        "spec.rollout.engine.kind: is scripted, which has no processor of images, and data.images is set. Set it to "
        "vllm, or remove",
    ),
    (
        {"data.images": {}, "trainer.lora": {"rank": 8}},
        "spec.trainer.lora: trains adapters, which vLLM does not apply to vision towers, and data.images is set. ",
    ),
    (
        {"data.images": {}, "trainer.compile": True},
        "spec.trainer.compile: compiles layers; those of vision towers depend on each image's size, and data.images",
    ),
    (
        {
            "data.images": {},
            "trainer": {"ranks": 4, "strategy": "fsdp2", "sequenceParallelSize": 2},
        },
        "spec.trainer.sequenceParallelSize: is 2: ranks that share a row cannot share its images, and data.images is "
        "set. Set it to 1, or lower data.images.maxPixels, or remove",
    ),
    (
        {"trainer.ranks": 2},
        "spec.trainer.strategy: strategy single runs one process, but ranks is 2. Set strategy to fsdp2, or",
    ),
    (
        {"trainer": {"activationOffload": True, "activationCheckpointing": "none"}},
        "spec.trainer.activationOffload: offloads the inputs of layers, but activationCheckpointing none keeps "
        "everything. Set activationCheckpointing to layers or auto, or remove activationOffload",
    ),
    (
        {"trainer.cpuOffload": True},
        "spec.trainer.cpuOffload: is FSDP2's, which runs with several ranks; strategy is single and ranks is 1. Set",
    ),
    (
        {"rollout.sleepDuringUpdates": True, "trainer.lora": {"rank": 8}},
        "spec.rollout.sleepDuringUpdates: discards the weights of the engine, but with trainer.lora only adapters are "
        "published to load again. Remove sleepDuringUpdates, or lora",
    ),
    (
        {"rollout": {"sleepDuringUpdates": True, "podsPerReplica": 2, "engine": {"tensorParallelSize": 2}}},
        "spec.rollout.sleepDuringUpdates: is not supported for replicas of several pods. Remove",
    ),
    (
        {"reward.scorers": [{"name": "rm", "kind": "model", "model": SLEEPING}]},
        "spec.reward.scorers[0].model.arguments.middleware: is set by sleepDuringUpdates. Remove middleware, or",
    ),
    (
        {"trainer": {"ranks": 12, "strategy": "fsdp2"}},
        "spec.trainer.ranks: 12 is not a multiple of ranksPerPod 8. Give a multiple, so that every pod has the",
    ),
    (
        {"trainer": {"ranks": 4, "strategy": "fsdp2", "fsdpSize": 3}},
        "spec.trainer.fsdpSize: is 3, which does not divide the number of ranks 4. Set ranks to a multiple of 3",
    ),
    (
        {"trainer": {"ranks": 4, "strategy": "fsdp2", "sequenceParallelSize": 8}},
        "spec.trainer.sequenceParallelSize: is 8, which does not divide the number of ranks 4. Set ranks to a",
    ),
    (
        {"trainer.pod": GPUS},
        "spec.trainer.pod.resources.limits: nvidia.com/gpu: 3 contradicts ranks of a pod 1. Give 1 (0 for a",
    ),
    (
        {"rollout.pod": GPUS},
        "spec.rollout.pod.resources.limits: nvidia.com/gpu: 3 contradicts tensorParallelSize 1. Give 1 (0 for a",
    ),
    (
        {"transport": {"managed": {"memory": "16Mi"}}},
        "spec.transport.managed.memory: 16Mi is too little for 512 samples in flight",
    ),
    (
        {"transport": {"managed": {"memory": "400Mi"}}, "rollout": {"sampling": {"maxTokens": 28_000}}},
        "spec.transport.managed.memory: 400Mi is too little for 512 samples in flight (0.23 GiB)",
    ),
    (
        {"transport": {"url": "redis://:secret@host:6379/0"}},
        "spec.transport.url: contains a user or a password, which would end up in the run's folder and in logs.",
    ),
    (
        {"transport": {"url": "redis://redis.example.com:6379/0", "passwordSecret": {"name": "redis", "key": "p"}}},
        "spec.transport.url: 'redis://redis.example.com:6379/0' would carry the password of passwordSecret unencrypted "
        "over a network. Write rediss://",
    ),
    (
        {"transport": {"passwordSecret": {"name": "redis", "key": "password"}}},
        "spec.transport.passwordSecret: applies to an external Redis only, but url is empty. Give url, or remove",
    ),
    (
        {"reward.workers": {"autoscaling": {"minReplicas": 4, "maxReplicas": 2}}},
        "spec.reward.workers.autoscaling.minReplicas: 4 is more than maxReplicas 2",
    ),
    ({"files": {"items": [{"key": "a", "path": "b"}]}}, "spec.files.configMap: is empty, but items are listed"),
    (
        {"files": {"configMap": "m", "items": [{"key": "a", "path": "b"}, {"key": "c", "path": "b"}]}},
        "spec.files.items[1].path: 'b' is used twice. Give each file its own path",
    ),
]


SHARED = {"key": "k", "passwordSecret": {"name": "limits", "key": "password"}}


def judge(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "j", "kind": "judge", "judge": {**JUDGE, **changes}}]


def judged(parse: dict[str, Any], **judge: Any) -> dict[str, Any]:
    return {"name": "j", "kind": "judge", "judge": {**JUDGE, "parse": parse, **judge}}


SCORERS: list[tuple[list[dict[str, Any]], str]] = [
    ([RULE, RULE], "spec.reward.scorers[1].name: 'first' is used twice. Give each scorer its own name"),
    (
        [{**RULE, "kind": "python"}],
        "spec.reward.scorers[0].python: is missing; kind python requires it. Add python: {path: rewards.py,",
    ),
    (
        [{**RULE, "kind": "judge"}],
        "spec.reward.scorers[0].judge: is missing; kind judge requires it. Add judge: {baseUrl: …, model: …,",
    ),
    (
        [{**RULE, "kind": "model"}],
        "spec.reward.scorers[0].model: is missing; kind model requires it. Add model: {source: …}",
    ),
    (
        [{**PYTHON, "kind": "rule"}],
        "spec.reward.scorers[0].python: applies to kind python only, but this scorer has kind rule. Set kind to",
    ),
    (
        [{**PYTHON, "rule": "gsm8k"}],
        "spec.reward.scorers[0].rule: applies to kind rule only, but this scorer has kind python. Set kind to",
    ),
    (
        [{**RULE, "rule": "gsm9k"}],
        "spec.reward.scorers[0].rule: there is no rule 'gsm9k'. Did you mean gsm8k? Rules are code, format, ",
    ),
    (
        [{**RULE, "isolation": "inline"}],
        "spec.reward.scorers[0].isolation: applies to kind python only, but this scorer has kind rule. Set kind",
    ),
    (
        [{**RULE, "limits": {}}],
        "spec.reward.scorers[0].limits: applies to kind judge or http only, but this scorer has kind rule. Set kind to",
    ),
    (
        [{**RULE, "audit": {}}],
        "spec.reward.scorers: all audit, so nothing gives a reward. Add a scorer without audit",
    ),
    (
        [RULE, {**PYTHON, "audit": {}, "weight": 0.5}],
        "spec.reward.scorers[1].weight: cannot be combined with audit. Remove it: an auditor is no part of the reward",
    ),
    (
        [RULE, {**PYTHON, "audit": {}, "onFailure": "zero"}],
        "spec.reward.scorers[1].onFailure: cannot be combined with audit. Remove it: a failed audit is counted",
    ),
    (
        [{**RULE, "audit": {}}, PYTHON, {**RULE, "name": "third", "when": {"scorer": "first", "equals": 1}}],
        "spec.reward.scorers[2].when.scorer: 'first' audits: it scores a few groups, after their step. Name a scorer",
    ),
    (
        [RULE, {**PYTHON, "scope": "group", "drift": {}}],
        "spec.reward.scorers[1].drift: scores single samples again, but scope is group. Remove it, or set scope",
    ),
    (
        [RULE, {**PYTHON, "audit": {"share": 1.5}}],
        "spec.reward.scorers[1].audit.share: 1.5 is not at most 1.0. Give a number",
    ),
    (
        [{**RULE, "when": {"scorer": "second", "equals": 1}}, PYTHON],
        "spec.reward.scorers[0].when.scorer: 'second' is not an earlier scorer in the list (earlier: none, this",
    ),
    (
        [{**PYTHON, "scope": "group"}, {**RULE, "when": {"scorer": "second", "equals": 1}}],
        "spec.reward.scorers[1].when.scorer: 'second' scores groups, after all their samples are scored. Name a",
    ),
    (
        [RULE, {**PYTHON, "scope": "group", "when": {"scorer": "first", "equals": 1}}],
        "spec.reward.scorers[1].when: selects single samples, but scope is group. Remove when, or set scope to",
    ),
    (
        [{**RULE, "scope": "group"}],
        "spec.reward.scorers[0].scope: kind rule scores one sample at a time and cannot have scope group. Set",
    ),
    (
        [{"name": "j", "kind": "judge", "judge": {**JUDGE, "parse": {}}}],
        "spec.reward.scorers[0].judge.parse: needs exactly one of jsonPath, regex and python, but has none. Give",
    ),
    (
        [judged({"jsonPath": "$.a", "range": {"min": 5, "max": 1}})],
        "spec.reward.scorers[0].judge.parse.range: has a min that is not below its max. Give the rubric's numbers",
    ),
    (
        [judged({"jsonPath": "$[0]", "structured": True})],
        "spec.reward.scorers[0].judge.parse.structured: needs a jsonPath of members: the path must begin with a member",
    ),
    (
        [judged({"regex": "(a)", "structured": True})],
        "spec.reward.scorers[0].judge.parse.structured: needs a jsonPath of members: the path must begin with a member",
    ),
    (
        [judged({"jsonPath": "$.a", "structured": True}, arguments={"response_format": {"type": "text"}})],
        "spec.reward.scorers[0].judge.parse.structured: sets response_format, which arguments set, too. Remove one",
    ),
    (
        [{"name": "j", "kind": "judge", "judge": {**JUDGE, "parse": {"regex": "a", "jsonPath": "$.b"}}}],
        "spec.reward.scorers[0].judge.parse: needs exactly one of jsonPath, regex and python, but has regex and",
    ),
    (
        judge(parse={"regex": "score: [0-9]"}),
        "spec.reward.scorers[0].judge.parse.regex: judge.parse.regex 'score: [0-9]' has no group: put the number in",
    ),
    (judge(parse={"regex": "(["}), "spec.reward.scorers[0].judge.parse.regex: judge.parse.regex '([' does not compile"),
    (
        judge(parse={"jsonPath": "score"}),
        "spec.reward.scorers[0].judge.parse.jsonPath: judge.parse.jsonPath 'score' does",
    ),
    (
        judge(baseUrl="https://me:key@judge/v1"),
        "spec.reward.scorers[0].judge.baseUrl: contains a user or a password. Name the key's Secret in",
    ),
    (
        judge(baseUrl="https://judge/v1/chat/completions"),
        "spec.reward.scorers[0].judge.baseUrl: 'https://judge/v1/chat/completions' includes the route. End it",
    ),
    (
        judge(baseUrl="https://judge/v1?key=1"),
        "spec.reward.scorers[0].judge.baseUrl: 'https://judge/v1?key=1' has a query",
    ),
    (
        judge(baseUrl="http://judge.example/v1", apiKeySecret={"name": "judge", "key": "token"}),
        "spec.reward.scorers[0].judge.baseUrl: 'http://judge.example/v1' would carry the key of apiKeySecret",
    ),
    (
        judge(serve={"source": "big/judge"}),
        "spec.reward.scorers[0].judge.baseUrl: needs exactly one of baseUrl and serve, but has both. Give baseUrl and",
    ),
    (
        judge(baseUrl=""),
        "spec.reward.scorers[0].judge: needs exactly one of baseUrl and serve, but has none. Give baseUrl and",
    ),
    (judge(model=""), "spec.reward.scorers[0].judge.model: is missing; with baseUrl it is required. Give"),
    (
        judge(baseUrl="", serve={"source": "big/judge"}),
        "spec.reward.scorers[0].judge.model: names a model at baseUrl, but the job serves the judge. Remove it",
    ),
    (
        judge(baseUrl="", model="", serve={"source": "b/j"}, apiKeySecret={"name": "judge", "key": "token"}),
        "spec.reward.scorers[0].judge.apiKeySecret: is for baseUrl, but the job serves the judge. Remove it",
    ),
    (
        [{**PYTHON, "name": "a_b", "python": {**PYTHON["python"], "serve": {"source": "big/judge"}}}],
        "spec.reward.scorers[0].name: 'a_b' has '_', which the names of a served model's pods cannot have. Use '-'",
    ),
    (
        judge(arguments={"stream": True}),
        "spec.reward.scorers[0].judge.arguments.stream: is set by Plaudit. Remove it; any other member may be set",
    ),
    (
        [{**judge()[0], "limits": {}}],
        "spec.reward.scorers[0].limits: sets no limit. Give requestsPerMinute, tokensPerMinute or concurrency,",
    ),
    (
        [{**judge()[0], "limits": {"concurrency": 1, "shared": {"url": "redis://:secret@r:1/0", "key": "k"}}}],
        "spec.reward.scorers[0].limits.shared.url: contains a user or a password. Name the password's Secret in",
    ),
    (
        [{**judge()[0], "limits": {"concurrency": 1, "shared": {**SHARED, "url": "redis://limits.example:6379/0"}}}],
        "spec.reward.scorers[0].limits.shared.url: 'redis://limits.example:6379/0' would carry the password of",
    ),
    (
        [{**RULE, "weight": 0}],
        "spec.reward.scorers: all have weight 0, so every reward is 0. Give at least one a weight",
    ),
]

COMBINES: list[tuple[dict[str, Any], str]] = [
    (
        {"kind": "python", "path": "c.py"},
        "spec.reward.combine: lacks path or function; kind python requires both. Give path and function",
    ),
    (
        {"path": "c.py"},
        "spec.reward.combine: path and function apply to kind python only, but the kind is weightedSum. Set kind",
    ),
]


@pytest.mark.parametrize(("fields", "words"), SINGLE_FIELDS + RULES)
def test_a_bad_field_is_reported_with_its_value_and_a_remedy(fields: dict[str, Any], words: str) -> None:
    assert_told(problems_of(changed(fields)), words)


@pytest.mark.parametrize(("scorers", "words"), SCORERS)
def test_scorers_that_contradict_are_reported(scorers: list[dict[str, Any]], words: str) -> None:
    assert_told(problems_of(changed({"reward.scorers": scorers})), words)


@pytest.mark.parametrize(("combine", "words"), COMBINES)
def test_a_combination_without_its_function_is_reported(combine: dict[str, Any], words: str) -> None:
    assert_told(problems_of(changed({"reward.combine": combine})), words)


def test_advantages_of_turns_are_accepted_where_turns_have_rewards() -> None:
    assert problems_of(changed(PER_TURN)) == []


def test_a_group_scorer_needs_groups() -> None:
    fields = {
        "reward.scorers": [{**PYTHON, "scope": "group"}],
        "algorithm.samplesPerPrompt": 1,
        "algorithm.advantage": "reinforcePlusPlus",
    }
    assert_told(problems_of(changed(fields)), "spec.reward.scorers[0].scope: group compares samples of a prompt, but")


def assert_told(problems: list[Problem], words: str) -> None:
    told = [str(problem) for problem in problems]
    assert any(words in line for line in told), told
    assert all(problem.message and problem.remedy for problem in problems)


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]", "10.1.2.3", "judge", "judge.models.svc", "j.internal"]
)
def test_a_key_may_travel_over_plain_http_inside_a_machine_or_a_private_network(host: str) -> None:
    assert is_private(urlsplit(f"http://{host}:8000/v1").hostname or "")


@pytest.mark.parametrize("host", ["judge.example", "8.8.8.8", "[2606:4700::1]", "judge.svc.example.com"])
def test_a_key_may_not_travel_over_plain_http_elsewhere(host: str) -> None:
    assert not is_private(urlsplit(f"http://{host}/v1").hostname or "")
