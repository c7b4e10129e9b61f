"""``kubectl plaudit``: a job's logs by role, its metrics page, suspend and resume. All of it is kubectl underneath."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from plaudit_operator import names

_ROLES = ("trainer", "rollout", "reward", "model", "metrics", "redis")
_RESOURCE = "rljobs.plaudit.dev"


def command(arguments: Sequence[str]) -> list[str]:
    """The kubectl command that a command line of the plugin stands for."""
    options = _parser().parse_args(arguments)
    kubectl = ["kubectl"]
    if options.namespace:
        kubectl += ["--namespace", options.namespace]
    if options.context:
        kubectl += ["--context", options.context]
    return kubectl + _verb(options)


def _verb(options: argparse.Namespace) -> list[str]:
    match options.command:
        case "logs":
            selector = f"{names.LABEL_JOB}={options.job},{names.LABEL_ROLE}={options.role}"
            follow = ["--follow"] if options.follow else []
            shown = ["--container", options.role, "--prefix", "--tail", str(options.tail), "--max-log-requests", "64"]
            return ["logs", "--selector", selector, *shown, *follow]
        case "open":
            sys.stderr.write(f"http://127.0.0.1:{options.port}/ until you press Ctrl-C\n")
            return ["port-forward", f"service/{options.job}-metrics", f"{options.port}:{names.METRICS_PORT}"]
        case "suspend" | "resume":
            patch = f'{{"spec":{{"scheduling":{{"suspend":{str(options.command == "suspend").lower()}}}}}}}'
            return ["patch", _RESOURCE, options.job, "--type", "merge", "--patch", patch]
        case _:
            return ["describe", _RESOURCE, options.job]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl plaudit", description=__doc__)
    parser.add_argument("-n", "--namespace", default="", help="of the job (default: the context's)")
    parser.add_argument("--context", default="", help="of the kubeconfig (default: the current one)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    logs = commands.add_parser("logs", help="what the processes of a role say")
    logs.add_argument("job")
    logs.add_argument("role", choices=_ROLES)
    logs.add_argument("-f", "--follow", action="store_true", help="go on as they say more")
    logs.add_argument("--tail", type=int, default=100, metavar="LINES", help="of each process (default: 100)")
    page = commands.add_parser("open", help="make the job's metrics page reachable from here")
    page.add_argument("job")
    page.add_argument("--port", type=int, default=9090, help="here (default: 9090)")
    for name, meaning in (
        ("suspend", "give back GPUs and workers; Redis and volumes stay"),
        ("resume", "go on from the checkpoint"),
        ("status", "conditions, roles and events"),
    ):
        commands.add_parser(name, help=meaning).add_argument("job")
    return parser


def main() -> None:
    """Becomes kubectl."""
    argv = command(sys.argv[1:])
    try:
        os.execvp(argv[0], argv)  # noqa: S606
    except FileNotFoundError:
        sys.exit("kubectl plaudit: there is no kubectl on PATH")
