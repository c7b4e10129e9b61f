"""Build the parts of dashboards: the frame with its variables, three kinds of panels, and the PromQL that they share.

Every query uses the data source of the variable ``datasource``. The variable ``run`` selects by the label that the
scrape configuration sets (docs/metrics.md); without that label, "All" still finds everything.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from grafana_foundation_sdk.builders.bargauge import Panel as BarGaugePanel
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    TextBoxVariable,
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
PAGE = "http://127.0.0.1:9090"
"""Address of a run's page unless the variable ``page`` has another: that of a port-forward to its metrics service."""
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


def with_page_variable(board: Dashboard) -> Dashboard:
    """Add the variable ``page``, the address of the run's page, which ``to_page`` links to."""
    return board.with_variable(TextBoxVariable("page").label("Page of the run").default_value(PAGE))


def to_page(view: str = "") -> DashboardLink:
    """Return a link from a panel to a view of the run's page, such as ``samples?outcome=failed``."""
    title = "Samples on the run's page" if view.startswith("samples") else "The run's page"
    url = f"${{page:raw}}/#/{view}"
    return DashboardLink(title).type(DashboardLinkType.LINK).url(url).target_blank(True)


def to_job() -> DashboardLink:
    """Return a link from a series of a run to the run's own dashboard, in the same range of time."""
    url = "/d/plaudit-job?var-datasource=${datasource}&var-run=${__field.labels.run}&${__url_time_range}"
    return DashboardLink("This run").type(DashboardLinkType.LINK).url(url)


def _annotation(name: str, expression: str, *, enabled: bool) -> AnnotationQuery:
    return AnnotationQuery().name(name).datasource(DATA_SOURCE).enable(enabled).icon_color("orange").expr(expression)


def panel_id(title: str) -> int:
    """Return the id of a panel, which links from alerts use; it follows from the title alone."""
    return zlib.crc32(title.encode()) % 1_000_000 + 1


def with_panels(board: Dashboard, panels: Iterable[Any]) -> Dashboard:
    """Add panels in their order."""
    for panel in panels:
        board = board.with_panel(panel)
    return board


_Built = TypeVar("_Built", StatPanel, BarGaugePanel, TimeseriesPanel)


@dataclass(frozen=True)
class Panel:
    """Hold what all panels have; ``of`` builds the panel of its queries, which are pairs of expression and legend."""

    title: str
    unit: str
    about: str
    """Describes it, for readers."""

    def _begun(self, panel: _Built, height: int, span: int) -> _Built:
        panel = panel.id(panel_id(self.title)).title(self.title).description(self.about).datasource(DATA_SOURCE)
        return panel.unit(self.unit).height(height).span(span)


@dataclass(frozen=True)
class Stat(Panel):
    """Show one number, yellow from ``warn`` and red from ``bad``."""

    warn: float | None = None
    bad: float | None = None

    def of(self, expression: str) -> StatPanel:
        """Return the panel of one expression."""
        colours = ((self.warn, "yellow"), (self.bad, "red"))
        steps = [Threshold(None, "green"), *(Threshold(least, name) for least, name in colours if least is not None)]
        return (
            self._begun(StatPanel(), 4, 4)
            .with_target(_query(expression, "", 0).instant())
            .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
            .graph_mode(BigValueGraphMode.NONE)
            .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
            .no_value("none yet")
        )


@dataclass(frozen=True)
class Bars(Panel):
    """Show horizontal bars, one for each series."""

    most: float | None = None

    def of(self, *queries: tuple[str, str]) -> BarGaugePanel:
        """Return the panel of these queries."""
        panel = self._begun(BarGaugePanel(), 8, 8).min(0).orientation(VizOrientation.HORIZONTAL)
        panel = panel.reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        if self.most is not None:
            panel = panel.max(self.most)
        for number, (expression, legend) in enumerate(queries):
            panel = panel.with_target(_query(expression, legend, number).instant())
        return panel


@dataclass(frozen=True)
class Lines(Panel):
    """Show lines over time; the axis begins at 0 unless the values may be ``signed``."""

    stacked: bool = False
    signed: bool = False

    def of(self, *queries: tuple[str, str]) -> TimeseriesPanel:
        """Return the panel of these queries."""
        legend_options = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        panel = self._begun(TimeseriesPanel(), 8, 8).legend(legend_options.show_legend(True))
        if not self.signed:
            panel = panel.min(0)
        if self.stacked:
            panel = panel.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(60).line_width(0)
        for number, (expression, legend) in enumerate(queries):
            panel = panel.with_target(_query(expression, legend, number).range())
        return panel


def _query(expression: str, legend: str, number: int) -> Dataquery:
    query = Dataquery().expr(expression).legend_format(legend).ref_id("ABCDEFGH"[number]).datasource(DATA_SOURCE)
    return query.exemplar(True) if "_bucket{" in expression else query


def rate(name: str, by: str = "", where: str = "") -> str:
    """Return the rate of a counter, summed over all labels but ``by``."""
    return f"sum by ({by}) (rate({name}{{{OF_RUN}{where}}}[$__rate_interval]))"


OLDEST_SAMPLE = f'{{__name__=~"plaudit_stream_oldest_(undelivered|in_flight)_seconds", {OF_RUN}, stream="samples"}}'
"""Age of the oldest sample that waits for a reward worker or is in work."""


def newest(name: str, by: str = "") -> str:
    """Return a gauge, the largest over all labels but ``by``."""
    return f"max by ({by}) ({name}{{{OF_RUN}}})"


def quantile(q: float, name: str, by: str = "") -> str:
    """Return a quantile (0 to 1) of a histogram, estimated from its buckets; absent while nothing is observed."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', labels)} > 0)"
