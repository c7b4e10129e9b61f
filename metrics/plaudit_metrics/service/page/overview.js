/** The overview: the newest step's verdict and the run's charts. Built once, then updated. */

import { AuditorView } from "./audits.js";
import { Chart } from "./chart.js";
import { element, renew, swatch, table } from "./dom.js";
import { clock, counted, figure, moment, seconds, share } from "./format.js";
import { CAUSES, LINES, OUTCOMES, QUEUES, verdictOf } from "./palette.js";
import { causeSeconds, samplesTable, scorersOf, scorersTable, stepSeconds, unscoredPanel, verdictPanel } from "./panels.js";
import { ServiceView } from "./service.js";
import { report } from "./source.js";

export const STEP = { label: "Step", value: (step) => step.step, words: String, margin: 0.6 };
const TIME = { label: "At", value: (look) => look.time, words: clock, time: true, margin: 0 };
const CHOICES = [30, 60, 150, 500];
const SLOWEST = 10;
const MOST_LINES = LINES.length;
const MOST_ROWS = 200;
/** The exit code of a run that its user stopped with Ctrl-C. */
const INTERRUPTED = 130;
/** Queues that a scoring service does not have. */
const OF_TRAINING = ["prompts", "ready"];
const NO_FIGURES = "No step has closed: there are no figures.";

export class Overview {
  /** @param {function(number): void} choose called with how many steps are to be shown */
  constructor(count, choose) {
    const open = (step) => (location.hash = `#/step/${step.step}`);
    const overSteps = (spec) => new Chart({ x: STEP, pick: open, link: stepLink, ...spec });
    const overTime = (spec) => new Chart({ kind: "lines", x: TIME, series: queueSeries(spec.of), ...spec });
    this.verdict = element("div", { "aria-live": "polite" });
    this.open = element("div");
    this.time = overSteps({
      title: "Where the time went",
      note: "Seconds of each step. Click a bar to open its step.",
      kind: "bars",
      height: 260,
      unit: "seconds",
      series: CAUSES.map((cause) => ({ ...cause, value: (step) => causeSeconds(step, cause.key) })),
    });
    this.reward = overSteps({
      title: "Reward", note: "Mean of the step, with one standard deviation on either side.", kind: "lines", unit: "figure",
      series: [{ key: "reward", label: "mean", color: "--generation", value: (step) => step["reward/mean"], band: deviation("reward") }],
    });
    this.validation = keyedChart("validation", overSteps, "val/", "/reward", {
      title: "Validation reward", note: "Mean of each data source, at the steps with a validation.",
    });
    this.values = keyedChart("values", overSteps, "reward_pipeline/scorer/", "/value/mean", {
      title: "Values of the scorers", note: "Mean of the step.", isName: (scorer) => !scorer.includes("/"),
    });
    this.drift = keyedChart("drift", overSteps, "drift/", "/value", {
      title: "Drift of the scorers", note: "How much more each gave the same samples of the first step when it was asked again, with the 95 % interval.",
      band: (scorer) => [(step) => step[`drift/${scorer}/value_low`], (step) => step[`drift/${scorer}/value_high`]],
    });
    this.audits = element("div", { class: "sections", id: "audits" });
    this.staleness = overSteps({
      title: "Staleness", note: "Policy versions behind the update: mean, minimum and maximum.", kind: "lines", unit: "figure", least: 1,
      series: [{ key: "staleness", label: "mean", color: "--group_scorer", value: ofStaleness("mean"), band: [ofStaleness("min"), ofStaleness("max")] }],
    });
    this.outcomes = overSteps({
      title: "Samples without a score", note: "Share of each step’s samples, by outcome.", kind: "bars", unit: "share", least: 0.02,
      series: OUTCOMES.filter((kind) => kind.key !== "scored").map((kind) => ({ ...kind, value: outcomeShare(kind.key) })),
    });
    this.depth = overTime({ title: "Queue depth", note: "Entries that no consumer has read yet.", unit: "figure", least: 4, of: "undelivered" });
    this.age = overTime({ title: "Queue age", note: "Age of the oldest entry that no consumer has read.", unit: "seconds", least: 1, of: "oldest_undelivered_s" });
    this.inFlight = element("div");
    this.workers = element("div");
    this.scorers = element("div");
    this.samples = element("div");
    this.unscored = element("div");
    this.empty = element("p", { class: "card empty", hidden: true }, report === null ? "No step has closed yet. The first one will appear here." : NO_FIGURES);
    this.ended = element("div", {}, endedPanel(report?.ended ?? null));
    this.auditors = new Map();
    this.service = null;
    this.ofService = element("div");
    const picker = element("select", { id: "count", on: { change: (event) => choose(Number(event.target.value)) } },
      CHOICES.map((each) => element("option", { value: each, selected: each === count }, `${each} steps`)));
    this.ofSteps = element("div", { class: "sections", hidden: true },
      this.verdict,
      element("div", { class: "head" }, element("h2", {}, "The run"), element("label", { for: "count" }, "Newest ", picker)),
      this.time.node,
      element("div", { class: "pair" }, this.reward.node, this.staleness.node),
      element("div", { class: "pair" }, this.values.node, this.validation.node),
      this.audits, this.drift.node);
    this.rest = element("div", { class: "sections", hidden: true },
      element("div", { class: "pair" }, this.outcomes.node),
      section("Scorers", this.scorersNote = element("span"), this.scorers),
      section("Slowest samples", this.samplesNote = element("span"), this.samples));
    this.queues = element("div", { class: "sections" },
      element("div", { class: "head" }, element("h2", {}, "Now")),
      section("Processes", "Those that sent a heartbeat in the last 20 seconds, and what each does or waits for.", this.workers),
      section("In flight now", "Work that waits or is in progress, by stage, with the age of the oldest.", this.inFlight),
      element("div", { class: "pair" }, this.depth.node, this.age.node));
    this.reported = element("div", { class: "sections" });
    this.node = element("div", { class: "sections" }, this.ended, this.open, this.unscored, this.empty, this.ofService, this.ofSteps, report ? null : this.queues, this.rest, this.reported);
  }

