/** The stored samples of a run: filters, and a list that grows page by page. */

import { element, renew, table } from "./dom.js";
import { figure, known } from "./format.js";
import { OUTCOMES } from "./palette.js";
import { outcomeMark } from "./panels.js";
import { visible } from "./reading.js";
import { load, report } from "./source.js";

const PAGE = 50;
const KEYS = ["first_step", "last_step", "outcome", "lowest", "highest", "data_source", "split", "order", "group", "prompt_id"];
const OUTCOME_CHOICES = [["", "any outcome"], ["failed", "without a score"], ...OUTCOMES.map(({ key, label }) => [key, label])];
const ORDER_CHOICES = [["stored", "as stored"], ["lowest", "lowest score first"], ["highest", "highest score first"]];
const SPLIT_CHOICES = [["", "any split"], ["train", "train"], ["validation", "validation"]];

/** The address of the list with these conditions. */
export function samplesAddress(query) {
  const given = Object.entries(query).filter(([key, value]) => KEYS.includes(key) && value !== "" && value !== null);
  return `#/samples?${new URLSearchParams(given)}`;
}

/** The address of one sample. */
export function sampleAddress({ step, group, index }) {
  return `#/sample/${step}/${encodeURIComponent(group)}/${index}`;
}

/** A page of stored samples. A report carries some, which are searched here. */
export async function search(query, start = null, most = PAGE) {
  if (report === null) return load("samples", { ...query, most, ...(start === null ? {} : { start }) });
  const carried = await load("samples");
  const samples = (carried?.samples ?? []).filter((sample) => matches(sample, query));
  const sign = { lowest: 1, highest: -1 }[query.order];
  if (sign) samples.sort((one, other) => other.step - one.step || sign * ((one.score ?? sign * Infinity) - (other.score ?? sign * Infinity)) || 0);
  return { ...carried, samples, next: null, problem: carried === null ? "The run’s folder holds no stored samples." : "" };
}

function matches(sample, query) {
  const within = (value, least, greatest) => (least === undefined || value >= Number(least)) && (greatest === undefined || value <= Number(greatest));
  const scores = query.lowest !== undefined || query.highest !== undefined;
  return (
    ["group", "data_source", "split", "prompt_id"].every((key) => !query[key] || sample[key] === query[key]) &&
    (!query.outcome || (query.outcome === "failed" ? sample.outcome !== "scored" : sample.outcome === query.outcome)) &&
    within(sample.step, query.first_step, query.last_step) &&
    (!scores || (sample.score !== null && within(sample.score, query.lowest, query.highest)))
  );
}

/** @returns {Promise<Node>} the view with the conditions of an address */
export async function samplesView(parameters) {
  const view = new SamplesView(Object.fromEntries([...parameters].filter(([key, value]) => KEYS.includes(key) && value !== "")));
  await view.start();
  return view.node;
}

class SamplesView {
  constructor(query) {
    this.query = query;
    this.request = 0;
    this.samples = [];
    this.sources = element("datalist", { id: "sources" });
    this.status = element("p", { class: "note", role: "status" });
    this.list = element("div");
    this.steps = element("div");
    this.more = element("button", { type: "button", hidden: true, on: { click: () => this.extend() } }, "Show more");
    this.node = element("div", { class: "sections" },
      element("div", { class: "head" }, element("h2", {}, query.prompt_id ? "One prompt in all steps" : "Samples"),
        query.prompt_id || query.group ? element("a", { href: "#/samples" }, "All samples") : null),
      this.filters(), this.steps,
      element("section", { class: "card", "aria-label": "Stored samples" }, this.status, this.list, element("p", { class: "more" }, this.more)));
  }

  filters() {
    const field = (label, key, input) => element("label", {}, element("span", {}, label), input(key));
    const number = (placeholder, attributes) => (key) =>
      element("input", { type: "number", name: key, value: this.query[key] ?? "", placeholder, ...attributes });
    const choice = (choices) => (key) =>
      element("select", { name: key }, choices.map(([value, label]) => element("option", { value, selected: (this.query[key] ?? choices[0][0]) === value }, label)));
    const source = (key) => element("input", { type: "text", name: key, value: this.query[key] ?? "", placeholder: "any source", list: "sources" });
    const form = element("form", { class: "card filters", "aria-label": "Conditions", on: { change: () => this.refine(form), submit: (event) => event.preventDefault() } },
      field("From step", "first_step", number("first", { min: 0, step: 1 })), field("to step", "last_step", number("newest", { min: 0, step: 1 })),
      field("Outcome", "outcome", choice(OUTCOME_CHOICES)),
      field("Score from", "lowest", number("any", { step: "any" })), field("to", "highest", number("any", { step: "any" })),
      field("Source", "data_source", source), field("Split", "split", choice(SPLIT_CHOICES)), field("In each step", "order", choice(ORDER_CHOICES)),
      this.sources);
    return form;
  }

