/** A scoring service: how much it scores and how fast, for whom, by which scorers and judges, and its newest samples. */

import { Chart } from "./chart.js";
import { element, renew, swatch, table } from "./dom.js";
import { clock, figure, seconds, share } from "./format.js";
import { outcomeMark } from "./panels.js";

const MINUTE = { label: "At", value: (minute) => minute.time, words: clock, time: true, margin: 30 };

export class ServiceView {
  constructor() {
    this.rate = new Chart({
      title: "Samples a minute", note: "Of the last hour. The newest minute is not over.", kind: "bars", x: MINUTE, unit: "figure", least: 4,
      series: [
        { key: "scored", label: "scored", color: "--generation", value: (minute) => minute.scored },
        { key: "unscored", label: "without a score", color: "--score", value: (minute) => minute.unscored },
      ],
    });
    this.parts = Object.fromEntries(["figures", "scorers", "callers", "judges", "newest"].map((name) => [name, element("div")]));
    const card = (title, note, part) => element("section", { class: "card" }, element("h3", {}, title), element("p", { class: "note" }, note), part);
    this.judges = card("Judges", "Requests and tokens since the service began.", this.parts.judges);
    this.node = element("div", { class: "sections" },
      element("section", { class: "card" }, element("h2", {}, "The service"), this.parts.figures),
      this.rate.node,
      card("Scorers", "Of the newest samples: seconds of a score, with its waits and retries.", this.parts.scorers),
      card("Callers", "Of the newest samples: seconds from a request to its score.", this.parts.callers),
      this.judges,
      card("Newest samples", "As they ended.", this.parts.newest));
  }

  /** Shows what `/api/v1/service` answers. */
  show(service) {
    this.rate.update(service.minutes);
    renew(this.parts.figures, figuresOf(service));
    renew(this.parts.scorers, scorers(service.scorers));
    renew(this.parts.callers, callers(service.callers));
    this.judges.hidden = service.judges.length === 0;
    renew(this.parts.judges, judges(service.judges));
    renew(this.parts.newest, newest(service.newest));
  }
}

function figuresOf({ samples, outcomes, minutes, callers: all }) {
  const last = minutes.at(-2); // the newest has not ended
  const shown = [
    ["Rate", last === undefined ? "–" : figure(last.scored + last.unscored), "samples in the last whole minute"],
    ["Scored", share((outcomes.scored ?? 0) / samples), samples === 1 ? "of the only sample" : `of the newest ${figure(samples)} samples`],
    ["Callers", figure(all.length), "of the newest samples"],
  ];
  return element("dl", { class: "figures" }, shown.map(([name, value, note]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, note)))));
}

const times = [["p50", "p50_s"], ["p95", "p95_s"], ["Slowest", "max_s"]].map(([label, key]) => ({ label, number: true, wide: key === "p50_s", cell: (row) => seconds(row[key]) }));

function scorers(rows) {
  const failed = ({ outcomes }) => Object.entries(outcomes).filter(([outcome]) => outcome !== "scored");
  return table("Scorers", [
    { label: "Scorer", cell: (row) => element("span", { class: "id" }, row.scorer) },
    { label: "Value, mean", number: true, cell: (row) => figure(row.value) },
    ...times,
    { label: "Not scored", cell: (row) => failed(row).map(([outcome, count]) => `${outcome.replace("_", " ")} ${count}`).join(", ") || "–" },
  ], rows);
}

function callers(rows) {
  return table("Callers", [
    { label: "Caller", cell: (row) => element("span", { class: "id" }, row.caller) },
    { label: "Samples", number: true, cell: (row) => figure(row.samples) },
    { label: "Without a score", number: true, cell: (row) => figure(row.unscored) },
    ...times,
    { label: "Newest", number: true, wide: true, cell: (row) => clock(row.newest) },
  ], rows);
}

function judges(rows) {
  const counts = (numbers) => Object.entries(numbers).map(([name, count]) => `${name} ${figure(count)}`).join(", ") || "–";
  return table("Judges", [
    { label: "Judge", cell: (row) => element("span", { class: "id" }, row.judge) },
    { label: "State", cell: (row) => element("span", {}, swatch(row.circuit_open ? "--score" : "--generation"), row.circuit_open ? "not asked: it fails" : "asked") },
    { label: "Requests", cell: (row) => counts(row.requests) },
    { label: "Tokens", cell: (row) => counts(row.tokens) },
  ], rows);
}

function newest(rows) {
  return table("Newest samples", [
    { label: "Ended", cell: (row) => clock(row.time) },
    { label: "Caller", cell: (row) => element("span", { class: "id" }, row.caller) },
    { label: "Sample", cell: (row) => element("span", { class: "id" }, `${row.id} #${row.index}`) },
    { label: "Outcome", cell: (row) => outcomeMark(row.outcome) },
    { label: "Score", number: true, cell: (row) => figure(row.value) },
    { label: "Took", number: true, cell: (row) => seconds(row.seconds) },
    { label: "Reason", cell: (row) => row.reason },
  ], rows, "stacked");
}
