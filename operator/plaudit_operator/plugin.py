"""Run ``kubectl plaudit``: status of a job, logs by role, its metrics page, suspend and resume, all through kubectl.

First the command line, then the text about a job (pure functions over objects as kubectl prints them), then kubectl
itself. Only the standard library is imported, so that the program is one small file (``plugin_bundle.py``).

Exit codes: kubectl's own; 1 if a command does not apply to the job in its state; 2 for a bad command line.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from plaudit_operator import names
from plaudit_operator.names import ConditionType, Reason
from plaudit_operator.observed import gpu_seconds, holds, seconds
from plaudit_wire.printable import printable

Object = Mapping[str, Any]
RESOURCE = "rljobs.plaudit.dev"
SERVICES = "rewardservices.plaudit.dev"
_ALL = "all"
_MOST_STREAMS = "1000"
"""kubectl follows only five pods by default."""
_GOOD_WHEN_FALSE = (ConditionType.DEGRADED, ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED)
_SUMMARIES = (ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED)
"""Conditions that repeat others."""
_EVENTS = 8
_WITHIN = "--request-timeout=20s"
_ENDS_WITHIN_S = 30
_NO_SUCH_KIND = "the server doesn't have a resource type"
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?")
_LONGEST_NAME = 253


class PluginError(Exception):
    """A command does not apply to the job in its state; the message has the reason and the remedy."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where the terminal's encoding lacks a character
    try:
        options = _parser().parse_args(arguments)
        kubectl = Kubectl.on_path(options.namespace, options.context, options.kubeconfig)
        code = _COMMANDS[options.command](kubectl, options)
        sys.stdout.flush()
        sys.exit(code)
    except (KubectlError, PluginError) as error:
        sys.exit(printable(f"kubectl plaudit: {error}", keep="\n"))
    except BrokenPipeError:  # the reader of standard output has closed it, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        strange = f"an answer of the API server has an unknown form ({type(error).__name__}: {error})"
        sys.exit(printable(f"kubectl plaudit: {strange}. Is this the cluster, and is this Plaudit's version there?"))
    except KeyboardInterrupt:
        sys.exit(130)


