/**
 * A step's timeline, from the same Chrome trace that Perfetto opens: a row a slot of each worker, a slice a stage.
 * uPlot gives the axes and the zoom (drag sideways; double-click shows all); the slices are drawn on its canvas. Pointing
 * at a slice shows its group: what belongs to it stays bright, arrows lead from its samples to it and on to the trainer.
 */

import { element, swatch } from "./dom.js";
import { figure, seconds } from "./format.js";
import { STAGES, resolved } from "./palette.js";
import { onTheme } from "./theme.js";

const FONT = "12px system-ui, sans-serif";
const ROW_PX = 13;
const AXIS_PX = 30;
const LABELS_PX = 124;
const KINDS = [...STAGES, { key: "machine", label: "machine", color: "--sandboxes" }, { key: "step", label: "step", color: "--trainer" }, { key: "wait", label: "trainer waits", color: "--wait" }];

/** @param {{traceEvents: Object[]}} trace */
export function timeline(trace) {
  return new Timeline(read(trace)).node;
}

/**
 * Slices by row, rows by worker from above, arrows by their ends; times in seconds.
 *
 * @returns {{rows: {worker: string, first: boolean, slices: Object[]}[], arrows: Object[], end: number}}
 */
export function read({ traceEvents }) {
  const about = (name) => new Map(traceEvents.filter((event) => event.name === name).map((event) => [event.pid, event.args]));
  const names = about("process_name");
  const order = about("process_sort_index");
  const byTrack = new Map();
  const starts = new Map();
  const arrows = [];
  for (const event of traceEvents) {
    const track = `${event.pid}/${event.tid}`;
    const at = event.ts / 1e6;
    if (event.ph === "X") {
      if (!byTrack.has(track)) byTrack.set(track, { pid: event.pid, tid: event.tid, worker: names.get(event.pid).name, slices: [] });
      byTrack.get(track).slices.push({ name: event.name.split(" ")[0], start: at, end: at + event.dur / 1e6, about: event.args });
    } else if (event.ph === "s") starts.set(event.id, { track, at });
    else if (event.ph === "f") arrows.push({ from: starts.get(event.id), to: { track, at } });
  }
  const place = (row) => [order.get(row.pid)?.sort_index ?? 0, row.worker, row.tid];
  const rows = [...byTrack.values()].sort((one, other) => compare(place(one), place(other)));
  rows.forEach((row, index) => (row.first = row.worker !== rows[index - 1]?.worker));
  const number = new Map(rows.map((row, index) => [`${row.pid}/${row.tid}`, index]));
  for (const { from, to } of arrows) for (const end of [from, to]) end.row = number.get(end.track);
  return { rows, arrows, end: Math.max(0, ...rows.flatMap((row) => row.slices.map((slice) => slice.end))) };
}

function compare(one, other) {
  for (let each = 0; each < one.length; each += 1) {
    const sign = typeof one[each] === "number" ? one[each] - other[each] : one[each].localeCompare(other[each], "en", { numeric: true });
    if (sign !== 0) return sign;
  }
  return 0;
}

