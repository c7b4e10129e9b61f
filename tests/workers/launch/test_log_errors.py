"""The newest error in a process's log, as its logger wrote it."""

import json
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


MEMBERS = """
import logging, sys
from pathlib import Path
from plaudit_wire.logs import configure_logs, get_logger
from plaudit_wire.messages import GroupDelivery
configure_logs(None, worker="reward-0-abc")
logger = get_logger("plaudit")
logger.debug("hidden")
logger.warning("100% of %s", path=Path("/data"), level="own", delivery=GroupDelivery("g-1"))
logging.getLogger("library").error("lost %d of %d", 1, 2)
logger.exception("nothing was raised")
"""


def test_a_line_has_the_fields_of_ours_and_the_text_of_a_library() -> None:
    done = subprocess.run([sys.executable, "-c", MEMBERS], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    ours, library, without = [{name: line[name] for name in line if name != "time"} for line in lines]
    assert (ours["message"], ours["path"], ours["worker"]) == ("100% of %s", "/data", "reward-0-abc")
    assert ours["delivery"] == {"group": "g-1"}
    assert (library["logger"], library["level"], library["message"]) == ("library", "error", "lost 1 of 2")
    assert without == {"level": "error", "logger": "plaudit", "worker": "reward-0-abc", "message": "nothing was raised"}
