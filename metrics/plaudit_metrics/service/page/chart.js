/**
 * Charts over steps or over time: stacked bars and lines, drawn by uPlot (a global, its own script).
 *
 * Each is a figure with a heading, a legend, a plot that hover, touch and the arrow keys read value by value, and a table
 * of the same numbers. Where uPlot is missing the table is all there is.
 */

import { announce, details, element, swatch, table } from "./dom.js";
import { figure, mark, seconds, share } from "./format.js";
import { usualTop } from "./outliers.js";
import { resolved } from "./palette.js";
import { onTheme } from "./theme.js";

const MOST_TOLD = 500;
const FONT = "12px system-ui, sans-serif";
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
const TIMES_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600];
const LEAST_BAR_WITH_GAP = 5;
const AXIS = 56;
const SMALL = 120;
const MOST_NAMED = 3;
/** Where all values are closer to 0 than that they are rounding errors, which uPlot has no marks for. */
const ROUNDING = 1e-15;

export class Chart {
  /**
   * @param {Object} spec
   * @param {string} spec.title
   * @param {string} spec.note what is shown, with its unit
   * @param {"bars"|"lines"} spec.kind bars are stacked
   * @param {{label: string, value: function(Object): number, words: function(number): string, margin: number, time?: boolean}} spec.x
   *     `margin` is left free before the first and after the last
   * @param {"figure"|"seconds"|"share"} spec.unit how values are written
   * @param {number} [spec.least] the y axis goes at least that far
   * @param {{key: string, label: string, color: string, value: function(Object): number, band?: [function, function]}[]} spec.series
   * @param {function(Object): Node} [spec.link] what stands for x in the table
   * @param {function(Object): void} [spec.pick] called with the row that was clicked, or entered
   * @param {number} [spec.height] pixels
   * @param {boolean} [spec.legend] without it more than one series have one
   */
  constructor(spec) {
    this.spec = { ...spec, words: { figure, seconds, share }[spec.unit] };
    this.rows = [];
    this.plot = null;
    this.top = null;
    this.tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.host = element("div", {
      class: "plot",
      tabindex: "0",
      role: "group",
      "aria-roledescription": "chart",
      style: { height: `${spec.height ?? 180}px` },
      on: { keydown: (event) => this.#key(event), blur: () => this.#leave(), mouseleave: () => this.#leave() },
    });
    this.table = details("Table", () => this.#table());
    this.beyond = element("p", { class: "note", hidden: true });
    this.legend = spec.series.map((each) => element("li", {}, swatch(each.color), each.label));
    this.node = element(
      "figure",
      { class: "card chart" },
      element("figcaption", {}, element("h3", {}, spec.title), element("p", { class: "note" }, spec.note), this.beyond),
      spec.legend ?? spec.series.length > 1 ? element("ul", { class: "legend" }, this.legend) : null,
      this.host,
      this.table.node,
    );
    this.gap = this.#gap();
    new ResizeObserver(() => this.#fit()).observe(this.host);
    onTheme(() => this.#draw());
  }

  /** Shows other rows: objects that the functions of the spec read. */
  update(rows) {
    this.rows = rows;
    this.host.setAttribute("aria-label", this.#summary());
    this.table.refresh();
    this.#nameParts();
    this.#findOutliers();
    if (this.plot === null || this.gap !== this.#gap()) this.#draw();
    else this.plot.setData(this.#data());
  }

  /** Pixels between two bars: a stroke of a pixel would cover narrow ones. */
  #gap() {
    return (this.host.clientWidth - AXIS) / (this.rows.length || 1) >= LEAST_BAR_WITH_GAP ? 1 : 0;
  }

  /** The legend names the series that some row has; of bars, those that can be seen. */
  #nameParts() {
    const { series, kind } = this.spec;
    for (const [at, each] of series.entries()) this.legend[at].hidden = !this.rows.some((row) => each.value(row) > 0 || (kind !== "bars" && each.value(row) !== undefined));
  }

  /** A few rows far above the others are cut off, and named, so that they do not flatten the chart. */
  #findOutliers() {
    const { series, kind, x, words } = this.spec;
    const heights = this.rows.map((row) => {
      const values = series.map((each) => each.value(row) ?? 0);
      return kind === "bars" ? values.reduce((sum, value) => sum + value, 0) : Math.max(...values);
    });
    this.top = usualTop(heights);
    const far = this.top === null ? [] : this.rows.map((row, at) => [row, heights[at]]).filter(([, height]) => height > this.top);
    this.beyond.hidden = far.length === 0;
    const named = [...far].sort(([, one], [, other]) => other - one).slice(0, MOST_NAMED)
      .map(([row, height]) => `${x.label.toLowerCase()} ${x.words(x.value(row))} (${words(height)})`);
    const more = far.length > MOST_NAMED ? ` and ${far.length - MOST_NAMED} more` : "";
    this.beyond.textContent = `Beyond the axis: ${named.join(", ")}${more}.`;
  }

  #range(low, high) {
    const { least = 0, kind } = this.spec;
    if (Math.max(Math.abs(low ?? 0), Math.abs(high ?? 0)) < ROUNDING) return [0, least * 1.06 || 1];
    if (kind === "lines" && low !== null && low < 0) {
      const margin = (high - low) * 0.06 || Math.abs(low) * 0.06;
      return [low - margin, high + margin];
    }
    const top = this.top === null ? (high ?? 0) : Math.min(high ?? 0, this.top);
    return [Math.min(low ?? 0, 0), Math.max(top, least) * 1.06 || 1];
  }

  #summary() {
    const { title, note, series, x, words } = this.spec;
    const newest = this.rows.at(-1);
    if (newest === undefined) return `${title}: nothing yet`;
    const parts = series.map((each) => `${each.label} ${words(each.value(newest))}`).join(", ");
    return `${title}. ${note} Newest, ${x.label} ${x.words(x.value(newest))}: ${parts}. Arrow keys read the others.`;
  }

  #table() {
    const { series, x, words, title, link } = this.spec;
    const first = { label: x.label, cell: link ?? ((row) => x.words(x.value(row))) };
    const others = series.map((each) => ({ label: each.label, number: true, cell: (row) => words(each.value(row)) }));
    return table(title, [first, ...others], this.rows.slice(-MOST_TOLD).reverse());
  }

  /** Columns for uPlot: stacked bars are drawn from the whole stack down to its lowest part. */
  #data() {
    const { series, x, kind } = this.spec;
    const columns = [this.rows.map(x.value)];
    if (kind === "lines") {
      for (const each of series) {
        for (const value of each.band ?? []) columns.push(this.rows.map((row) => value(row) ?? null));
        columns.push(this.rows.map((row) => each.value(row) ?? null));
      }
      return columns;
    }
    let below = this.rows.map(() => 0);
    const stacked = series.map((each) => (below = below.map((sum, row) => sum + (each.value(this.rows[row]) ?? 0))));
    return [...columns, ...stacked.reverse()];
  }

