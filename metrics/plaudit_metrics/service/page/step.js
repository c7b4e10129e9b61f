/** One step: its verdict and why, its timeline, its stages, scorers and slowest samples, and every figure. */

import { details, element, table } from "./dom.js";
import { counted, figure, moment } from "./format.js";
import { lacking, section } from "./overview.js";
import { samplesTable, scorersTable, stagesTable, verdictPanel } from "./panels.js";
import { samplesAddress } from "./samples.js";
import { load, report } from "./source.js";
import { timeline } from "./timeline.js";

const SLOWEST = 20;
const DRAWN = 60;

/** @returns {Promise<Node>} a message when the step is not known */
export async function stepView(number) {
  const [step, { steps }, stored, listed, trace] = await Promise.all([
    load(`steps/${number}`),
    load("steps", { newest: 1 }),
    report === null ? null : load("samples"),
    load(`steps/${number}/samples`, { slowest: SLOWEST }),
    load(`steps/${number}/trace`, { slowest: DRAWN }),
  ]);
  const last = steps.at(-1)?.step ?? 0;
  const first = report === null ? 1 : steps[0]?.step ?? 0;
  if (step === null) return element("div", { class: "sections" }, links(number, first, last), element("p", { class: "card empty" }, `Step ${number} is not available: it has not closed yet, was rolled back, or is too old.`));
  const samples = listed?.samples ?? [];
  const file = `api/v1/steps/${number}/trace`;
  return element(
    "div",
    { class: "sections" },
    links(number, first, last, step),
    verdictPanel(step, { reasoned: true }),
    section("Timeline", samples.length === 0 ? "" : `The ${counted(Math.min(DRAWN, step.num_samples), "slowest sample")}. Drag to zoom, point at a slice to see its group.`,
      trace === null || samples.length === 0 ? lacking() : timeline(trace),
      trace === null || document.getElementById("answers") ? null : element("p", { class: "note" }, "Full timeline: ", element("a", { href: file }, "trace file"), " for ui.perfetto.dev")),
    section("Stages", "Time that samples spent in each stage.", stagesTable(step)),
    section("Scorers", "Last attempts, waits and failures.", scorersTable(step)),
    section("Slowest samples", samples.length === 0 ? "" : "From admission to the trainer. Click a bar for details.", samples.length === 0 ? lacking() : samplesTable(samples)),
    report !== null && !stored?.samples.some((sample) => sample.step === number) ? null
      : element("p", { class: "note" }, element("a", { href: samplesAddress({ first_step: number, last_step: number }) }, `${report === null ? "All" : "Some"} stored samples of step ${number}`)),
    section("Every figure", `The keys of docs/metrics.md.${step.abridged ? " This report has all of them only for its newest steps; of this one it has those that are shown above." : ""}`, details("Table", () => everyFigure(step)).node),
  );
}

function links(number, first, last, step = null) {
  return element(
    "nav",
    { class: "head steps", "aria-label": "Steps" },
    element("a", { href: "#/" }, "← Overview"),
    element("span", { class: "quiet" }, step === null ? "" : `closed ${moment(step.closed)}`),
    element("span", {},
      number > first ? element("a", { href: `#/step/${number - 1}`, rel: "prev" }, `Step ${number - 1}`) : null,
      " ", number < last ? element("a", { href: `#/step/${number + 1}`, rel: "next" }, `Step ${number + 1}`) : null),
  );
}

function everyFigure(step) {
  const rows = Object.entries(step).filter(([, value]) => typeof value !== "object").sort(([one], [other]) => one.localeCompare(other));
  return table("Every figure", [
    { label: "Key", cell: ([key]) => element("code", {}, key) },
    { label: "Value", number: true, cell: ([, value]) => (typeof value === "number" ? figure(value) : String(value)) },
  ], rows);
}