  /** Shows steps, oldest first, of which the newest is known in detail. */
  showSteps(steps, newest, verdict, samples) {
    for (const part of [this.ofSteps, this.rest]) part.hidden = steps.length === 0;
    this.empty.hidden = steps.length > 0;
    if (steps.length === 0) return;
    const opened = this.verdict.firstChild === null ? report !== null : this.verdict.querySelector("details[open]") !== null;
    this.verdict.replaceChildren(...(newest.step === 0 ? [] : [verdictPanel(newest, { recent: verdict, reasoned: opened })])); // step 0 is a validation
    for (const chart of [this.time, this.reward, this.staleness, this.outcomes]) chart.update(steps);
    for (const keyed of [this.values, this.validation, this.drift]) keyed.update(steps);
    this.scorersNote.textContent = `${counted(scorersOf(newest).length, "scorer")} of the newest step.`;
    renew(this.scorers, scorersTable(newest));
    this.samplesNote.textContent = samples.length === 0 ? "" : "Of the newest step, from admission to the trainer. Click a bar for details.";
    renew(this.samples, samples.length === 0 ? lacking() : samplesTable(samples.slice(0, SLOWEST)));
  }

  /** Shows a scoring service, which closes no steps; null: the run trains, and its page has no part for a service. */
  showService(service) {
    this.ofService.hidden = service === null;
    if (service === null) return;
    if (this.service === null) {
      this.service = new ServiceView();
      this.ofService.append(this.service.node);
    }
    this.service.show(service);
    this.empty.hidden = true;
  }

  /** Shows what auditors say of the run, each in a part of its own. */
  showAudits(reports) {
    for (const each of reports) {
      if (!this.auditors.has(each.name)) this.auditors.set(each.name, new AuditorView(each.name));
      this.auditors.get(each.name).show(each);
    }
    this.audits.replaceChildren(...reports.map((each) => this.auditors.get(each.name).node));
  }

  /** Shows why samples of the open step have no score. */
  showUnscored(counts, since) {
    this.unscored.replaceChildren(...unscoredPanel(counts, since));
  }

