/** The panels of one step, on the overview (newest step) and on each step's own view. */

import { details, element, swatch, table } from "./dom.js";
import { counted, figure, known, seconds, share } from "./format.js";
import { CAUSES, OUTCOMES, STAGES, verdictOf } from "./palette.js";

const PIPELINE = "reward_pipeline";

/** Seconds in which a trainer ran a step, without those between two trainers. */
export function stepSeconds(step) {
  return step.step_s ?? step.closed - step.opened;
}

/** Seconds of a step's causes: the waits that it tells, and the rest, in which the trainer worked. */
export function causeSeconds(step, cause) {
  if (cause === "trainer") return Math.max(0, stepSeconds(step) - (step.trainer_wait_s ?? 0));
  return step[`wait/${cause}_s`] ?? 0;
}

/** The verdict in words, where the step's seconds went, and the figures one asks for first. */
export function verdictPanel(step, { recent = null, reasoned = false } = {}) {
  const together = recent?.together ?? false; // of steps that overlap, one waits for two
  const { words, color } = verdictOf(together ? recent.recent_verdict : step.verdict);
  const why = details("Why this verdict", () => reasons(step.reasoning ?? [])).node;
  why.open = reasoned;
  return element(
    "section",
    { class: "card verdict", "aria-labelledby": "verdict", style: { "--accent": `var(${color})` } },
    element("h2", { id: "verdict" }, element("span", {}, together ? "The last steps together waited for" : `Step ${step.step} waited for`), " ", element("strong", {}, words)),
    element("p", { class: "advice" }, (together ? recent.explanation : step.explanation) ?? ""),
    element("h3", { class: "hidden" }, "Where its time went"),
    partition(CAUSES, (cause) => causeSeconds(step, cause), "share of the step"),
    figures(step),
    failureList(failuresOf(step)),
    recent === null ? null : recently(recent),
    why,
  );
}

/** One bar that seconds divide, and their list. */
export function partition(kinds, secondsOf, caption) {
  const parts = kinds.map((kind) => ({ ...kind, value: secondsOf(kind.key) })).filter((part) => part.value > 0);
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  return element(
    "div",
    { class: "partition" },
    bar(parts, total),
    element("ul", { "aria-label": caption }, parts.map((part) =>
      element("li", {}, swatch(part.color), element("span", {}, part.label), element("b", {}, seconds(part.value)), element("span", { class: "of" }, share(part.value / total))))),
  );
}

function bar(parts, total) {
  const width = (part) => ({ "flex-grow": String(part.value / (total || 1)), background: `var(${part.color})` });
  return element("div", { class: "stack", "aria-hidden": "true" }, parts.map((part) => element("span", { style: width(part), title: `${part.label} ${seconds(part.value)}` })));
}

function figures(step) {
  const step_s = stepSeconds(step);
  const shown = [
    ["Reward", figure(step["reward/mean"]), "mean"],
    ["Step", seconds(step_s), `${step.num_samples} samples${step.stopped_s ? `, and stopped for ${seconds(step.stopped_s)}` : ""}`],
    ["Waited", seconds(step.trainer_wait_s), known(step.trainer_wait_s) ? `${share(step.trainer_wait_s / step_s)} of the step` : ""],
    ["Waited for rewards alone", seconds(step.exposed_reward_s), known(step.exposed_reward_s) ? `${share(step.exposed_reward_s / step_s)} of the step` : ""],
    ["Staleness", figure(step[`${PIPELINE}/staleness/mean`]), "mean, versions"],
    ["Without a score", share(step[`${PIPELINE}/masked_share`]), "of the samples"],
  ];
  return element("dl", { class: "figures" }, shown.map(([name, value, note]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, note)))));
}

