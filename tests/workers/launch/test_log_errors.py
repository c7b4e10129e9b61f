"""The newest error in a process's log, as its logger wrote it."""

import subprocess
import sys
from pathlib import Path

from plaudit_workers.launch.supervisor import last_error

PROGRAM = """
import sys
from pathlib import Path
from plaudit_wire.logs import configure_logs, get_logger
configure_logs(Path(sys.argv[1]), worker="trainer-0-abc")
logger = get_logger("plaudit")
try:
    {"answer": 1}["extra_info"]
except KeyError:
    logger.exception("crashed")
logger.info("started", run="r")
"""


def test_a_traceback_is_kept_in_the_log_and_its_end_is_the_error(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    subprocess.run([sys.executable, "-c", PROGRAM, str(log)], check=True)
    with log.open("a") as file:
        file.write("a library prints\n")
    assert '"traceback"' in log.read_text()
    assert last_error(log) == "KeyError: 'extra_info' (<string>:8 in <module>)"


def test_an_error_without_a_traceback_is_its_message_and_its_error(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text('{"level": "error", "message": "refused", "error": "spec.x: is wrong"}\n{"level": "info"}\n')
    assert last_error(log) == "refused: spec.x: is wrong"


def test_a_log_without_errors_or_no_log_gives_none(tmp_path: Path) -> None:
    assert last_error(tmp_path / "absent.log") == ""
    (tmp_path / "log").write_text('{"level": "info", "message": "started"}\n')
    assert last_error(tmp_path / "log") == ""