  /** Shows what the open step waits for now, or how the run ended. */
  showOpen(open, ended) {
    this.ended.replaceChildren(...endedPanel(ended));
    this.open.hidden = ended !== null;
    if (ended !== null) this.empty.textContent = NO_FIGURES;
    if (this.open.textContent === open.text) return;
    this.open.replaceChildren(element("p", { class: `card now ${open.waits_for}` }, open.text[0].toUpperCase() + open.text.slice(1)));
  }

  /** Shows the looks at the queues, oldest first, and the workers of now. */
  showQueues(looks, workers, { away, isService }) {
    const shown = isService ? looks.map(ofScoring) : looks;
    this.depth.update(shown);
    this.age.update(shown);
    renew(this.inFlight, away ? unknown("what is in work") : inFlightTable(looks.at(-1)?.streams ?? {}, workers, isService));
    renew(this.workers, away ? unknown("which processes live") : workersTable(workers));
  }

  /** Shows what only a report contains: the ledger, and every step with its verdict. */
  showReport(steps, ledger) {
    const rows = [...steps].reverse();
    const all = report.steps;
    this.reported.replaceChildren(
      machineCost(steps),
      ledger === null ? "" : section("Ledger", "Every admitted group, by how it ended.", ledgerList(ledger)),
      section("All steps", `${all === rows.length ? figure(all) : `The newest ${figure(rows.length)} of ${figure(all)}`} closed steps, newest first.`, growing(rows, (shown) => table("All steps", [
        { label: "Step", cell: stepLink },
        { label: "Waited for", cell: (step) => element("span", {}, swatch(verdictOf(step.verdict).color), step.verdict) },
        { label: "Reward", number: true, cell: (step) => figure(step["reward/mean"]) },
        { label: "Step", number: true, cell: (step) => seconds(stepSeconds(step)) },
        { label: "Waited", number: true, cell: (step) => seconds(step.trainer_wait_s) },
        { label: "Waited for rewards", number: true, cell: (step) => seconds(step.exposed_reward_s) },
        { label: "Staleness", number: true, cell: (step) => figure(ofStaleness("mean")(step)) },
        { label: "Without a score", number: true, cell: (step) => share(step["reward_pipeline/masked_share"]) },
        { label: "Closed", number: true, cell: (step) => moment(step.closed) },
      ], shown))),
    );
  }
}

/** What the machines of all shown steps held; nothing in a job without. */
function machineCost(steps) {
  const hours = steps.map((step) => step["reward_pipeline/sandbox/cpu_hours"]).filter((value) => value !== undefined);
  if (hours.length === 0) return "";
  const all = hours.reduce((sum, value) => sum + value, 0);
  return section("Machines of samples", "CPUs that they held, from their start until their groups ended.",
    element("dl", { class: "figures" }, element("div", {}, element("dt", {}, "CPU-hours"), element("dd", {}, figure(all), element("small", {}, `${figure(all / hours.length)} a step`)))));
}

/** A long table: its first rows, and a button that shows the others. */
function growing(rows, tableOf) {
  if (rows.length <= MOST_ROWS) return tableOf(rows);
  const host = element("div", {}, tableOf(rows.slice(0, MOST_ROWS)));
  const more = element("button", { type: "button", on: { click: () => { host.replaceChildren(tableOf(rows)); more.remove(); } } }, `Show all ${figure(rows.length)}`);
  return [host, element("p", { class: "more" }, more)];
}

export function stepLink(step) {
  return element("a", { href: `#/step/${step.step}` }, String(step.step));
}

export function lacking() {
  return element("p", { class: "empty" }, report
    ? "This report does not contain the samples of this step: they were not stored, or the step is too old."
    : "The samples of this step are not available: it closed before this service started.");
}

/** A card with a heading. */
export function section(title, note, ...content) {
  return element("section", { class: "card" }, element("h3", {}, title), element("p", { class: "note" }, note), content);
}

/** A look at a service, which has no queues of training. */
function ofScoring(look) {
  return { ...look, streams: Object.fromEntries(Object.entries(look.streams).filter(([name]) => !OF_TRAINING.includes(name))) };
}

function queueSeries(of) {
  return QUEUES.map((queue) => ({ ...queue, value: (look) => look.streams[queue.key]?.[of] }));
}