class _Parser(argparse.ArgumentParser):
    """Print an error as one line, in which the user's words move no cursor."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"{self.prog}: {message} (see {self.prog} --help)") + "\n")


def _name(text: str) -> str:
    if len(text) > _LONGEST_NAME or not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no name of a job; kubectl plaudit status lists them")
    return text


def _number(least: float, most: float, kind: Callable[[str], float] = int) -> Callable[[str], Any]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r:.80} is no number from {least} to {most}")
        return value

    return read


def _status(kubectl: Kubectl, options: argparse.Namespace) -> int:
    if not options.job:
        return kubectl.become("get", f"{RESOURCE},{SERVICES}")
    job = _job(kubectl, options.job)
    selector = f"involvedObject.uid={job['metadata']['uid']}"
    events = kubectl.items("events", "--field-selector", selector)
    sys.stdout.write(printable(summary(job, events, time.time()), keep="\n"))
    return 0


def _logs(kubectl: Kubectl, options: argparse.Namespace) -> int:
    selector = f"{names.LABEL_JOB}={options.job}"
    containers = ["--all-containers"]
    if options.role != _ALL:
        selector += f",{names.LABEL_ROLE}={options.role}"
        containers = ["--container", options.role]
    if not kubectl.items("pods", "--selector", selector):
        raise PluginError(missing_pods(_job(kubectl, options.job), options.role))
    how = ["--prefix", "--ignore-errors", "--tail", str(options.tail), "--max-log-requests", _MOST_STREAMS]
    how += ["--follow"] * options.follow + ["--previous"] * options.previous
    how += ["--since", options.since] if options.since else []
    return kubectl.become("logs", "--selector", selector, *containers, *how)


def _open(kubectl: Kubectl, options: argparse.Namespace) -> int:
    _need_metrics(kubectl, options.job)
    sys.stderr.write(f"http://127.0.0.1:{options.port}/ until you press Ctrl-C\n")
    return kubectl.become("port-forward", f"service/{options.job}-metrics", f"{options.port}:{names.METRICS_PORT}")


def _top(kubectl: Kubectl, options: argparse.Namespace) -> int:
    try:
        from plaudit_metrics.terminal.top import top
    except ImportError as error:
        raise PluginError(
            f"top needs Python packages that this installation lacks ({error.name}); kubectl plaudit open "
            f"{options.job} shows the same in a browser"
        ) from None

    _need_metrics(kubectl, options.job)
    with kubectl.forwarded(f"service/{options.job}-metrics", names.METRICS_PORT) as port:
        url = f"http://127.0.0.1:{port}"
        return top(argparse.Namespace(run=None, url=url, runs_folder="", every=options.every))


def _need_metrics(kubectl: Kubectl, job: str) -> None:
    pods = kubectl.items("pods", "--selector", f"{names.LABEL_JOB}={job},{names.LABEL_ROLE}=metrics")
    if not any(holds(pod, "Ready") for pod in pods):
        raise PluginError(missing_pods(_job(kubectl, job), "metrics"))


def _suspend_or_resume(kubectl: Kubectl, options: argparse.Namespace) -> int:
    job = _job(kubectl, options.job)
    if how := ended(job):
        raise PluginError(f"{options.job} is {how}: it cannot {options.command}")
    suspend = options.command == "suspend"
    patch = f'{{"spec":{{"suspend":{str(suspend).lower()}}}}}'
    resource = SERVICES if job["kind"] == "RewardService" else RESOURCE
    kubectl.read("patch", resource, options.job, "--type", "merge", "--patch", patch)
    if suspend:
        done, means = "suspended", "its GPUs and workers are released; Redis and volumes are kept"
    else:
        done, means = "resumed", "it continues from its checkpoint"
    sys.stdout.write(f"{options.job} is {done}: {means}\n")
    return 0


def _job(kubectl: Kubectl, name: str) -> Object:
    """Return the RLJob of a name, or the RewardService."""
    for resource in (RESOURCE, SERVICES):
        try:
            return kubectl.json("get", resource, name)
        except KubectlError as error:
            if not error.not_found:
                raise
    there = [*kubectl.items(RESOURCE), *kubectl.items(SERVICES)]
    raise PluginError(unknown_job(name, kubectl.namespace(), there))


_COMMANDS: dict[str, Callable[[Kubectl, argparse.Namespace], int]] = {
    "status": _status,
    "logs": _logs,
    "top": _top,
    "open": _open,
    "suspend": _suspend_or_resume,
    "resume": _suspend_or_resume,
}


def _parser() -> argparse.ArgumentParser:
    where = _where(default=argparse.SUPPRESS)
    parser = _Parser(
        prog="kubectl plaudit",
        description="Show RLJobs and the logs of their processes; suspend and resume them.",
        parents=[_where(default="")],
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, meaning: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.", parents=[where]
        )

    status = command("status", "show phase, progress, roles, problems and events; without a name: all jobs")
    status.add_argument("job", nargs="?", type=_name)
    logs = command("logs", "show the logs of a role, each line with its pod")
    logs.add_argument("job", type=_name)
    logs.add_argument("role", nargs="?", default=_ALL, choices=[*names.ROLES, _ALL], help="default: all")
    logs.add_argument(
        "-f", "--follow", action="store_true", help="follow the logs; pods that start later are not included"
    )
    logs.add_argument(
        "-p", "--previous", action="store_true", help="logs from before the last restart of the containers"
    )
    logs.add_argument("--since", default="", metavar="TIME", help="only lines newer than this: 30s, 5m, 2h")
    logs.add_argument(
        "--tail",
        type=_number(-1, 1 << 31),
        default=100,
        metavar="LINES",
        help="last lines of each process (default: 100; -1: all)",
    )
    top = command("top", "run plaudit top on the job: verdict, steps, queues, workers")
    top.add_argument("job", type=_name)
    top.add_argument(
        "--every",
        type=_number(0.1, 86_400, float),
        default=1.0,
        metavar="SECONDS",
        help="refresh interval (default: 1)",
    )
    page = command("open", "forward the job's metrics page to this machine")
    page.add_argument("job", type=_name)
    page.add_argument(
        "--port", type=_number(1, 65_535), default=names.METRICS_PORT, help="local port (default: %(default)s)"
    )
    command("suspend", "release GPUs and workers; keep Redis and volumes").add_argument("job", type=_name)
    command("resume", "continue from the checkpoint").add_argument("job", type=_name)
    return parser


def _where(default: str) -> _Parser:
    """Return a parser of kubectl's own options, which stand before or after the command."""
    parser = _Parser(add_help=False)
    parser.add_argument("-n", "--namespace", default=default, help="of the job (default: the context's)")
    parser.add_argument("--context", default=default, help="of the kubeconfig (default: the current one)")
    parser.add_argument("--kubeconfig", default=default, metavar="FILE", help="default: kubectl's own")
    return parser


