/** The page: loads what there is, goes on loading what is new, and shows the overview or the step that the address names. */

import { element } from "./dom.js";
import { moment } from "./format.js";
import { Overview } from "./overview.js";
import { sampleView } from "./sample.js";
import { samplesView } from "./samples.js";
import { follow, load, report } from "./source.js";
import { stepView } from "./step.js";
import { startTheme } from "./theme.js";

const HOUR_S = 3600;
const SLOWEST = 10;

const content = document.getElementById("content");
const state = { run: "", count: 60, newest: "", looks: [] };
const overview = new Overview(state.count, (count) => {
  state.count = count;
  showSteps().catch(() => {}); // the next look for news tells that the service is lost
});

async function showSteps() {
  const { run, steps } = await load("steps", { newest: state.count });
  name(run);
  if (steps.length === 0) return overview.showSteps([], null, null, []);
  const newest = steps.at(-1);
  const path = `steps/${newest.step}`;
  const [detail, verdict, listed, audits] = await Promise.all([load(path), load("verdict"), load(`${path}/samples`, { slowest: SLOWEST }), load("audits")]);
  overview.showSteps(report ? steps.slice(-state.count) : steps, { ...newest, ...detail }, verdict, listed?.samples ?? []);
  overview.showAudits(audits?.auditors ?? []);
  if (report) overview.showReport(steps, await load("ledger"));
}

function name(run) {
  state.run = run;
  document.getElementById("run").textContent = run;
  entitle();
}

function entitle() {
  const step = stepOf(location.hash);
  const samples = location.hash.startsWith("#/sample");
  for (const link of document.querySelectorAll("#views a")) {
    if ((link.hash === "#/samples") === samples) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = [samples ? "Samples" : step === null ? null : `Step ${step}`, state.run, "Plaudit"].filter(Boolean).join(" · ");
}

/** The step that an address names; null where it names none. */
function stepOf(hash) {
  return /^#\/step\/(\d+)$/.exec(hash)?.[1] ?? null;
}

/** The view that an address names. */
async function viewOf(hash) {
  const step = stepOf(hash);
  if (step !== null) return stepView(Number(step));
  const sample = /^#\/sample\/(\d+)\/([^/]+)\/(\d+)$/.exec(hash);
  if (sample !== null) return sampleView(Number(sample[1]), decodeURIComponent(sample[2]), Number(sample[3]));
  if (hash === "#/samples" || hash.startsWith("#/samples?")) return samplesView(new URLSearchParams(hash.slice("#/samples?".length)));
  return overview.node;
}

/** Looks for news: looks at the queues since the last one, and the steps again when one was closed. */
async function ask() {
  const since = state.looks.at(-1)?.time ?? 0;
  const [queues, { steps }, unscored] = await Promise.all([load("queues", { after: since }), load("steps", { newest: 1 }), load("failures")]);
  const service = queues.service ? await load("service") : null;
  const newest = steps.length === 0 ? "none" : `${steps[0].incarnation}.${steps[0].step}`;
  if (newest !== state.newest) {
    await showSteps();
    state.newest = newest;
  }
  return { queues, unscored, service, time: queues.looks.at(-1)?.time ?? since, away: queues.open.waits_for === "redis" };
}

function showNews({ queues, unscored, service, away }) {
  overview.showService(service);
  overview.showOpen(queues.open, queues.ended);
  overview.showUnscored(unscored, service === null ? "the newest step" : "the metrics service started");
  if (queues.looks[0]?.time < state.looks.at(-1)?.time) state.looks = [];
  state.looks.push(...queues.looks);
  const oldest = (state.looks.at(-1)?.time ?? 0) - HOUR_S;
  state.looks = state.looks.filter((look) => look.time >= oldest);
  overview.showQueues(state.looks, queues.workers, { away, isService: service !== null });
}

function tell({ state: connection, text }) {
  const line = document.getElementById("status");
  line.className = connection;
  if (line.textContent !== text) line.textContent = text;
}

/** Shows what the address names; focus goes there when somebody went there. */
async function route(arrived) {
  const { hash } = location;
  entitle();
  if (location.hash !== "" && !location.hash.startsWith("#/")) return;
  try {
    const node = await viewOf(hash);
    if (hash !== location.hash && arrived) return; // somebody went on meanwhile
    content.replaceChildren(node);
    if (arrived) {
      scrollTo(0, 0);
      content.focus({ preventScroll: true });
    }
  } catch {
    content.replaceChildren(element("p", { class: "card empty" }, "The service does not respond. ", element("a", { href: "#/" }, "Overview")));
  }
}

startTheme();
addEventListener("hashchange", () => route(true));
await route(false);
if (report) {
  await showSteps();
  tell({ state: "report", text: `Report of ${moment(report.made)}` });
} else {
  await follow(ask, showNews, tell);
}
