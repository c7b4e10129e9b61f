"""Measure the operator's cost with many RLJobs: a real API server, the operator as a process with the chart's rights.

Each job trains with a reward model and an HPA: 20 children. Nothing but etcd and kube-apiserver runs beside the
operator, in one network with it, so that the figures are of these three: no controller answers a Deployment, and
whatever writes but leases is the operator's. With ``--controllers`` the controller manager and the scheduler run as
well, and pods stay pending for want of a node. Six phases:

- *create*: from the first ``create`` of an RLJob until every child of every job is there, then until the operator rests
- *pods*: the benchmark creates the pods of each job's trainer and Redis, for which the operator otherwise looks now and
  then; until it rests again. With ``--controllers`` they exist already
- *rest*: nothing happens for ``--rest`` seconds; writes as the API server counts them
- *touch*: a label is put on one child of each job, 50 a second: the operator looks at a job at rest and has nothing to
  do. The time of such a reconciliation does not include its time in the queue
- *recovery*: the operator is killed (SIGKILL); of each job one child is deleted, or its image or its number of pods
  changed; another operator, which has to wait until the Lease is over, makes all jobs right again
- *check*: every child of every job is there and owned by it

CPU is read from /proc: of the machine's cores everything that is not operator, API server, etcd or this benchmark is
"all else".

    python benchmarks/operator_scale.py [--jobs 1000] [--rest 60] [--controllers] [--json FILE] [--quick]

Needs what ``make e2e`` needs (tests/cluster/README.md). ``--quick``: 3 jobs, a rest of 5 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from operator_scale_machine import Meter, Server, Turns, memory_mb, times, turns_of

ROOT = Path(__file__).resolve().parents[1]
HARNESS = ROOT / "tests" / "cluster" / "cluster"
sys.path[:0] = [str(ROOT / "tests" / "e2e_cluster")]  # an operator with the chart's rights, as the tests start it

from operator_process import OperatorProcess, kubeconfig_of_the_chart  # noqa: E402
from real_cluster import Cluster  # noqa: E402

from plaudit_operator.runtime.kinds import JOB, STATEFUL_SET, Kind, kind_of  # noqa: E402
from plaudit_operator.runtime.kube import ApiServer, NotFoundError  # noqa: E402

NAMESPACE = "jobs"
CHILDREN = {
    "ConfigMap": 1,
    "Deployment": 4,
    "HorizontalPodAutoscaler": 1,
    "Job": 1,
    "NetworkPolicy": 5,
    "PodDisruptionBudget": 2,
    "Secret": 1,
    "Service": 3,
    "ServiceAccount": 1,
    "StatefulSet": 1,
}
"""Of one job."""
CONTROLLERS = ("kube-controller-manager", "kube-scheduler")
NOT_NEEDED = ("kube-proxy", "coredns", "volumes")
TOUCHES_PER_S = 50
IMAGE = "localhost/none:1"


def rljob(number: int) -> dict[str, Any]:
    """One of the jobs."""
    scorers = [
        {"name": "mine", "kind": "python", "python": {"path": "/plaudit/reward.py"}},
        {"name": "rm", "kind": "model", "model": {"source": "/plaudit/rm"}},
    ]
    scaling = {"provider": "hpa", "minReplicas": 2, "maxReplicas": 8}
    pod = {"resources": {"requests": {"cpu": "1"}}}
    spec = {
        "model": {"source": "/plaudit/model"},
        "data": {"train": {"path": "/plaudit/train.parquet"}},
        "algorithm": {"steps": 100},
        "rollout": {"replicas": 2},
        "reward": {"scorers": scorers, "workers": {"autoscaling": scaling, "pod": pod}},
        "trainer": {},
        "storage": {"claimName": "shared"},
    }
    metadata = {"name": f"job-{number:04}", "namespace": NAMESPACE}
    return {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": metadata, "spec": spec}


def pod_of(kind: Kind, owner: Mapping[str, Any]) -> dict[str, Any]:
    """The pod that the controller of a StatefulSet or Job would create, with a container that nothing starts."""
    metadata, template = owner["metadata"], owner["spec"]["template"]
    controller = {"apiVersion": kind.api_version, "kind": kind.kind, "controller": True}
    controller |= {key: metadata[key] for key in ("name", "uid")}
    about = {"name": f"{metadata['name']}-0", "namespace": NAMESPACE, "labels": template["metadata"]["labels"]}
    account = template["spec"]["serviceAccountName"]
    spec = {"serviceAccountName": account, "containers": [{"name": "main", "image": IMAGE}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**about, "ownerReferences": [controller]}, "spec": spec}


class Scale:
    """The phases, on a cluster that is there.

    Args:
        jobs: how many.
        rest_s: how long nothing happens.
        pids: of the control plane's processes, by name.
        folder: for logs.
    """

    def __init__(self, jobs: int, rest_s: float, pids: dict[str, int], folder: Path) -> None:
        self._names = [f"job-{number:04}" for number in range(jobs)]
        self._rest_s = rest_s
        self._pids = pids
        self._folder = folder
        self._api, self._server = ApiServer("benchmark"), Server()
        self._kubeconfig = folder / "kubeconfig"

    def run(self) -> dict[str, Any]:
        """All phases; what they showed."""
        cluster = Cluster(os.environ["KUBECONFIG"], own=True)
        crd = cluster.run("helm", "template", "plaudit", str(ROOT / "charts" / "plaudit"), "-s", "templates/crd.yaml")
        cluster.kubectl("apply", "--server-side", "-f", "-", text=crd.stdout)
        until("RLJobs are known", lambda: cluster.kubectl("get", "rlj", check=False).returncode == 0, 60)
        cluster.kubectl("create", "namespace", NAMESPACE)
        self._kubeconfig = kubeconfig_of_the_chart(cluster, self._folder)
        found: dict[str, Any] = {}
        with self._operator("first") as operator:
            for phase in (self._create, self._pods, self._rest, self._touch):
                found[phase.__name__.lstrip("_")] = phase(operator)
                print(f"{phase.__name__.lstrip('_')} done", flush=True)
            operator.kill()
        self._damage()
        with self._operator("second") as operator:
            found["recovery"] = self._recover(operator)
        return found | {"check": self._check()}

    @contextlib.contextmanager
    def _operator(self, identity: str) -> Iterator[OperatorProcess]:
        log = self._folder / f"{identity}.log"
        self._began, self._writes = time.monotonic(), self._server.writes()
        operator = OperatorProcess(self._kubeconfig, identity, "", log)
        try:
            until("the operator leads", lambda: operator.leads, 90)
            yield operator
        finally:
            operator.stop()
            warnings = [line for line in log.read_text().splitlines() if "WARN" in line or "ERROR" in line]
            print(f"operator {identity}: {len(warnings)} warnings{': ' if warnings else ''}{''.join(warnings[:1])}")

    def _meter(self, operator: OperatorProcess) -> Meter:
        return Meter({"operator": operator.process.pid, **self._pids, "benchmark": os.getpid()})

    def _create(self, operator: OperatorProcess) -> dict[str, Any]:
        meter, turns = self._meter(operator), turns_of(operator.ask("/metrics")[1])
        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(lambda number: self._api.create(rljob(number)), range(len(self._names))):
                pass
        created = meter.read()
        for kind, each in CHILDREN.items():
            self._await_count(kind, each * len(self._names))
        made = meter.read()
        turns = self._settled(operator) - turns
        rss, most = memory_mb(operator.process.pid)
        jobs, settled = len(self._names), meter.read()
        return {
            "rljobs_created_s": created["wall_s"],
            "until_all_children": made,
            "until_rest": settled,
            "jobs_per_s": jobs / made["wall_s"],
            "objects_per_s": jobs * sum(CHILDREN.values()) / made["wall_s"],
            "operator_cpu_ms_per_job": 1e3 * settled["cpu_s"]["operator"] / jobs,
            "operator_rss_mb": rss,
            "operator_rss_most_mb": most,
            "reconciles": times(turns),
            "reconciles_unchanged": times(turns, "unchanged"),
        }

    def _await_count(self, kind: str, wanted: int) -> None:
        path = kind_of(kind).path(NAMESPACE)
        until(f"{wanted} {kind}s", lambda: self._server.count(path) >= wanted, 1800)

    def _settled(self, operator: OperatorProcess) -> Turns:
        """Wait until the operator changes nothing any more."""
        seen: list[Turns] = []

        def quiet() -> bool:
            metrics = operator.ask("/metrics")[1]
            seen.append(turns_of(metrics))
            changes = [times(turns, "ok")["n"] for turns in seen[-4:]]
            return len(changes) == 4 and changes[0] == changes[-1] and "plaudit_operator_queue_depth 0.0" in metrics

        until("rest", quiet, 600)
        return seen[-1]

    def _pods(self, operator: OperatorProcess) -> dict[str, Any]:
        meter, before = self._meter(operator), self._server.writes()
        made = 0
        if CONTROLLERS[0] not in self._pids:
            pods = [
                pod_of(kind, each) for kind in (STATEFUL_SET, JOB) for each in self._api.list(kind, NAMESPACE, "")[0]
            ]
            with ThreadPoolExecutor(4) as pool:
                made = len(list(pool.map(self._api.create, pods)))
        self._settled(operator)
        writes = sum(n for (_, kind), n in (self._server.writes() - before).items() if kind != "leases")
        return {**meter.read(), "pods": made, "operator_writes": writes - made}

    def _rest(self, operator: OperatorProcess) -> dict[str, Any]:
        meter, before = self._meter(operator), self._server.writes()
        time.sleep(self._rest_s)
        writes = self._server.writes() - before
        leases = sum(count for (_, resource), count in writes.items() if resource == "leases")
        others = {f"{verb} {resource}": n for (verb, resource), n in writes.items() if resource != "leases"}
        return {**meter.read(), "writes": sum(others.values()), "lease_renewals": leases, "written": others}

    def _touch(self, operator: OperatorProcess) -> dict[str, Any]:
        before, turns, began = self._server.writes(), turns_of(operator.ask("/metrics")[1]), time.monotonic()
        meter = self._meter(operator)
        for i, name in enumerate(self._names):
            time.sleep(max(0.0, began + i / TOUCHES_PER_S - time.monotonic()))
            self._patch("Deployment", f"{name}-metrics", {"metadata": {"labels": {"touched": "yes"}}})
        turns = self._settled(operator) - turns
        writes = sum(n for (_, kind), n in (self._server.writes() - before).items() if kind != "leases")
        figures = {"reconciles": times(turns), "reconciles_unchanged": times(turns, "unchanged")}
        return {**meter.read(), **figures, "touches": len(self._names), "operator_writes": writes - len(self._names)}

    def _patch(self, kind: str, name: str, body: dict[str, Any]) -> None:
        self._api.patch(kind_of(kind), NAMESPACE, name, body)

    def _damage(self) -> None:
        """One thing of each job, while no operator is there."""
        deployments = {m["name"]: m["uid"] for m in self._server.metadata(kind_of("Deployment").path(NAMESPACE))}
        services = {m["name"]: m["uid"] for m in self._server.metadata(kind_of("Service").path(NAMESPACE))}
        other_image = {"spec": {"template": {"spec": {"containers": [{"name": "metrics", "image": "localhost/x:1"}]}}}}
        for number, name in enumerate(self._names):
            match number % 4:
                case 0:
                    child = f"{name}-reward"
                    self._api.delete(kind_of("Deployment"), NAMESPACE, child, deployments[child])
                case 1:
                    child = f"{name}-redis"
                    self._api.delete(kind_of("Service"), NAMESPACE, child, services[child])
                case 2:
                    self._patch("Deployment", f"{name}-metrics", other_image)
                case 3:
                    self._patch("Deployment", f"{name}-rollout", {"spec": {"replicas": 7}})

    def _right(self, number: int) -> bool:
        name = self._names[number]
        if number % 4 == 1:
            return self._find("Service", f"{name}-redis") is not None
        child = {0: "reward", 2: "metrics", 3: "rollout"}[number % 4]
        found = self._find("Deployment", f"{name}-{child}")
        if found is None:
            return False
        if number % 4 == 3:
            return bool(found["spec"]["replicas"] == 2)
        return bool(found["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGE)

    def _find(self, kind: str, name: str) -> dict[str, Any] | None:
        with contextlib.suppress(NotFoundError):
            return self._api.get(kind_of(kind), NAMESPACE, name)
        return None

    def _recover(self, operator: OperatorProcess) -> dict[str, Any]:
        leads_s = time.monotonic() - self._began
        meter = self._meter(operator)
        for number in range(len(self._names)):
            until("all jobs right", lambda number=number: self._right(number), 600, 0.2)  # type: ignore[misc]
        right_s = time.monotonic() - self._began
        turns = self._settled(operator)
        writes = sum(n for (_, kind), n in (self._server.writes() - self._writes).items() if kind != "leases")
        rss, most = memory_mb(operator.process.pid)
        return {
            "leads_after_s": leads_s,
            "all_right_after_s": right_s,
            "damaged": len(self._names),
            "writes": writes,
            **meter.read(),
            "operator_rss_mb": rss,
            "operator_rss_most_mb": most,
            "reconciles_unchanged": times(turns, "unchanged"),
        }

    def _check(self) -> dict[str, int]:
        """Jobs whose children are all there, each theirs."""
        jobs = {m["name"]: m["uid"] for m in self._server.metadata(kind_of("RLJob").path(NAMESPACE))}
        held: Counter[tuple[str, str]] = Counter()
        for kind in CHILDREN:
            for metadata in self._server.metadata(kind_of(kind).path(NAMESPACE)):
                for owner in metadata.get("ownerReferences", []):
                    if jobs.get(owner["name"]) == owner["uid"]:
                        held[owner["name"], kind] += 1
        whole = [job for job in jobs if all(held[job, kind] == each for kind, each in CHILDREN.items())]
        return {"jobs": len(jobs), "jobs_with_all_children": len(whole), "children": held.total()}


def until(what: str, holds: Callable[[], bool], seconds: float, every_s: float = 0.5) -> None:
    """Waits until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(every_s)


