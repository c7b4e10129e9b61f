"""The plaudit command: light help, one message for bad input, exit codes."""

import json
import os
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from plaudit_wire.errors import RefusedError
from plaudit_workers import cli
from plaudit_workers.cli import COMMANDS, EXIT_REFUSED, main

HEAVY = ("torch", "vllm", "ray", "transformers", "pyarrow", "pydantic", "redis", "numpy", "asyncio", "rich")
JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {name: scores}
spec:
  reward:
    scorers: [{name: mine, kind: python, python: {path: reward.py}}]
    workers: {autoscaling: {}}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A valid job that only scores, with its reward file."""
    (tmp_path / "reward.py").write_text("def compute_score(sample): ...\n")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def test_help_imports_nothing_heavy() -> None:
    asked = [["--help"], *([name, "--help"] for name in COMMANDS), ["--version"]]
    program = (
        "import sys\nfrom plaudit_workers.cli import main\n"
        f"for arguments in {asked!r}:\n"
        f"    code, heavy = main(arguments), [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    assert (code, heavy) == (0, []), (arguments, code, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("plaudit") >= len(asked)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # a long name has its summary on the next line
    assert all(f"{name} {command.summary}" in shown for name, command in COMMANDS.items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "plaudit: the following arguments are required: COMMAND (see plaudit --help)"),
        (["bogus"], "plaudit: argument COMMAND: invalid choice: 'bogus'"),
        (["run"], "plaudit run: the following arguments are required: job (see plaudit run --help)"),
        (["run", "j", "--steps", "0"], "plaudit run: argument --steps: '0' is not a whole number from 1 to 2147483647"),
        (["run", "j", "--run", "a/b"], "plaudit run: argument --run: 'a/b' is not a name: use letters"),
        (["validate", "j", "--bogus"], "plaudit: unrecognized arguments: --bogus"),
        (["validate", "absent.yaml"], "absent.yaml: no such file. Give the path of a job file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(words)
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_job_file_of_a_similar_name_is_named(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(job.with_suffix(".yml"))]) == 2
    assert capsys.readouterr().err == f"{job.with_suffix('.yml')}: no such file. Did you mean {job}?\n"


def test_validate_prints_the_notices_of_run_for_a_valid_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(job)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{job}: valid (scores)"
    assert lines[1].startswith(
        f"{job}:8: note: spec.reward.workers.autoscaling: is ignored by plaudit run. Set reward.workers.replicas"
    )


def test_problems_of_files_come_with_the_lines_of_their_fields(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job.parent / "reward.py").unlink()
    assert main(["validate", str(job)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"{job}:7: spec.reward.scorers[0].python.path: there is no file ")
    assert printed.out == ""


def test_validate_for_kubernetes_looks_at_paths_and_not_at_files(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--kubernetes", str(job)]) == 2
    assert "'reward.py' is relative; on Kubernetes there are no files next to the job file" in capsys.readouterr().err
    job.write_text(JOB.replace("path: reward.py", "path: /plaudit/code/reward.py"))
    assert main(["validate", "--kubernetes", str(job)]) == 0


def test_schema_prints_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"]["kind"]["const"] == "RLJob"


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (RefusedError("mend it"), 2, "mend it\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            ModuleNotFoundError(name="ray"),
            2,
            "plaudit end: the package ray is not installed. Install plaudit-workers[ray] for " + sys.executable + "\n",
        ),
    ],
)
def test_a_refusal_and_an_interruption_end_a_command_quietly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    code: int,
    words: str,
) -> None:
    (tmp_path / "ending_command.py").write_text("def run(arguments):\n    raise arguments.ending\n")
    monkeypatch.syspath_prepend(tmp_path)

    def arguments(parser: object) -> None:
        parser.set_defaults(ending=raised)

    command = cli.Subcommand("ending_command:run", "end at once", arguments)
    monkeypatch.setitem(COMMANDS, "end", command)
    assert main(["end"]) == code
    assert capsys.readouterr().err == words


def test_ctrl_c_while_the_program_is_imported_ends_it_quietly() -> None:
    settings = Path(cli.__file__).parents[1] / "pyproject.toml"
    module, _, function = tomllib.loads(settings.read_text())["project"]["scripts"]["plaudit"].partition(":")
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may ignore it
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "plaudit_workers.files":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from {module} import {function}
sys.exit({function}())
"""
    ended = subprocess.run([sys.executable, "-c", program, "schema"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "", "")


def test_commands_are_found_where_the_table_says() -> None:
    assert all(callable(pkgutil.resolve_name(command.function)) for command in COMMANDS.values())


@pytest.mark.alike
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["rescore", "run", "--url", ""], "--url is empty"),
        (["submit", "samples.jsonl", "--url="], "--url is empty"),
        (["validate", ""], "argument 2 is empty"),
        (["samples", "run", "--group", "\udcff"], "'\\udcff' is no text in UTF-8"),
        (["submit", "samples.jsonl", "--wait", "-1"], "'-1' is no number of seconds"),
        (["probe", "job.yaml", "--fail-above", "much"], "'much' is no finite number"),
        (["try", "job.yaml", "--rows", "9" * 20], "is not a whole number from 1 to 2147483647"),
    ],
)
def test_arguments_that_no_command_could_use_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == EXIT_REFUSED
    assert problem in capsys.readouterr().err


@pytest.mark.long
def test_a_terminal_of_another_encoding_ends_nothing(job: Path) -> None:
    program = [sys.executable, "-m", "plaudit_workers.cli", "validate", str(job)]
    latin = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert subprocess.run(program, env=latin, check=False, capture_output=True).returncode == 0