  refine(form) {
    if (!form.checkValidity()) return form.reportValidity();
    const kept = Object.fromEntries(["group", "prompt_id"].filter((key) => this.query[key]).map((key) => [key, this.query[key]]));
    this.query = { ...kept, ...Object.fromEntries([...new FormData(form)].filter(([key, value]) => value !== "" && value !== "stored" && KEYS.includes(key))) };
    history.replaceState(null, "", samplesAddress(this.query));
    return this.start().catch(() => this.lost());
  }

  async start() {
    this.samples = [];
    this.open = 0;
    this.next = null;
    await this.extend();
  }

  /** Loads the next page. A page may be empty when conditions are rare: then the search goes on with older steps. */
  async extend() {
    const request = ++this.request;
    this.more.hidden = true;
    let found = 0;
    do {
      this.status.textContent = this.next === null ? "Searching …" : `Searching from step ${this.next.split(".")[0]} …`;
      const page = await search(this.query, this.next).catch((error) => error);
      if (request !== this.request) return;
      if (page === null || page instanceof Error) return this.lost(page);
      const open = page.open ?? [];
      found += page.samples.length + open.length;
      this.next = page.next;
      this.open += open.length;
      this.samples.push(...open, ...page.samples);
      this.show(page);
    } while (found === 0 && this.next !== null);
  }

  lost(error) {
    this.status.textContent = error?.refusal ?? "The service does not respond. Change a condition to try again.";
  }

  show(page) {
    const stored = !known(page.first_step) ? "" : ` Steps ${page.first_step} to ${page.last_step} are stored.`;
    const count = `${this.samples.length}${this.next === null ? "" : " or more"} samples.`;
    const open = this.open === 0 ? "" : ` ${this.open} are of the open step: their texts are stored when it closes.`;
    const some = report ? " A report holds some samples of its newest steps; plaudit samples prints all." : "";
    this.status.textContent = (this.open === 0 && page.problem) || (this.samples.length === 0 && this.next === null ? `No sample fulfils these conditions.${stored}${some}` : count + open + stored + some);
    this.more.hidden = this.next === null;
    this.sources.replaceChildren(...[...new Set(this.samples.map((sample) => sample.data_source))].sort().map((value) => element("option", { value })));
    renew(this.list, this.samples.length === 0 ? element("div") : samplesList(this.samples));
    this.steps.replaceChildren(...(this.query.prompt_id && this.samples.length > 0 ? [byStep(this.samples)] : []));
  }
}

/** Samples, a row each; the current one is marked. */
export function samplesList(samples, current = null) {
  return table("Samples", [
    { label: "Sample", cell: (sample) => sampleLink(sample, current) },
    { label: "Source", wide: true, cell: (sample) => visible(sample.data_source) },
    { label: "Outcome", cell: (sample) => outcomeMark(sample.outcome) },
    { label: "Score", number: true, cell: (sample) => figure(sample.score) },
    { label: "Tokens", number: true, wide: true, cell: (sample) => figure(sample.response_tokens) },
    { label: "Turns", number: true, wide: true, cell: (sample) => figure(sample.turns) },
    { label: "Prompt and response", cell: preview },
  ], samples, "stored");
}

function sampleLink(sample, current) {
  const words = `step ${sample.step} · ${sample.group} #${sample.index}`;
  if (sample.open) return element("span", { class: "id" }, visible(`step ${sample.step}, open · ${sample.group} #${sample.index}`));
  const here = current !== null && sample.group === current.group && sample.index === current.index;
  return element("a", { class: "id", href: sampleAddress(sample), "aria-current": here ? "true" : null }, visible(words));
}

function preview(sample) {
  return element("div", { class: "preview" },
    element("p", { class: "quiet", dir: "auto" }, visible(oneLine(sample.prompt))),
    element("p", { dir: "auto" }, visible(oneLine(sample.response || sample.reason))));
}

function oneLine(text) {
  return text.replace(/\s+/g, " ").slice(-160);
}

/** The scores of one prompt, a row a step. */
function byStep(samples) {
  const steps = [...new Set(samples.map((sample) => sample.step))];
  const scores = (step) => samples.filter((sample) => sample.step === step && sample.score !== null).map((sample) => sample.score);
  const mean = (values) => (values.length === 0 ? null : values.reduce((sum, value) => sum + value, 0) / values.length);
  return element("section", { class: "card" }, element("h3", {}, "Scores by step"),
    table("Scores of this prompt by step", [
      { label: "Step", cell: (step) => element("a", { href: `#/step/${step}` }, String(step)) },
      { label: "Samples", number: true, cell: (step) => figure(samples.filter((sample) => sample.step === step).length) },
      { label: "Mean score", number: true, cell: (step) => figure(mean(scores(step))) },
      { label: "Lowest", number: true, cell: (step) => figure(Math.min(...scores(step))) },
      { label: "Highest", number: true, cell: (step) => figure(Math.max(...scores(step))) },
    ], steps));
}