function deviation(key) {
  const side = (sign) => (step) => (step[`${key}/std`] === undefined ? null : step[`${key}/mean`] + sign * step[`${key}/std`]);
  return [side(-1), side(1)];
}

/**
 * A chart with one line for each `<name>` of the keys `<before><name><after>`. It is built anew when another name appears, and
 * hidden while no step has one. `isName` refuses what only looks like a name, such as the extra "value" of a scorer.
 */
function keyedChart(id, chartOf, before, after, { band, isName = () => true, ...spec }) {
  const node = element("div", { id, hidden: true });
  const line = { kind: "lines", unit: "figure" };
  const series = (name, index) => ({ key: name, label: name, color: LINES[index], value: (step) => step[before + name + after], band: band?.(name) });
  let names = "";
  let chart = null;
  const namesOf = (steps) => {
    const keys = steps.flatMap((step) => Object.keys(step).filter((key) => key.startsWith(before) && key.endsWith(after)));
    return [...new Set(keys)].map((key) => key.slice(before.length, -after.length)).filter(isName).sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  };
  const update = (steps) => {
    const found = namesOf(steps);
    node.hidden = found.length === 0;
    if (found.length === 0) return;
    if (names !== found.join("\n")) {
      names = found.join("\n");
      chart = found.length > MOST_LINES ? multiples(spec, found.map((name) => chartOf({ ...line, title: name, note: "", height: 90, series: [series(name, 0)] })))
        : chartOf({ ...line, ...spec, legend: true, series: found.map(series) });
      node.replaceChildren(chart.node);
    }
    chart.update(steps.filter((step) => namesOf([step]).length > 0));
  };
  return { node, update };
}

/** Small charts under one heading, each with an axis of its own: more lines in one chart could not be told apart. */
function multiples({ title, note }, charts) {
  const heading = element("header", {}, element("h3", {}, title), element("p", { class: "note" }, `${note} Each of the ${charts.length} has an axis of its own.`));
  const node = element("section", { class: "card multiples" }, heading, charts.map((chart) => chart.node));
  return { node, update: (rows) => charts.forEach((chart) => chart.update(rows)) };
}

function ofStaleness(statistic) {
  return (step) => step[`reward_pipeline/staleness/${statistic}`];
}

function outcomeShare(outcome) {
  return (step) => (step[`reward_pipeline/outcome/${outcome}`] ?? 0) / (step.num_samples || 1);
}

function unknown(what) {
  return element("p", { class: "empty" }, `Redis does not respond: nobody knows ${what}.`);
}

/** One row for each stream that the run has, and one for each scorer with the calls that have not ended. */
function inFlightTable(streams, workers, isService) {
  const rows = QUEUES.filter((queue) => streams[queue.key] && !(isService && OF_TRAINING.includes(queue.key))).map((queue) => {
    const { undelivered, in_flight: inWork, oldest_undelivered_s: waits, oldest_in_flight_s: works } = streams[queue.key];
    return { label: queue.label, color: queue.color, waiting: undelivered, waits, inWork, works };
  });
  const scorers = new Map();
  for (const worker of workers) {
    for (const [name, work] of Object.entries(worker.scorers ?? {})) {
      const { waiting = 0, inWork = 0, works = 0 } = scorers.get(name) ?? {};
      const held = work.waiting ?? 0;
      scorers.set(name, { waiting: waiting + held, inWork: inWork + work.in_flight - held, works: Math.max(works, work.oldest_s) });
    }
  }
  const machines = machinesOf(workers);
  if (machines !== null) rows.push({ label: "machines of samples", color: "--sandboxes", works: null, ...machines });
  for (const [name, work] of scorers) rows.push({ label: `scorer ${name}`, color: "--score", waits: null, ...work });
  const aged = (count, age) => element("span", {}, figure(count), count > 0 && age !== null ? element("small", {}, `oldest ${seconds(age)}`) : null);
  return table("In flight now", [
    { label: "Stage", cell: (row) => element("span", {}, swatch(row.color), row.label) },
    { label: "Waiting", number: true, cell: (row) => aged(row.waiting, row.waits) },
    { label: "In work", number: true, cell: (row) => aged(row.inWork, row.works) },
  ], rows, "flight");
}