def summary(job: Object, events: Sequence[Object], now: float) -> str:
    """Return a job as text: phase and progress, roles, problems, newest events."""
    parts = [_head(job, now), _roles(job), _cost(job, now), _problems(job, now), _event_table(events, now)]
    return "\n".join(part for part in parts if part)


def ended(job: Object) -> str:
    """Return ``Complete`` or ``Failed``; empty while the job is neither."""
    return next((kind for kind in (ConditionType.COMPLETE, ConditionType.FAILED) if holds(job, kind)), "")


def unknown_job(name: str, namespace: str, there: Sequence[Object]) -> str:
    """Return the error for an unknown job, with the jobs that exist."""
    known = ", ".join(f"{job['metadata']['name']} ({_phase(job)})" for job in there)
    found = f"Jobs in it: {known}" if known else "It has no jobs; choose another namespace with -n NAMESPACE"
    return f"no RLJob or RewardService {name!r} in namespace {namespace!r}. {found}"


def missing_pods(job: Object, role: str) -> str:
    """Return why a role has no pods to connect to."""
    name = job["metadata"]["name"]
    which = "" if role == "all" else f"{role} "
    problem = f"{name} is {_phase(job)} and has no ready {which}pods"
    if ended(job):
        kept = "Results are in the run's folder on the volume"
        return f"{problem}: they were deleted at its end (lifecycle.cleanup). {kept}"
    problems = [f"{kind}: {message}" for kind, message, _ in _troubles(job)]
    return f"{problem}. " + ("; ".join(problems) or f"See kubectl describe {job['kind'].lower()} {name}")


def _head(job: Object, now: float) -> str:
    status, metadata = job.get("status") or {}, job["metadata"]
    progress = status.get("progress") or {}
    parts = [metadata["name"], _phase(job)]
    if "step" in progress:
        total = (job["spec"].get("algorithm") or {}).get("steps")
        parts.append(f"step {progress['step']}" + (f" of {total}" if total else ""))
    if "rewardMean" in progress:
        parts.append(f"reward {progress['rewardMean']:.3f}")
    if "verdict" in progress:
        parts.append(f"waiting for {progress['verdict']}")
    if progress.get("backlog"):
        parts.append(f"{progress['backlog']} samples unscored")
    if "revision" in status:
        parts.append(f"revision {status['revision']}")
    parts.append(f"{_age(metadata.get('creationTimestamp'), now)} old")
    return "   ".join(parts) + (f"\nrun {status['run']}\n" if "run" in status else "\n")


def _roles(job: Object) -> str:
    roles = (job.get("status") or {}).get("roles") or []
    rows = [("ROLE", "READY", "RESTARTS", "LAST FAILURE")]
    rows += [
        (r["name"], f"{r.get('ready', 0)}/{r.get('desired', 0)}", str(r.get("restarts", 0)), r.get("lastFailure", ""))
        for r in roles
    ]
    return _table(rows) if roles else ""


def _cost(job: Object, now: float) -> str:
    cost = (job.get("status") or {}).get("cost")
    if not cost:
        return ""
    hours = {role: spent / 3600 for role, spent in gpu_seconds(cost, now).items()}
    roles = ", ".join(f"{role} {each:.1f}" for role, each in hours.items())
    waited = int(cost.get("exposedRewardGpuSeconds", 0)) / 3600
    return f"{sum(hours.values()):.1f} GPU-hours ({roles}); waiting for rewards cost {waited:.1f} of them\n"


def _problems(job: Object, now: float) -> str:
    lines = [f"{kind} ({_age(since, now)}): {message}" for kind, message, since in _troubles(job)]
    return "\n".join(lines) + "\n" if lines else ""


def _troubles(job: Object) -> Iterator[tuple[str, str, str]]:
    """Yield conditions that report a problem: type with reason, message, since when."""
    over = ended(job)
    for condition in (job.get("status") or {}).get("conditions") or []:
        kind, reason = condition["type"], condition["reason"]
        holds = condition["status"] == ("True" if kind in _GOOD_WHEN_FALSE else "False")
        follows = reason == Reason.SUSPENDED_BY_USER and kind != ConditionType.SUSPENDED
        if holds and kind not in _SUMMARIES and not follows and (not over or kind == over):
            yield f"{kind} {reason}", condition["message"], condition["lastTransitionTime"]