def table(found: dict[str, Any]) -> Iterator[str]:
    """The figures, for people."""
    create, rest, touch, recovery = (found[phase] for phase in ("create", "rest", "touch", "recovery"))
    made = create["until_all_children"]
    yield f"jobs, children of each            {found['jobs']}, {sum(CHILDREN.values())}"
    yield f"jobs/s, objects/s                 {create['jobs_per_s']:.1f}, {create['objects_per_s']:.0f}"
    yield f"operator CPU a job                {create['operator_cpu_ms_per_job']:.0f} ms"
    yield f"operator memory: now, most        {create['operator_rss_mb']:.0f}, {create['operator_rss_most_mb']:.0f} MB"
    cores = {name: spent / made["wall_s"] for name, spent in made["cpu_s"].items()}
    yield f"cores busy until all children     {', '.join(f'{name} {share:.2f}' for name, share in cores.items())}"
    for phase, row in (("create", create), ("touch", touch)):
        for which in ("reconciles", "reconciles_unchanged"):
            told = row[which]
            name = f"{phase}: {which.replace('_', ', ')}"
            yield f"{name:34}{told['n']:.0f}, p50 {told['p50_ms']:.1f} ms, p95 {told['p95_ms']:.1f} ms"
    yield f"touch: writes of the operator     {touch['operator_writes']}"
    a_look_ms = 1e3 * touch["cpu_s"]["operator"] / touch["reconciles"]["n"]
    yield f"touch: operator CPU a look        {a_look_ms:.1f} ms"
    rested = f"{rest['writes']} in {rest['wall_s']:.0f} s (Lease {rest['lease_renewals']})"
    yield f"rest: writes                      {rested}, operator CPU {rest['cpu_s']['operator']:.2f} s"
    times_ = f"{recovery['all_right_after_s']:.1f} s (leads after {recovery['leads_after_s']:.1f} s)"
    yield f"killed, all jobs right again      {times_}, {recovery['writes']} writes for {recovery['damaged']} damages"
    yield f"jobs with all their children      {found['check']['jobs_with_all_children']}"


