"""Run the operator as a process: ``python -m plaudit_operator``."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from dataclasses import replace

from plaudit_operator.names import FIELD_MANAGER
from plaudit_operator.operator import Operator
from plaudit_operator.runtime.health import ControllerHealthServer, MetricsAccess
from plaudit_operator.runtime.kube import ApiServer, KubeError
from plaudit_operator.settings import OperatorSettings, OperatorSettingsError
from plaudit_operator.status.progress import ProgressReader
from plaudit_wire.logs import collect_seldom, configure_logs

_NATIVE_SIDECARS = (1, 29)


def main() -> int:
    """Read the settings and run until SIGTERM; exit with 1 if the Lease is lost, so that the pod restarts."""
    try:
        settings = OperatorSettings.from_environment()
    except OperatorSettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    configure_logs(None, worker=settings.identity, level=settings.log_level)
    progress = ProgressReader()
    kube = ApiServer(FIELD_MANAGER)
    with contextlib.suppress(KubeError):  # an API server that is away now is of a version that the chart supports
        settings = replace(settings, native_sidecars=kube.version() >= _NATIVE_SIDECARS)
    operator = Operator(kube, settings, progress)
    access = MetricsAccess(kube.review).allows if settings.metrics_authentication else None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: operator.stop.set())
    gc.collect()  # what the imports left, which would stay
    collect_seldom()
    server = ControllerHealthServer(settings.port, operator.alive, operator.ready, operator.series.registry, access)
    operator.run()
    server.close()
    progress.close()
    return 1 if operator.lost else 0


raise SystemExit(main())