def _event_table(events: Sequence[Object], now: float) -> str:
    newest = sorted(events, key=_when)[-_EVENTS:]
    rows = [(_age(_when(e), now), e.get("type", ""), e.get("reason", ""), e.get("message", "")) for e in newest]
    return _table([("LAST SEEN", "TYPE", "REASON", "MESSAGE"), *rows]) if rows else ""


def _when(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def _phase(job: Object) -> str:
    return str((job.get("status") or {}).get("phase") or "not processed by an operator yet")


def _age(since: str | None, now: float) -> str:
    """Return an age as kubectl prints it: ``45s``, ``12m``, ``3h``, ``2d``."""
    age = max(0, int(now - (seconds(since) or now)))
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if age >= 2 * length:
            return f"{age // length}{unit}"
    return f"{age}s"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns as kubectl prints them; the last column is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = (
        "   ".join([*(word.ljust(width) for word, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )
    return "".join(f"{line.rstrip()}\n" for line in lines)


class KubectlError(Exception):
    """kubectl is missing, failed, or found no such object (``not_found``); the message is for the user."""

    def __init__(self, message: str, *, not_found: bool = False) -> None:
        super().__init__(message)
        self.not_found = not_found


class Kubectl:
    """Run kubectl with the program and options of ``argv``; every method raises ``KubectlError`` if kubectl fails."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)

    @classmethod
    def on_path(cls, namespace: str = "", context: str = "", kubeconfig: str = "") -> Kubectl:
        """Return the kubectl on PATH; empty arguments keep its defaults."""
        program = shutil.which("kubectl")
        if program is None:
            raise KubectlError("kubectl is not on PATH; install it: https://kubernetes.io/docs/tasks/tools")
        given = {"--namespace": namespace, "--context": context, "--kubeconfig": kubeconfig}
        return cls([program, *(word for name, value in given.items() if value for word in (name, value))])

    def read(self, *arguments: str) -> str:
        """Return the output of a command."""
        command = [*self._argv, *arguments, _WITHIN]
        try:
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=_ENDS_WITHIN_S
            )
        except subprocess.TimeoutExpired:  # it asks for each of the server's groups, several times
            where = "Is the context's API server reachable? kubectl cluster-info shows its address"
            raise KubectlError(f"kubectl {arguments[0]} did not end within {_ENDS_WITHIN_S} s. {where}") from None
        if done.returncode == 0:
            return done.stdout
        message = done.stderr.strip() or f"kubectl {arguments[0]} exited with code {done.returncode}"
        if _NO_SUCH_KIND in message:
            raise KubectlError(f"{message}. Is Plaudit installed? helm install plaudit charts/plaudit")
        raise KubectlError(message, not_found="(NotFound)" in message)

    def json(self, *arguments: str) -> Mapping[str, Any]:
        """Return an object."""
        text = self.read(*arguments, "--output", "json")
        try:
            found: dict[str, Any] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise KubectlError(f"kubectl {arguments[0]} printed no JSON ({error}): {text[:60]!r}") from None
        return found

    def items(self, kind: str, *arguments: str) -> list[Mapping[str, Any]]:
        """Return the objects of a kind."""
        return list(self.json("get", kind, *arguments)["items"])

    def namespace(self) -> str:
        """Return the namespace in effect."""
        if "--namespace" in self._argv:
            return self._argv[self._argv.index("--namespace") + 1]
        return self.read("config", "view", "--minify", "--output", "jsonpath={..namespace}") or "default"

    def become(self, *arguments: str) -> int:
        """Replace this process by kubectl."""
        os.execv(self._argv[0], [*self._argv, *arguments])  # noqa: S606

    @contextlib.contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[int]:
        """Forward a free local port while the context is open; yield the port."""
        command = [*self._argv, "port-forward", "--address", "127.0.0.1", target, f":{port}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            found = re.search(r":(\d+) ->", process.stdout.readline())
            if found is None:
                raise KubectlError(process.stderr.read().strip())
            yield int(found[1])
        finally:
            process.terminate()
            process.communicate()


if __name__ == "__main__":
    main()