  #draw() {
    if (globalThis.uPlot === undefined) {
      this.host.textContent = "The chart library did not load; the table below has the numbers.";
      return;
    }
    this.plot?.destroy();
    this.plot = null; // where it cannot be drawn now it is drawn when it comes to be seen
    if (this.rows.length === 0 || this.host.clientWidth === 0) return;
    this.plot = new uPlot(this.#options(), this.#data(), this.host);
    this.plot.over.append(this.tip);
    this.plot.over.addEventListener("click", () => this.#pick());
  }

  #options() {
    const { x, unit, kind } = this.spec;
    const text = resolved("--text-2");
    const grid = { stroke: resolved("--grid"), width: 1 };
    const axis = { stroke: text, font: FONT, grid, ticks: { show: false } };
    const ends = (_, low, high) => [low - x.margin, high + x.margin];
    const word = (at) => (x.time || (at >= x.value(this.rows[0]) && at <= x.value(this.rows.at(-1))) ? x.words(at) : "");
    return {
      width: this.host.clientWidth,
      height: this.host.clientHeight,
      padding: [8, x.time ? 30 : 20, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: Boolean(x.time), range: ends },
        y: { range: (_, low, high) => this.#range(low, high) },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 28, space: x.time ? 80 : 50, incrs: x.time ? TIMES_S : WHOLE, values: (_, ticks) => ticks.map(word) },
        { ...axis, size: AXIS, space: this.host.clientHeight < SMALL ? 18 : 36, values: (_, ticks) => ticks.map(mark[unit]) },
      ],
      cursor: {
        x: kind === "lines",
        y: false,
        drag: { x: false, y: false },
        points: kind === "lines" ? { size: 7 } : { show: false },
        sync: x.time ? undefined : { key: "steps", setSeries: false },
      },
      series: [{}, ...(kind === "bars" ? this.#bars() : this.#lines())],
      bands: kind === "bars" ? [] : this.#bands(),
      hooks: { setCursor: [(plot) => this.#tell(plot)] },
    };
  }

  #bars() {
    const paths = uPlot.paths.bars({ size: [0.78, 56] });
    const width = (this.gap = this.#gap());
    const surface = resolved("--card");
    return this.spec.series
      .map(({ color }) => ({ paths, fill: resolved(color), stroke: surface, width, points: { show: false } }))
      .reverse();
  }

  #lines() {
    const edge = { stroke: "transparent", width: 0, points: { show: false } };
    return this.spec.series.flatMap(({ color, band }) => [
      ...(band ? [edge, edge] : []),
      { stroke: resolved(color), width: 2, spanGaps: true, points: { show: () => this.rows.length < 2, size: 7, fill: resolved(color) } },
    ]);
  }

  /** A band lies between the two columns before its line. */
  #bands() {
    const bands = [];
    let column = 1;
    for (const { color, band } of this.spec.series) {
      if (band) {
        bands.push({ series: [column + 1, column], fill: resolved(color).replace("rgb(", "rgba(").replace(")", ", 0.18)") });
        column += 2;
      }
      column += 1;
    }
    return bands;
  }

  #fit() {
    if (this.plot === null || (this.host.clientWidth > 0 && this.gap !== this.#gap())) this.#draw();
    else if (this.host.clientWidth > 0) this.plot.setSize({ width: this.host.clientWidth, height: this.host.clientHeight });
  }

  #tell(plot) {
    const row = this.rows[plot.cursor.idx];
    const here = this.host.matches(":hover, :focus-visible");
    this.tip.hidden = row === undefined || !here;
    if (this.tip.hidden) return;
    const { series, x, words, kind } = this.spec;
    const shown = kind === "bars" ? [...series].reverse() : series;
    const lines = shown
      .filter((each) => kind === "lines" || each.value(row) > 0)
      .map((each) => element("div", {}, swatch(each.color), element("span", {}, each.label), element("b", {}, words(each.value(row)))));
    this.tip.replaceChildren(element("strong", {}, `${x.label} ${x.words(x.value(row))}`), ...lines);
    const left = plot.valToPos(x.value(row), "x");
    const side = left > plot.over.clientWidth / 2 ? `translateX(calc(-100% - 14px))` : "translateX(14px)";
    this.tip.style.setProperty("left", `${left}px`);
    this.tip.style.setProperty("transform", side);
  }

  #leave() {
    this.tip.hidden = true;
    this.plot?.setCursor({ left: -10, top: -10 });
  }

  #key(event) {
    const last = this.rows.length - 1;
    if (this.plot === null || last < 0) return;
    const now = this.plot.cursor.idx ?? last + 1;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      const row = this.rows[Math.max(0, Math.min(to, last))];
      this.plot.setCursor({ left: this.plot.valToPos(this.spec.x.value(row), "x"), top: 8 });
      announce(this.tip.innerText);
    } else if (event.key === "Enter") this.#pick();
    else if (event.key === "Escape") this.#leave();
  }

  #pick() {
    const row = this.rows[this.plot.cursor.idx];
    if (row !== undefined) this.spec.pick?.(row);
  }
}