/** Those that wait for a place for their machine, and the machines that there are; null in a job without. */
function machinesOf(workers) {
  const of = (role) => workers.filter((worker) => worker.role === role && worker.sandboxes).map((worker) => worker.sandboxes);
  const [rollouts, trainer] = [of("rollout"), of("trainer")];
  if (rollouts.length + trainer.length === 0) return null;
  const sum = (works, count) => works.reduce((all, work) => all + (work[count] ?? 0), 0);
  const waiting = sum(rollouts, "waiting");
  const oldest = Math.max(0, ...rollouts.map((work) => work.oldest_wait_s ?? 0));
  const inWork = Math.max(sum(trainer, "held"), sum(rollouts, "held") + sum(rollouts, "starting"));
  return { waiting, waits: oldest, inWork };
}

/** How the run ended; nothing while it goes on, or when it is done. */
function endedPanel(ended) {
  if (ended === null || ended.code === 0) return [];
  return [element("section", { class: "card now ended" }, element("h2", {}, ended.code === INTERRUPTED ? "The run was stopped" : "The run failed"),
    element("p", {}, ended.message), element("p", { class: "note" }, `Exit code ${ended.code}, ${moment(ended.ended)}.`))];
}

/** What a process does or waits for, in words. */
function doing(worker) {
  if (worker.problem) return worker.problem;
  if (worker.doing) return worker.doing;
  if (worker.loading) return `loads the weights ${worker.loading}`;
  if (worker.asleep) return "sleeps during the update";
  if (worker.ready === false) return STARTING[worker.role] ?? "starts";
  if (worker.circuits_open?.length) return `does not ask ${worker.circuits_open.join(", ")}, which fails`;
  if (worker.in_agents) {
    const { waiting = 0, starting = 0 } = worker.sandboxes ?? {};
    const machines = [waiting && `${waiting} for a place for a machine`, starting && `${starting} for a machine to start`].filter(Boolean);
    return `${counted(worker.in_agents, "sample")} in tools${machines.length ? `, of which wait ${machines.join(", ")}` : ""}`;
  }
  return (worker.busy > 0 ? { rollout: "generates", reward: "scores" } : { trainer: "waits for groups", rollout: "waits for prompts", reward: "waits for samples" })[worker.role] ?? "";
}

const STARTING = {
  rollout: "starts its engine, or waits for the first weights",
  reward: "starts its scorers, or waits for their servers",
  model: "loads its model",
};

function workersTable(workers) {
  if (workers.length === 0) return element("p", { class: "empty" }, "No process has sent a heartbeat.");
  const state = (worker) => (worker.ready === false ? "starting" : worker.busy > 0 || worker.doing ? "busy" : "idle");
  const slots = (worker) => element("span", { class: "slots" },
    element("span", { class: "meter", "aria-hidden": "true" }, element("span", { style: { width: `${(100 * (worker.busy ?? 0)) / (worker.slots || 1)}%` } })),
    worker.slots ? `${worker.busy ?? 0} of ${worker.slots}` : "–");
  const ordered = [...workers].sort((one, other) => one.worker.localeCompare(other.worker, "en", { numeric: true }));
  return table("Processes", [
    { label: "Worker", cell: (worker) => element("span", { class: "id" }, worker.worker) },
    { label: "State", cell: (worker) => element("span", { class: `state ${state(worker)}` }, state(worker)) },
    { label: "Slots in use", cell: slots },
    { label: "Policy", wide: true, cell: (worker) => worker.version || "–" },
    { label: "Now", cell: doing },
  ], ordered, "stacked");
}

function ledgerList(ledger) {
  const { problems = [], as_of: asOf, ...counts } = ledger;
  return [
    element("p", {}, problems.length === 0 ? "The counts add up." : `The counts do not add up: ${problems.join("; ")}`),
    element("dl", { class: "figures" }, Object.entries(counts).filter(([, count]) => typeof count === "number").map(([name, count]) =>
      element("div", {}, element("dt", {}, name.replaceAll("_", " ").replace(":", ": ")), element("dd", {}, figure(count))))),
  ];
}
