"""Build the parts of dashboards: the frame with its variables, and three kinds of panels.

Every query uses the data source of the variable ``datasource``. The variable ``run`` selects by the label that the
scrape configuration sets (docs/metrics.md); without that label, "All" still finds everything.
"""

from __future__ import annotations

import zlib

from grafana_foundation_sdk.builders.bargauge import Panel as BarGaugePanel
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.timeseries import Panel as TimeseriesPanel
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)

DATA_SOURCE = DataSourceRef("prometheus", "${datasource}")
TAG = "plaudit"
OF_RUN = 'cluster=~"$cluster", namespace=~"$namespace", run=~"$run"'
"""Selects the runs chosen by ``with_run_variables``."""
SHARE, SECONDS, BYTES, COUNT, PER_SECOND = "percentunit", "s", "bytes", "short", "ops"
"""Grafana's unit names."""


def frame(uid: str, title: str, description: str) -> Dashboard:
    """Return a dashboard without panels: stable uid, data source variable, links to the others."""
    siblings = DashboardLink("Plaudit").type(DashboardLinkType.DASHBOARDS).tags([TAG]).keep_time(True)
    return (
        Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .readonly()
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(siblings.as_dropdown(False).icon("dashboard"))
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )


def with_run_variables(board: Dashboard) -> Dashboard:
    """Add the variables ``cluster``, ``namespace`` and ``run`` (one, several or all), and annotations of their runs."""
    above = ""
    for label in ("cluster", "namespace", "run"):
        board = board.with_variable(
            QueryVariable(label)
            .label(label.title())
            .datasource(DATA_SOURCE)
            .query(f"label_values(plaudit_run_info{above}, {label})")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
        above = "{" + ", ".join(filter(None, (above.strip("{}"), f'{label}=~"${label}"'))) + "}"
    board = board.annotation(_annotation("Alerts", f'ALERTS{{alertstate="firing", {OF_RUN}}}', enabled=True))
    board = board.annotation(_annotation("Steps", f"changes(plaudit_step{{{OF_RUN}}}[$__interval]) > 0", enabled=False))
    restarts = f'changes(plaudit_run_info{{{OF_RUN}, phase="running"}}[$__interval]) > 0'
    return board.annotation(_annotation("Restarts", f"{restarts} or plaudit_redis_up{{{OF_RUN}}} == 0", enabled=False))


def _annotation(name: str, expression: str, *, enabled: bool) -> AnnotationQuery:
    return AnnotationQuery().name(name).datasource(DATA_SOURCE).enable(enabled).icon_color("orange").expr(expression)


def panel_id(title: str) -> int:
    """Return the id of a panel, which links from alerts use; it follows from the title alone."""
    return zlib.crc32(title.encode()) % 1_000_000 + 1


def stat(
    title: str,
    expression: str,
    unit: str,
    *,
    warn: float | None = None,
    bad: float | None = None,
    about: str = "",
) -> StatPanel:
    """Return a panel of one number, yellow from ``warn`` and red from ``bad``; ``about`` describes it."""
    steps = [Threshold(None, "green")]
    steps += [Threshold(warn, "yellow")] if warn is not None else []
    steps += [Threshold(bad, "red")] if bad is not None else []
    return (
        StatPanel()
        .id(panel_id(title))
        .title(title)
        .description(about)
        .datasource(DATA_SOURCE)
        .with_target(_query(expression, "", 0).instant())
        .unit(unit)
        .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("none yet")
        .height(4)
        .span(4)
    )


def bars(title: str, unit: str, *queries: tuple[str, str], most: float | None = None, about: str = "") -> BarGaugePanel:
    """Return a panel of horizontal bars, one for each series; ``queries`` are pairs of expression and legend."""
    panel = (
        BarGaugePanel()
        .id(panel_id(title))
        .title(title)
        .description(about)
        .datasource(DATA_SOURCE)
        .unit(unit)
        .min(0)
        .orientation(VizOrientation.HORIZONTAL)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .height(8)
        .span(8)
    )
    if most is not None:
        panel = panel.max(most)
    for number, (expression, legend) in enumerate(queries):
        panel = panel.with_target(_query(expression, legend, number).instant())
    return panel


def lines(
    title: str, unit: str, *queries: tuple[str, str], stacked: bool = False, signed: bool = False, about: str = ""
) -> TimeseriesPanel:
    """Return a panel of lines over time; ``queries`` are pairs of expression and legend.

    The axis begins at 0 unless the values may be ``signed``.
    """
    legend_options = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    panel = (
        TimeseriesPanel()
        .id(panel_id(title))
        .title(title)
        .description(about)
        .datasource(DATA_SOURCE)
        .unit(unit)
        .legend(legend_options.show_legend(True))
        .height(8)
        .span(8)
    )
    if not signed:
        panel = panel.min(0)
    if stacked:
        panel = panel.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(60).line_width(0)
    for number, (expression, legend) in enumerate(queries):
        panel = panel.with_target(_query(expression, legend, number).range())
    return panel


def _query(expression: str, legend: str, number: int) -> Dataquery:
    return Dataquery().expr(expression).legend_format(legend).ref_id("ABCDEFGH"[number]).datasource(DATA_SOURCE)