/** The failures of a closed step, by scorer, most frequent first: `64 × KeyError: 'answer' (reward.py:2)`. */
function failuresOf(step) {
  const key = new RegExp(`^${PIPELINE}/scorer/(.+)/reasons$`);
  return Object.entries(step).flatMap(([name, text]) => {
    const scorer = key.exec(name)?.[1];
    return scorer === undefined ? [] : [{ scorer, text }];
  });
}

/** Failed scores by scorer; null where there are none. */
export function failureList(failures) {
  if (failures.length === 0) return null;
  return element("ul", { class: "failures", "aria-label": "Failed scores by scorer" },
    failures.map(({ scorer, text }) => element("li", {}, element("b", {}, scorer), ": ", text)));
}

/** The samples that ended since the newest step closed and have no score, with the reasons; nothing where all have one. */
export function unscoredPanel({ samples, unscored, failures }, since) {
  if (unscored === 0) return [];
  return [element("section", { class: "card", role: "status" },
    element("h2", {}, `Samples without a score since ${since}`),
    element("p", { class: "note" }, `${figure(unscored)} of ${counted(samples, "sample")}, ${share(unscored / samples)}`),
    failureList(failures.map(({ scorer, count, reason, outcome }) => ({ scorer, text: `${count} × ${reason || outcome}` }))))];
}

function recently({ recent, recent_verdict }) {
  const counts = Object.entries(recent).sort(([, one], [, other]) => other - one);
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  return element(
    "p",
    { class: "recent" },
    element("span", {}, total === 1 ? "The last step: " : `The last ${total} steps together: `, element("strong", {}, verdictOf(recent_verdict).words)),
    counts.map(([name, count]) => element("span", { class: "chip" }, swatch(verdictOf(name).color), `${name} ${count}`)),
  );
}

function reasons(rules) {
  const mark = (rule) => element("span", { class: rule.holds ? "holds" : "fails" }, rule.holds ? "✓ yes" : "no");
  return table("The rules of the verdict, in their order", [
    { label: "Rule", cell: (rule) => rule.question },
    { label: "This step", cell: (rule) => rule.numbers },
    { label: "Needs", cell: (rule) => rule.needs },
    { label: "Holds", cell: mark },
    { label: "Verdict", cell: (rule) => (rule.holds ? element("b", {}, rule.verdict) : rule.verdict) },
  ], rules, "reasons");
}

/** The slowest samples, each with the stages it went through. */
export function samplesTable(samples) {
  const longest = Math.max(...samples.map((sample) => sample.wall_s), 0.001);
  return table("The slowest samples", [
    { label: "Sample", cell: (sample) => element("span", { class: "id" }, `${sample.group} #${sample.index}`) },
    { label: "Outcome", cell: (sample) => outcomeMark(sample.scoring.outcome) },
    { label: "Score", number: true, wide: true, cell: (sample) => figure(sample.scoring.value) },
    { label: "Wall time", number: true, cell: (sample) => seconds(sample.wall_s) },
    { label: "Stages", cell: (sample) => sampleStages(sample, longest) },
    { label: "Longest in", wide: true, cell: longestStage },
    { label: "Scored by", wide: true, cell: (sample) => element("span", { class: "id" }, sample.scoring.worker || "–") },
  ], samples, "samples");
}

function sampleStages(sample, longest) {
  const parts = STAGES.map((stage) => ({ ...stage, value: sample.stages_s[stage.key] ?? 0 })).filter((part) => part.value > 0);
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  const summary = element("span", { class: "measure", style: { width: `${Math.min(100, (100 * total) / longest)}%` } }, bar(parts, total));
  const name = element("span", { class: "hidden" }, "Stages in seconds");
  return details([name, summary], () => element("div", { class: "breakdown" },
    element("ul", {}, parts.map((part) => element("li", {}, swatch(part.color), element("span", {}, part.label), element("b", {}, seconds(part.value))))),
    Object.entries(sample.scoring.scorers ?? {}).map(([scorer, record]) => element("p", {}, scorerText(scorer, record))),
    sample.scoring.worker ? element("p", {}, `scored by ${sample.scoring.worker}`) : null,
    sample.scoring.reason ? element("p", {}, sample.scoring.reason) : null,
  )).node;
}

