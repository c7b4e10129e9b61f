"""``kubectl plaudit``: status of a job, logs by role, its metrics page, suspend and resume, all through kubectl.

    commands.py     the command line
    job.py          the text about a job
    kubectl.py      kubectl itself

Exit codes: kubectl's own; 1 if a command does not apply to the job in its state; 2 for a bad command line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from plaudit_operator import names
from plaudit_operator.plugin.job import Object, ended, is_ready, missing_pods, summary, unknown_job
from plaudit_operator.plugin.kubectl import Kubectl, KubectlError
from plaudit_wire.printable import printable

RESOURCE = "rljobs.plaudit.dev"
SERVICES = "rewardservices.plaudit.dev"
ROLES = ("trainer", "rollout", "reward", "gateway", "model", "metrics", "redis")
_ALL = "all"
_MOST_STREAMS = "1000"
"""kubectl follows only five pods by default."""


class PluginError(Exception):
    """A command does not apply to the job in its state; the message has the reason and the remedy."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit."""
    options = _parser().parse_args(arguments)
    try:
        kubectl = Kubectl.on_path(options.namespace, options.context, options.kubeconfig)
        sys.exit(_COMMANDS[options.command](kubectl, options))
    except (KubectlError, PluginError) as error:
        sys.exit(printable(f"kubectl plaudit: {error}", keep="\n"))
    except KeyboardInterrupt:
        sys.exit(130)


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
    if not any(map(is_ready, pods)):
        raise PluginError(missing_pods(_job(kubectl, job), "metrics"))


def _suspension(*, suspend: bool) -> Callable[[Kubectl, argparse.Namespace], int]:
    def change(kubectl: Kubectl, options: argparse.Namespace) -> int:
        job = _job(kubectl, options.job)
        verb, done = ("suspend", "suspended") if suspend else ("resume", "resumed")
        if how := ended(job):
            raise PluginError(f"{options.job} is {how}: it cannot {verb}")
        patch = f'{{"spec":{{"suspend":{str(suspend).lower()}}}}}'
        resource = SERVICES if job["kind"] == "RewardService" else RESOURCE
        kubectl.read("patch", resource, options.job, "--type", "merge", "--patch", patch)
        means = (
            "its GPUs and workers are released; Redis and volumes are kept"
            if suspend
            else "it continues from its checkpoint"
        )
        sys.stdout.write(f"{options.job} is {done}: {means}\n")
        return 0

    return change


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
    "suspend": _suspension(suspend=True),
    "resume": _suspension(suspend=False),
}


def _parser() -> argparse.ArgumentParser:
    where = _where(default=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(
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
    status.add_argument("job", nargs="?", default="")
    logs = command("logs", "show the logs of a role, each line with its pod")
    logs.add_argument("job")
    logs.add_argument("role", nargs="?", default=_ALL, choices=[*ROLES, _ALL], help="default: all")
    logs.add_argument(
        "-f", "--follow", action="store_true", help="follow the logs; pods that start later are not included"
    )
    logs.add_argument(
        "-p", "--previous", action="store_true", help="logs from before the last restart of the containers"
    )
    logs.add_argument("--since", default="", metavar="TIME", help="only lines newer than this: 30s, 5m, 2h")
    logs.add_argument(
        "--tail", type=int, default=100, metavar="LINES", help="last lines of each process (default: 100; -1: all)"
    )
    top = command("top", "run plaudit top on the job: verdict, steps, queues, workers")
    top.add_argument("job")
    top.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="refresh interval (default: 1)")
    page = command("open", "forward the job's metrics page to this machine")
    page.add_argument("job")
    page.add_argument("--port", type=int, default=names.METRICS_PORT, help="local port (default: %(default)s)")
    command("suspend", "release GPUs and workers; keep Redis and volumes").add_argument("job")
    command("resume", "continue from the checkpoint").add_argument("job")
    return parser


def _where(default: str) -> argparse.ArgumentParser:
    """Return a parser of kubectl's own options, which stand before or after the command."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-n", "--namespace", default=default, help="of the job (default: the context's)")
    parser.add_argument("--context", default=default, help="of the kubeconfig (default: the current one)")
    parser.add_argument("--kubeconfig", default=default, metavar="FILE", help="default: kubectl's own")
    return parser


if __name__ == "__main__":
    main()
