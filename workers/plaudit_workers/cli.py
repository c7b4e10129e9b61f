"""The ``plaudit`` command: a table of commands. A command's module is imported only when the command is called.

Exit codes: 0 done · 1 crashed, or tried without a single score · 2 bad input, one message on standard error · 3 the job
failed · 130 after Ctrl-C · 141 the reader of standard output closed it.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import io
import locale
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from plaudit_metrics.terminal.commands import number, report_arguments, steps_arguments, top_arguments, trace_arguments
from plaudit_wire import VERSION
from plaudit_wire.errors import EXIT_INTERRUPTED, RefusedError
from plaudit_wire.printable import print_text
from plaudit_wire.records import OUTCOMES
from plaudit_workers.files import is_full

EXIT_REFUSED = 2
EXIT_CLOSED_PIPE = 141
_FINITE = number("finite number")


@dataclass(frozen=True)
class Subcommand:
    """Describe one command of ``plaudit``."""

    function: str
    """``module:function``, imported when the command is called: ``function(arguments) -> exit code``."""
    summary: str
    """One line for ``plaudit --help``."""
    add_arguments: Callable[[argparse.ArgumentParser], None]


def _text(text: str) -> str:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no text in UTF-8")
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= float(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number from 1 to {(1 << 31) - 1}")
    return int(text)


def _step(text: str) -> int:
    return 0 if text == "0" else _positive(text)  # validation before the first step


def _run_name(text: str) -> str:
    allowed = text.replace("-", "").replace("_", "").replace(".", "").isalnum() and text.isascii()
    if not allowed or text.startswith("."):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: use letters, digits, '-', '_' and '.'")
    return text


def _add_runs_folder(parser: argparse.ArgumentParser, help_text: str = "folder of the runs (default: runs)") -> None:
    parser.add_argument("--runs-folder", type=Path, default=Path("runs"), metavar="FOLDER", help=help_text)


def _validate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, help="the job file")
    parser.add_argument(
        "--kubernetes",
        action="store_true",
        help="check it for kubectl apply: paths are on the volume, local files do not count",
    )


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, help="the job file")
    parser.add_argument(
        "--gpu", default="", metavar="NAME", help="h100-80, h200-141, … (default: that of the pods' nodeSelector)"
    )
    parser.add_argument(
        "--response-tokens", type=_positive, metavar="N", help="mean length of a response (default: maxTokens)"
    )
    parser.add_argument("--json", action="store_true", help="print bytes and seconds as JSON")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, help="the job file")
    parser.add_argument(
        "--address", help="existing Ray cluster: auto, host:port or ray://host:port (default: this machine)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the newest run of this job, or --run")
    parser.add_argument(
        "--accept-changes", action="store_true", help="with --resume: train on with the job's changed fields"
    )
    parser.add_argument(
        "--accept-data-change", action="store_true", help="with --resume: train on although the training data changed"
    )
    parser.add_argument(
        "--run", type=_run_name, metavar="NAME", help="id of the run (default: the job's name and a short random id)"
    )
    _add_runs_folder(parser)
    parser.add_argument("--steps", type=_positive, metavar="N", help="replaces spec.algorithm.steps")
    parser.add_argument(
        "--json", action="store_true", help="print closed steps as JSON lines, all other messages on standard error"
    )
    parser.add_argument(
        "--timings", action="store_true", help="print at the end what the seconds until the first step went into"
    )


def _submit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("samples", type=Path, help="JSON lines or Parquet: response, data_source, ground_truth, …")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="scores, one a line, in order; the same command continues an unfinished file",
    )
    parser.add_argument("--run", type=_run_name, metavar="NAME", help="id of the service's run")
    parser.add_argument(
        "--job", default="", metavar="NAME", help="choose the service of this job when --redis has several"
    )
    parser.add_argument("--url", default="", metavar="URL", help="the service's gateway; its token in PLAUDIT_TOKEN")
    parser.add_argument("--redis", metavar="URL", help="the service's Redis; its password in PLAUDIT_REDIS_PASSWORD")
    _add_runs_folder(parser)
    parser.add_argument(
        "--session", default="", metavar="NAME", help="default: derived from the samples and the output"
    )
    parser.add_argument(
        "--wait",
        type=number("number of seconds", 0),
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for a service that is not up",
    )


def _score_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", type=Path, required=True, help="the job file; only spec.reward counts")
    parser.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines or Parquet: response, ground_truth, …; - is stdin",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="scores, one a line, same order; - is stdout"
    )


def _try_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, help="the job file")
    parser.add_argument("--rows", type=_positive, default=4, metavar="N", help="rows of the data (default: 4)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="other data than spec.data.train.path")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what was played, for plaudit samples")
    parser.add_argument("--samples", type=_positive, default=1, metavar="N", help="samples of each row (default: 1)")
    parser.add_argument("--full", action="store_true", help="print texts whole, not their first 1,000 characters")
    policies = parser.add_argument_group("the policy", "plays the rows with the job's agent; default: rows' own turns")
    policy = policies.add_mutually_exclusive_group()
    policy.add_argument(
        "--answers", type=Path, metavar="FILE", help="JSON lines: a row's turns as texts or messages of the assistant"
    )
    policy.add_argument("--url", default="", metavar="URL", help="a server that speaks OpenAI's API: http://host/v1")
    policy.add_argument("--own-policy", action="store_true", help="the job's engine and model, on this machine")
    policies.add_argument("--model", default="", metavar="NAME", help="the model of --url")
    policies.add_argument(
        "--api-key-variable",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the key of --url (default: OPENAI_API_KEY)",
    )


def _probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, help="the job file")
    parser.add_argument("--rows", type=_positive, default=8, metavar="N", help="rows of the data (default: 8)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="other data than spec.data.train.path")
    parser.add_argument("--only", default="", metavar="NAMES", help="only these probes, with commas between them")
    parser.add_argument(
        "--probes", type=Path, metavar="FILE", help="Python functions from a row to a text or several: your own probes"
    )
    parser.add_argument(
        "--max-requests",
        type=_positive,
        default=2000,
        metavar="N",
        help="the most requests to judges, models and endpoints; fewer rows are probed to keep it (default: 2000)",
    )
    parser.add_argument(
        "--fail-above",
        type=_FINITE,
        default=0.5,
        metavar="X",
        help="exit code 3 if a response that deserves nothing earns more than this share of the right one's reward "
        "(default: 0.5)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def _tasks_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="a Harbor task, or a folder of them")
    parser.add_argument(
        "--concurrent", type=_positive, default=2, metavar="N", help="tasks checked at the same time (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument(
        "--provider",
        choices=["process", "container", "pods"],
        default="process",
        help="machines of this host (default), containers of docker or podman, or pods of the current cluster",
    )
    images = parser.add_argument_group("containers and pods")
    images.add_argument("--image", default="", metavar="IMAGE", help="for tasks that name no image")
    images.add_argument(
        "--registry",
        default="localhost",
        metavar="REGISTRY",
        help="where plaudit images-of has put images (default: localhost)",
    )
    images.add_argument(
        "--network",
        choices=["none", "public"],
        default="none",
        help="the widest network that a task may ask for (default: none)",
    )


def _images_of_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="a Harbor task, or a folder of them")
    parser.add_argument("--push", default="", metavar="REGISTRY", help="push the images there, such as ghcr.io/you")
    parser.add_argument("--json", action="store_true", help="print the images as JSON")


def _rescore_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("samples", type=Path, help="a run's id or folder, its samples folder, or one of its files")
    _add_runs_folder(parser, "default: runs")
    scorers = parser.add_mutually_exclusive_group(required=True)
    scorers.add_argument(
        "--job", type=Path, help="the job file; only spec.reward counts, and spec.sandboxes for kept machines"
    )
    scorers.add_argument("--url", metavar="URL", help="a reward service's gateway; its token in PLAUDIT_TOKEN")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="both scores of each sample: .parquet or .jsonl; the same command continues after a kill",
    )
    parser.add_argument(
        "--changes",
        type=_positive,
        default=10,
        metavar="N",
        help="samples to list whose score changed most (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def _samples_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="id of the run, its folder, or a samples folder or file")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--failed", action="store_true", help="only samples without a score, with the reasons")
    which.add_argument("--lowest", action="store_true", help="the samples with the lowest scores")
    which.add_argument("--outcome", choices=OUTCOMES, default="", help="only samples whose scoring ended so")
    parser.add_argument(
        "--scorer", default="", metavar="NAME", help="--outcome and --failed are of this scorer, also of scored samples"
    )
    parser.add_argument("--step", type=_step, metavar="N", help="only of this step; 0: validation before step 1")
    parser.add_argument("--lowest-score", type=_FINITE, metavar="X", help="only samples with at least this score")
    parser.add_argument("--highest-score", type=_FINITE, metavar="X", help="only samples with at most this score")
    parser.add_argument("--data-source", default="", metavar="NAME", help="only samples of this data source")
    parser.add_argument("--group", default="", metavar="ID", help="only the samples of this group")
    parser.add_argument("--prompt", default="", metavar="ID", help="only samples of the prompt with this prompt_id")
    parser.add_argument("-n", "--most", type=_positive, default=10, metavar="N", help="samples to print (default: 10)")
    parser.add_argument("--full", action="store_true", help="print texts whole, not their first 1,000 characters")
    parser.add_argument("--json", action="store_true", help="print one JSON object a sample, with all columns")
    _add_runs_folder(parser)


def _audit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="id of the run, its folder, or a samples folder or file")
    parser.add_argument("-n", "--most", type=_positive, default=20, metavar="N", help="samples to list (default: 20)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print everything as JSON")
    form.add_argument("-o", "--output", type=Path, metavar="FILE", help="write one HTML page instead")
    _add_runs_folder(parser)


def _dead_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["list", "show", "retry", "drop"])
    parser.add_argument("run", type=_run_name, help="id of the run")
    parser.add_argument("letters", nargs="*", metavar="LETTER", help="ids as list prints them, or all")
    parser.add_argument("--redis", metavar="URL", help="the run's Redis; its password in PLAUDIT_REDIS_PASSWORD")
    _add_runs_folder(parser)


def _runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["list", "delete"])
    parser.add_argument("runs", nargs="*", type=_run_name, metavar="RUN", help="ids of finished runs, for delete")
    parser.add_argument("--redis", metavar="URL", required=True, help="its password in PLAUDIT_REDIS_PASSWORD")
    parser.add_argument(
        "--silent-for",
        type=number("positive number of days", 1e-6),
        metavar="DAYS",
        help="delete all runs of which no process reported for so long",
    )


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="id of the run, or its folder")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument("--version", default="", help="policy version, as in weights/ (default: the newest)")
    parser.add_argument("--step", type=_positive, metavar="N", help="the policy of this step's checkpoint instead")
    _add_runs_folder(parser)


_HERE = "plaudit_workers.commands"
COMMANDS: dict[str, Subcommand] = {
    "run": Subcommand(
        "plaudit_workers.launch.run:run", "run a job on this machine or on a Ray cluster", _run_arguments
    ),
    "submit": Subcommand(
        f"{_HERE}.submit:submit", "score a file of samples on a running scoring service", _submit_arguments
    ),
    "score": Subcommand(f"{_HERE}.score:score", "score a file of samples on this machine", _score_arguments),
    "try": Subcommand(
        f"{_HERE}.play:try_job", "score the first rows of a job's data, or play them with its agent", _try_arguments
    ),
    "probe": Subcommand(
        f"{_HERE}.probe:probe", "score responses that deserve nothing, to find a reward's holes", _probe_arguments
    ),
    "tasks": Subcommand(
        f"{_HERE}.tasks:check_tasks",
        "check Harbor tasks: after nothing, and after their solution",
        _tasks_arguments,
    ),
    "images-of": Subcommand(
        f"{_HERE}.tasks:images_of", "build the images of Harbor tasks, each once", _images_of_arguments
    ),
    "rescore": Subcommand(
        f"{_HERE}.rescore:rescore", "score the stored samples of a run again and compare", _rescore_arguments
    ),
    "samples": Subcommand(
        f"{_HERE}.samples:samples", "print stored samples of a run: texts, scores, reasons", _samples_arguments
    ),
    "audit": Subcommand(
        f"{_HERE}.audit:audit", "tell from stored samples what the reward taught beside the task", _audit_arguments
    ),
    "dead": Subcommand(f"{_HERE}.runs:dead", "list, show, retry or drop a live run's dead letters", _dead_arguments),
    "runs": Subcommand(
        f"{_HERE}.runs:runs", "list the runs in an external Redis, delete finished ones", _runs_arguments
    ),
    "export": Subcommand(
        "plaudit_workers.training.export:export",
        "write a run's weights as a whole model, adapters merged",
        _export_arguments,
    ),
    "validate": Subcommand(
        f"{_HERE}.validate:validate", "report every problem of a job file, with lines", _validate_arguments
    ),
    "plan": Subcommand(f"{_HERE}.plan:plan", "compute the memory and time that a job needs", _plan_arguments),
    "schema": Subcommand(f"{_HERE}.validate:schema", "print the JSON Schema of a job, for editors", lambda _: None),
    "steps": Subcommand(
        "plaudit_metrics.terminal.commands:steps", "show the steps of a run and what each waited for", steps_arguments
    ),
    "top": Subcommand("plaudit_metrics.terminal.top:top", "watch a run live: waits, queues, workers", top_arguments),
    "trace": Subcommand(
        "plaudit_metrics.terminal.commands:trace", "write a step's timeline for Perfetto", trace_arguments
    ),
    "report": Subcommand(
        "plaudit_metrics.terminal.commands:report", "write a run's report as one HTML file", report_arguments
    ),
}
"""By name, in the order of ``plaudit --help``. A new command is a line here."""


_VOLUME_LOST = (errno.EIO, errno.EROFS, errno.ESTALE)
"""Errors of a file that is open; the system does not name it."""
_EXTRAS = {"ray": "ray", "vllm": "rollout", "torch": "training", "transformers": "training", "pyarrow": "training"}
"""Packages that only some commands import, each with the extra that brings it."""


class _Parser(argparse.ArgumentParser):
    """Print an error as one line, without the usage; refuse bytes that are no UTF-8 outside of paths."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("type", None, _text)  # of arguments that name none

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_REFUSED, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit code."""
    try:
        _write_utf8(as_program=argv is None)
        try:
            arguments = _parser().parse_args(_without_empty(sys.argv[1:] if argv is None else argv))
        except SystemExit as ended:
            return int(ended.code or 0)
        return _run(arguments)
    except KeyboardInterrupt:
        if argv is None:  # at once: a thread may read the terminal, and another Ctrl-C would meet Python's own end
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    command = COMMANDS[arguments.command]
    try:
        code = int(pkgutil.resolve_name(command.function)(arguments))
        sys.stdout.flush()
        return code
    except RefusedError as refused:
        print_text(str(refused), to_stderr=True)
        return EXIT_REFUSED
    except ModuleNotFoundError as missing:
        if missing.name not in _EXTRAS:
            raise
        remedy = f"Install plaudit-workers[{_EXTRAS[missing.name]}] for {sys.executable}"
        print(f"plaudit {arguments.command}: the package {missing.name} is not installed. {remedy}", file=sys.stderr)
        return EXIT_REFUSED
    except (BrokenPipeError, SystemExit) as error:  # the reader of standard output has closed it, as ``head`` does
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise  # rich ends the program there
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the flush at exit does not fail as well
        return EXIT_CLOSED_PIPE
    except OSError as error:
        if error.filename is None and not is_full(error) and error.errno not in _VOLUME_LOST:
            raise
        output = getattr(arguments, "output", None)
        file = error.filename or ("standard output" if output in (None, Path("-")) else output)
        remedy = "Make room" if is_full(error) else "Correct the path or its rights"
        print_text(f"plaudit {arguments.command}: {file}: {error.strerror or error}. {remedy}", to_stderr=True)
        try:
            sys.stdout.flush()
        except OSError:  # it is what is full
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_REFUSED


def _write_utf8(*, as_program: bool) -> None:
    """Start the program again where its locale is of another encoding; write a path that is no UTF-8 with a mark."""
    if as_program and codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        # Job files, data and Plaudit's own files are UTF-8 in any locale, also in the processes that it starts.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _without_empty(argv: Sequence[str]) -> Sequence[str]:
    """Return the arguments; refuse an empty one, which a variable that is not set leaves: as a path it is ``.``."""
    for place, text in enumerate(argv):
        before = argv[place - 1] if place else ""
        if not text:
            name = before if before.startswith("-") else f"argument {place + 1}"
        elif text.startswith("--") and text.find("=") == len(text) - 1:
            name = text[:-1]
        else:
            continue
        _Parser(prog="plaudit").error(f"{name} is empty: is a variable not set? Give a value, or leave it out")
    return argv


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="plaudit", description="RL post-training with rewards that are slow, fail and cost money.")
    parser.add_argument("--version", action="version", version=f"plaudit {VERSION}", help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(name, help=command.summary, description=f"plaudit {name}: {command.summary}.")
        )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
