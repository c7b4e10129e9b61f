"""Build the parts of dashboards: the frame with its variables, and three kinds of panels.

Every query uses the data source of the variable ``datasource``. The variable ``run`` selects by the label that the
scrape configuration sets (docs/metrics.md); without that label, "All" still finds everything.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders.bargauge import Panel as BarGaugePanel
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import (
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
OF_RUN = 'run=~"$run"'
"""Selects the runs chosen by ``run_variable``."""
SHARE, SECONDS, BYTES, COUNT, PER_SECOND, POINT_IN_TIME = (
    "percentunit",
    "s",
    "bytes",
    "short",
    "ops",
    "dateTimeFromNow",
)
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


def run_variable() -> QueryVariable:
    """Return the variable ``run``: one, several or all."""
    return (
        QueryVariable("run")
        .label("Run")
        .datasource(DATA_SOURCE)
        .query("label_values(plaudit_step, run)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def stat(title: str, expression: str, unit: str, *, warn: float | None = None, bad: float | None = None) -> StatPanel:
    """Return a panel of one number, yellow from ``warn`` and red from ``bad``."""
    steps = [Threshold(None, "green")]
    steps += [Threshold(warn, "yellow")] if warn is not None else []
    steps += [Threshold(bad, "red")] if bad is not None else []
    return (
        StatPanel()
        .title(title)
        .datasource(DATA_SOURCE)
        .with_target(_query(expression, "", 0).instant())
        .unit(unit)
        .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .height(4)
        .span(4)
    )


def bars(title: str, unit: str, *queries: tuple[str, str], most: float | None = None) -> BarGaugePanel:
    """Return a panel of horizontal bars, one for each series; ``queries`` are pairs of expression and legend."""
    panel = (
        BarGaugePanel()
        .title(title)
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


def lines(title: str, unit: str, *queries: tuple[str, str], stacked: bool = False) -> TimeseriesPanel:
    """Return a panel of lines over time; ``queries`` are pairs of expression and legend."""
    legend_options = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    panel = (
        TimeseriesPanel()
        .title(title)
        .datasource(DATA_SOURCE)
        .unit(unit)
        .min(0)
        .legend(legend_options.show_legend(True))
        .height(8)
        .span(8)
    )
    if stacked:
        panel = panel.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(60).line_width(0)
    for number, (expression, legend) in enumerate(queries):
        panel = panel.with_target(_query(expression, legend, number).range())
    return panel


def _query(expression: str, legend: str, number: int) -> Dataquery:
    return Dataquery().expr(expression).legend_format(legend).ref_id("ABCDEFGH"[number]).datasource(DATA_SOURCE)
