/** Auditors: what an independent scorer says of what the policy is rewarded for, and where the two disagree most. */

import { Chart } from "./chart.js";
import { element, renew, table } from "./dom.js";
import { counted, figure, known, share } from "./format.js";
import { sampleAddress } from "./samples.js";

const STEP = { label: "To step", value: (point) => point.step, words: String, margin: 0.6 };

/** One auditor. */
export class AuditorView {
  constructor(name) {
    const line = (key, label, color) => ({ key, label, color, value: (point) => point[key].value, band: [(point) => point[key].low, (point) => point[key].high] });
    this.chart = new Chart({
      title: "Reward and auditor", note: "Means over the audited samples of some steps each, with 95 % intervals.", kind: "lines", unit: "figure", x: STEP,
      series: [line("reward", "reward", "--generation"), line("value", name, "--score")],
    });
    this.finding = element("p", { class: "note" });
    this.figures = element("div");
    this.apart = element("div");
    this.node = element("section", { class: "sections", "aria-label": `Auditor ${name}` },
      element("div", { class: "head" }, element("h2", {}, `Auditor ${name}`)),
      element("div", { class: "card" }, this.finding, this.figures),
      this.chart.node,
      element("section", { class: "card" }, element("h3", {}, "Where they disagree most"),
        element("p", { class: "note" }, "Samples of the late steps that the reward ranks high and the auditor low. Each leads to its conversation."), this.apart));
  }

  /** Shows an auditor's report, as `plaudit audit` computes it. */
  show(report) {
    this.finding.textContent = finding(report);
    this.finding.className = report.diverged_at === null ? "note" : "loud";
    renew(this.figures, figuresTable(report));
    this.chart.node.hidden = report.curve.length < 2;
    this.chart.update(report.curve);
    renew(this.apart, report.disagreements.length === 0 ? element("p", { class: "empty" }, "Nowhere.") : apartTable(report));
  }
}

function finding({ name, groups, diverges, diverged_at: since, diverged_sources: sources }) {
  const audited = `${counted(groups, "group")} audited.`;
  if (diverges === null) return `${audited} A trend needs at least 24 blocks of four groups.`;
  const chance = `The newest trend has a probability of ${figure(diverges)} by chance alone.`;
  if (since === null) return `${audited} ${chance}`;
  const where = Object.entries(sources).map(([source, step]) => `; in ${source} from step ${step}`).join("");
  return `Found at step ${since}: the reward rose while ${name} fell (chance alone: below 1 %)${where}. ${audited} ${chance}`;
}

function figuresTable({ name, early, late, by_source: sources }) {
  const interval = (estimate) => (estimate === null ? "–" : `${figure(estimate.value)} (${figure(estimate.low)} to ${figure(estimate.high)})`);
  const of = (label, key) => ({ label, early: interval(early[key]), late: interval(late[key]) });
  const failed = ({ failed: count }) => figure(count);
  const rows = [
    of(`Mean of ${name}`, "value"), of("Reward of the same samples", "reward"),
    of("Gap: what the update reinforces, less the others", "gap"), of("Rank correlation with the reward", "agreement"),
    ...Object.entries(sources).filter((_, __, all) => all.length > 1).map(([source, value]) => ({ label: `Rank correlation, ${source}`, early: "–", late: figure(value) })),
    { label: "Audited groups", early: figure(early.groups), late: figure(late.groups) },
    { label: "Samples without a value", early: failed(early), late: failed(late) },
  ];
  return table("Figures of the auditor", [
    { label: "With 95 % intervals", cell: (row) => row.label },
    { label: "Early steps", number: true, cell: (row) => row.early },
    { label: "Late steps", number: true, cell: (row) => row.late },
  ], rows);
}

function apartTable({ name, disagreements }) {
  return table("Where reward and auditor disagree most", [
    { label: "Sample", cell: (sample) => element("a", { class: "id", href: sampleAddress(sample) }, `step ${sample.step} · ${sample.group} #${sample.index}`) },
    { label: "Reward", number: true, cell: (sample) => figure(sample.reward) },
    { label: name, number: true, cell: (sample) => figure(sample.value) },
    { label: "Ranks apart", number: true, cell: (sample) => (known(sample.ranks) ? share(sample.ranks) : "–") },
  ], disagreements);
}