class Timeline {
  constructor(content) {
    Object.assign(this, content);
    this.pointed = null;
    this.tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.host = element("div", {
      class: "plot timeline",
      tabindex: "0",
      role: "group",
      "aria-roledescription": "timeline",
      "aria-label": `${this.rows.length} tracks over ${seconds(this.end)}. Arrow keys move, plus and minus zoom, 0 shows all. The tables below tell the same.`,
      on: { keydown: (event) => this.#key(event) },
    });
    const used = new Set(this.rows.flatMap((row) => row.slices.filter((slice) => slice.end > slice.start).map((slice) => slice.name)));
    const legend = KINDS.filter((kind) => used.has(kind.key));
    const button = (label, name, work) => element("button", { type: "button", "aria-label": name, title: name, on: { click: work } }, label);
    this.node = element(
      "div",
      {},
      element("div", { class: "tools" },
        element("ul", { class: "legend" }, legend.map((kind) => element("li", {}, swatch(kind.color), kind.label))),
        button("−", "Zoom out", () => this.#zoom(2)),
        button("+", "Zoom in", () => this.#zoom(0.5)),
        button("All", "Show all", () => this.#show(0, this.end))),
      element("div", { class: "tall" }, this.host),
    );
    new ResizeObserver(() => this.#fit()).observe(this.host);
    const stop = onTheme(() => (this.host.isConnected ? this.#draw() : stop()));
  }

  get #height() {
    return this.rows.length * ROW_PX + AXIS_PX + 8;
  }

  #fit() {
    if (this.plot === undefined) this.#draw();
    else if (this.host.clientWidth > 0) this.plot.setSize({ width: this.host.clientWidth, height: this.#height });
  }

  #draw() {
    if (globalThis.uPlot === undefined) this.host.textContent = "The chart library did not load.";
    if (globalThis.uPlot === undefined || this.host.clientWidth === 0) return;
    this.plot?.destroy();
    this.colors = new Map(KINDS.map((kind) => [kind.key, resolved(kind.color)]));
    const narrow = this.host.clientWidth < 520;
    const axis = { stroke: resolved("--text-2"), font: FONT, ticks: { show: false } };
    this.plot = new uPlot(
      {
        width: this.host.clientWidth,
        height: this.#height,
        padding: [0, 8, 4, 0],
        legend: { show: false },
        scales: { x: { time: false }, y: { dir: -1, range: () => [0, this.rows.length] } },
        axes: [
          { ...axis, side: 0, size: AXIS_PX, grid: { stroke: resolved("--grid"), width: 1 }, values: (_, ticks) => ticks.map((tick) => `${+tick.toFixed(3)} s`) },
          { ...axis, size: narrow ? 64 : LABELS_PX, gap: 6, grid: { show: false },
            splits: () => this.rows.flatMap((row, index) => (row.first ? [index + 0.5] : [])),
            values: (_, ticks) => ticks.map((tick) => short(this.rows[Math.floor(tick)].worker, narrow ? 9 : 18)) },
        ],
        cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
        series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
        hooks: { draw: [() => this.#slices()], setCursor: [() => this.#point()] },
      },
      [[0, this.end], [null, null]],
      this.host,
    );
    this.plot.over.append(this.tip);
    this.plot.over.addEventListener("mouseleave", () => this.#leave());
  }

  #slices() {
    const { ctx, bbox } = this.plot;
    const x = (at) => this.plot.valToPos(at, "x", true);
    const y = (row) => this.plot.valToPos(row, "y", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const inset = devicePixelRatio;
    this.rows.forEach((row, index) => {
      if (row.first && index > 0) line(ctx, bbox.left, y(index), bbox.left + bbox.width, resolved("--grid"));
      for (const slice of row.slices) {
        const left = x(slice.start);
        const right = Math.max(x(slice.end), left + devicePixelRatio);
        if (right < bbox.left || left > bbox.left + bbox.width) continue;
        const nested = slice.name === "wait" ? 0.4 : 0;
        ctx.globalAlpha = this.pointed && !this.#together(slice) ? 0.22 : 1;
        ctx.fillStyle = this.colors.get(slice.name) ?? this.colors.get("step");
        ctx.fillRect(left, y(index + nested) + inset, Math.max(right - left - inset, inset), y(index + 1) - y(index + nested) - 2 * inset);
      }
    });
    ctx.globalAlpha = 1;
    if (this.pointed) this.#arrows(ctx, x, y);
    ctx.restore();
  }

  #together(slice) {
    return slice.about.group === undefined || slice.about.group === this.pointed.about.group;
  }

  /** Those that touch a slice of the group that is pointed at. */
  #arrows(ctx, x, y) {
    ctx.strokeStyle = resolved("--text");
    ctx.lineWidth = devicePixelRatio;
    for (const { from, to } of this.arrows) {
      if (![from, to].some((end) => this.rows[end.row].slices.some((s) => s.about.group === this.pointed.about.group && touches(s, end.at)))) continue;
      const [x0, y0, x1, y1] = [x(from.at), y(from.row + 0.5), x(to.at), y(to.row + 0.5)];
      const bend = Math.max(18 * devicePixelRatio, Math.abs(x1 - x0) / 3);
      ctx.beginPath();
      ctx.moveTo(x0, y0);
      ctx.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
      ctx.stroke();
    }
  }

  #point() {
    const { left, top } = this.plot.cursor;
    const at = this.plot.posToVal(left, "x");
    const slices = left < 0 ? [] : this.rows[Math.floor(this.plot.posToVal(top, "y"))]?.slices ?? [];
    const slice = slices.findLast((each) => touches(each, at)) ?? null;
    const before = this.pointed?.about.group;
    this.pointed = slice?.about.group === undefined ? null : slice;
    this.tip.hidden = slice === null;
    if (slice !== null) this.#tell(slice, left, top);
    if (before !== this.pointed?.about.group) this.plot.redraw(false);
  }

  #tell(slice, left, top) {
    const kind = KINDS.find((each) => each.key === slice.name);
    const rows = Object.entries(slice.about).filter(([, value]) => value !== null && value !== "");
    this.tip.replaceChildren(
      element("strong", {}, kind?.label ?? slice.name),
      element("div", {}, swatch(kind?.color ?? "--trainer"), element("span", {}, "took"), element("b", {}, seconds(slice.end - slice.start))),
      ...rows.map(([key, value]) => element("div", {}, element("span", {}, key), element("b", {}, typeof value === "number" ? figure(value) : String(value)))),
    );
    this.tip.style.setProperty("left", `${left}px`);
    this.tip.style.setProperty("top", `${top}px`);
    this.tip.style.setProperty("transform", left > this.plot.over.clientWidth / 2 ? "translate(calc(-100% - 12px), 8px)" : "translate(12px, 8px)");
  }

  #leave() {
    this.tip.hidden = true;
    if (this.pointed === null) return;
    this.pointed = null;
    this.plot.redraw(false);
  }

  #key(event) {
    const step = (this.plot.scales.x.max - this.plot.scales.x.min) / 5;
    const work = {
      ArrowLeft: () => this.#show(this.plot.scales.x.min - step, this.plot.scales.x.max - step),
      ArrowRight: () => this.#show(this.plot.scales.x.min + step, this.plot.scales.x.max + step),
      "+": () => this.#zoom(0.5),
      "-": () => this.#zoom(2),
      0: () => this.#show(0, this.end),
    }[event.key];
    if (work === undefined || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    work();
  }

  #zoom(factor) {
    const { min, max } = this.plot.scales.x;
    const middle = (min + max) / 2;
    const half = ((max - min) / 2) * factor;
    this.#show(middle - half, middle + half);
  }

  /** Never beyond what there is. */
  #show(from, to) {
    const width = Math.min(to - from, this.end);
    const min = Math.max(0, Math.min(from, this.end - width));
    this.plot.setScale("x", { min, max: min + width });
  }
}

function touches(slice, at) {
  return slice.start <= at && at <= slice.end;
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function line(ctx, left, y, right, color) {
  ctx.strokeStyle = color;
  ctx.lineWidth = 1;
  ctx.beginPath();
  ctx.moveTo(left, y);
  ctx.lineTo(right, y);
  ctx.stroke();
}