function scorerText(scorer, record) {
  const parts = [`${scorer}: ${record.outcome}`];
  if (known(record.value)) parts.push(figure(record.value));
  parts.push(`call ${seconds(record.call_s ?? 0)}`);
  if (record.limiter_s) parts.push(`limiter ${seconds(record.limiter_s)}`);
  if ((record.attempts ?? 1) > 1) parts.push(`${record.attempts} attempts`);
  if (record.wait_s) parts.push(`wait for a process ${seconds(record.wait_s)}`);
  if (record.reason) parts.push(record.reason);
  for (const [name, value] of Object.entries(record.extra ?? {})) parts.push(`${name} ${known(value) ? figure(value) : value}`);
  return parts.join(", ");
}

function longestStage(sample) {
  const [key] = Object.entries(sample.stages_s).reduce((most, each) => (each[1] > most[1] ? each : most), ["", 0]);
  const stage = STAGES.find((each) => each.key === key);
  return stage === undefined ? "–" : element("span", {}, swatch(stage.color), stage.label);
}

/** The end of a sample's scoring, with its colour. */
export function outcomeMark(outcome) {
  const kind = OUTCOMES.find((each) => each.key === outcome);
  return element("span", { class: outcome === "scored" ? "quiet" : "loud" }, swatch(kind?.color ?? "--trainer"), kind?.label ?? outcome);
}

const SCORER = `${PIPELINE}/scorer/`;
/** Stands for the scorer of samples that ended without one. */
const NO_SCORER = "(no scorer)";

/** The scorers that ran in a step. */
export function scorersOf(step) {
  const names = Object.keys(step).filter((key) => key.startsWith(SCORER)).map((key) => key.slice(SCORER.length).split("/")[0]);
  return [...new Set(names)].filter((name) => name !== NO_SCORER);
}

/** A row a scorer: what it gave, how long it took, what failed. */
export function scorersTable(step) {
  const names = scorersOf(step).sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  const of = (name, key) => step[`${SCORER}${name}/${key}`];
  const failed = (name) => OUTCOMES.filter((kind) => kind.key !== "scored").map((kind) => [kind.label, of(name, `outcome/${kind.key}`)]).filter(([, count]) => count > 0);
  if (names.length === 0) return element("p", { class: "empty" }, "No scorer ran in this step.");
  return table("Scorers", [
    { label: "Scorer", cell: (name) => element("span", { class: "id" }, name) },
    { label: "Value, mean", number: true, cell: (name) => figure(of(name, "value/mean")) },
    { label: "std", number: true, cell: (name) => figure(of(name, "value/std")) },
    { label: "Call p50", number: true, cell: (name) => seconds(of(name, "call_s/p50")) },
    { label: "p95", number: true, cell: (name) => seconds(of(name, "call_s/p95")) },
    { label: "Limiter p95", number: true, cell: (name) => seconds(of(name, "limiter_s/p95")) },
    { label: "Retries p95", number: true, cell: (name) => seconds(of(name, "retry_s/p95")) },
    { label: "Not scored", cell: (name) => failed(name).map(([label, count]) => `${label} ${count}`).join(", ") || "–" },
  ], names);
}

/** A row a stage: how long samples spent in it. */
export function stagesTable(step) {
  const of = (stage, statistic) => step[`${PIPELINE}/${stage.key}_s/${statistic}`];
  const passed = STAGES.filter((stage) => of(stage, "max") > 0);
  const column = (statistic) => ({ label: statistic, number: true, cell: (stage) => seconds(of(stage, statistic)) });
  return table("How long samples spent in each stage", [
    { label: "Stage", cell: (stage) => element("span", {}, swatch(stage.color), stage.label) },
    ...["p50", "p95", "p99", "max", "mean"].map(column),
  ], passed);
}