def pids_of(state: Path, controllers: bool) -> dict[str, int]:
    """The control plane's processes; those that are not wanted are ended."""
    pids = {path.name: int(path.read_text().split()[0]) for path in (state / "pids" / "hub").iterdir()}
    for name in (*NOT_NEEDED, *(() if controllers else CONTROLLERS)):
        os.kill(pids.pop(name), signal.SIGKILL)
    return {name: pids[name] for name in ("kube-apiserver", "etcd", *CONTROLLERS) if name in pids}


def inside(options: argparse.Namespace) -> None:
    """In the cluster's network: measures, prints, writes."""
    jobs, rest_s = (3, 5.0) if options.quick else (options.jobs, options.rest)
    found = {"jobs": jobs, "children_per_job": sum(CHILDREN.values()), "controllers": options.controllers}
    found["machine"] = {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as folder:
        found |= Scale(jobs, rest_s, pids_of(options.inside, options.controllers), Path(folder)).run()
    print("\n".join(table(found)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def main() -> None:
    """Starts a control plane, measures in its network, ends it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1000, help="RLJobs (default: 1000)")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds in which nothing happens (default: 60)")
    parser.add_argument("--controllers", action="store_true", help="with controller manager and scheduler")
    parser.add_argument("--json", type=lambda text: Path(text).resolve(), help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="a shortened run")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is ended then, too
    with tempfile.TemporaryDirectory() as folder:
        state = ["--state", folder]
        try:
            subprocess.run([HARNESS, "up", *state, "--nodes", "0"], check=True, stdout=subprocess.DEVNULL)
            again = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--inside", folder]
            done = subprocess.run([HARNESS, "exec-net", *state, *again], check=False)
        finally:
            subprocess.run([HARNESS, "down", *state], check=False)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
