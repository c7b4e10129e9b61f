/** One stored sample: its conversation, its scorers, its times, and the other samples of its group. */

import { details, element, table } from "./dom.js";
import { counted, figure, known, moment, seconds } from "./format.js";
import { section } from "./overview.js";
import { MACHINE, STAGES } from "./palette.js";
import { outcomeMark, partition } from "./panels.js";
import { block, visible } from "./reading.js";
import { sampleAddress, samplesAddress, samplesList, search } from "./samples.js";
import { load, report } from "./source.js";

const ALL = 4_000_000;
const MOST_OF_GROUP = 200;

/** @returns {Promise<Node>} a message when the sample is not stored */
export async function sampleView(step, group, index) {
  const path = `samples/${step}/${encodeURIComponent(group)}/${index}`;
  const [found, beside] = await Promise.all([load(path), search({ group, first_step: step, last_step: step }, null, MOST_OF_GROUP)]);
  if (found === null) {
    return element("div", { class: "sections" }, back(), element("p", { class: "card empty" },
      `Sample ${group} #${index} of step ${step} is not stored, was rolled back, or is not in this report.`));
  }
  const siblings = [...beside.samples].sort((one, other) => one.index - other.index);
  const conversation = element("div", { class: "conversation" });
  const all = report !== null ? null : async () => {
    const whole = await load(path, { characters: ALL });
    if (whole !== null) show(whole, null);
  };
  const show = (detail, more) => conversation.replaceChildren(...messages(detail, more));
  show(found, all);
  return element("div", { class: "sections" },
    links(found.sample, siblings),
    head(found),
    element("div", { class: "beside" },
      section("Conversation", "From the prompt to the last turn.", conversation),
      element("div", { class: "sections" },
        section("The group", `${counted(siblings.length, "sample")} of the same prompt in step ${step}.`, samplesList(siblings, found.sample)),
        section("Scorers", "Value, reason and extras of each.", scorers(found.scorers)),
        Object.keys(found.audits).length === 0 ? null : section("Auditors", "Second opinions: no part of the score.", scorers(found.audits)),
        section("Times", found.admitted === null ? "" : `Admitted ${moment(found.admitted)}.`, partition(STAGES, (stage) => found.stages_s[stage] ?? 0, "seconds in each stage")),
        found.sandbox === null ? null : section("Machine", machineNote(found.sandbox), partition(MACHINE, machineSeconds(found), "seconds of its machine")),
        section("Data", "Of the data row.", data(found, all)))));
}

function machineNote({ num_commands: commands = 0, failed = false }) {
  return `${counted(commands, "command")} of its agent. ${failed ? "It could not be made, or broke." : ""}`;
}

/** Seconds of a stage of the sample's machine: the scorers with `verify_s` ran tests in it. */
function machineSeconds({ sandbox, scorers: records }) {
  const tests = Object.values(records).filter((record) => known(record.extra?.verify_s));
  const sum = (secondsOf) => tests.reduce((all, record) => all + secondsOf(record), 0);
  const ofTests = { verify: sum((record) => record.extra.verify_s), verify_wait: sum((record) => record.limiter_s ?? 0) };
  return (stage) => ofTests[stage] ?? sandbox[`${stage}_s`] ?? 0;
}

function back() {
  return element("a", { href: "#/samples" }, "← Samples");
}

function links(sample, siblings) {
  const place = siblings.findIndex((each) => each.index === sample.index);
  const link = (other, rel, words) => (other === undefined ? null : element("a", { href: sampleAddress(other), rel }, words));
  return element("nav", { class: "head steps", "aria-label": "Samples" }, back(),
    sample.prompt_id ? element("a", { href: samplesAddress({ prompt_id: sample.prompt_id }) }, "This prompt in all steps") : null,
    element("span", {}, link(siblings[place - 1], "prev", "Previous sample"), " ", link(siblings[place + 1], "next", "Next sample")));
}

function head({ sample, agent, rollout_worker, reward_worker, finish_reason }) {
  const reward = agent.agent_reward ?? agent.failure;
  const shown = [
    ["Score", figure(sample.score), outcomeMark(sample.outcome)],
    ["Response", figure(sample.response_tokens), `tokens, ended by ${finish_reason || "nothing"}`],
    ["Turns", figure(sample.turns), reward ? `reward of the agent: ${known(reward.value) ? figure(reward.value) : reward.outcome}` : "of the policy"],
    ["Policy version", versions(sample), `at step ${sample.step}`],
  ];
  return element("section", { class: "card" },
    element("h2", { class: "sample" }, visible(`${sample.group} #${sample.index}`), " ", element("a", { class: "quiet", href: `#/step/${sample.step}` }, `step ${sample.step}`), " ",
      element("span", { class: "quiet" }, visible([sample.data_source, sample.split].filter(Boolean).join(", ")))),
    element("dl", { class: "figures" }, shown.map(([name, value, note]) => element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, note))))),
    sample.reason || reward?.reason ? element("p", { class: "loud wrap" }, visible(sample.reason || reward.reason)) : null,
    element("p", { class: "note" }, visible([rollout_worker && `generated by ${rollout_worker}`, reward_worker && `scored by ${reward_worker}`].filter(Boolean).join(", "))));
}

function versions({ version_min, version_max }) {
  return version_min === version_max ? figure(version_min) : `${figure(version_min)} to ${figure(version_max)}`;
}

function messages({ prompt, completion }, all) {
  let turn = 0;
  return [
    ...prompt.map((message) => messageNode(message, null, all)),
    ...completion.map((message) => messageNode(message, message.role === "assistant" ? ++turn : null, all)),
    completion.length === 0 ? element("p", { class: "quiet" }, "No response was generated.") : null,
  ].filter((node) => node !== null);
}

function messageNode(message, turn, all) {
  const role = ["assistant", "tool", "user", "system", "prompt"].includes(message.role) ? message.role : "other";
  const notes = [
    known(message.started_s) && `after ${seconds(message.started_s)}`,
    known(message.generate_s) && `generated in ${seconds(message.generate_s)}`,
    known(message.tokens) && `${figure(message.tokens)} tokens`,
    known(message.reward) && `reward ${figure(message.reward)}`,
  ].filter(Boolean).join(" · ");
  const calls = message.calls ?? [];
  return element("article", { class: `message ${role}` },
    element("h4", {}, element("b", {}, visible(turn === null ? message.role : `${message.role}, turn ${turn}`)), message.name ? [" ", element("code", {}, visible(message.name))] : null,
      element("span", { class: "quiet" }, notes)),
    message.reasoning ? details("Reasoning", () => block(message.reasoning, all)).node : null,
    message.content.characters === 0 && calls.length > 0 ? null : block(message.content, all),
    calls.map((call) => callNode(call, all)));
}

function callNode(call, all) {
  const notes = [call.outcome, known(call.call_s) && seconds(call.call_s), known(call.started_s) && `after ${seconds(call.started_s)}`].filter(Boolean).join(" · ");
  return element("div", { class: "call" },
    element("h5", {}, "calls ", element("code", {}, visible(call.tool)), element("span", { class: !call.outcome || call.outcome === "ok" ? "quiet" : "loud" }, notes)),
    block(call.arguments, all));
}

function scorers(records) {
  const rows = Object.entries(records);
  if (rows.length === 0) return element("p", { class: "empty" }, "No scorer ran for this sample.");
  return table("Scorers", [
    { label: "Scorer", cell: ([name]) => element("span", { class: "id" }, visible(name)) },
    { label: "Value", number: true, cell: ([, record]) => figure(record.value) },
    { label: "Result", cell: ([, record]) => scorerNotes(record) },
  ], rows, "results");
}

function scorerNotes(record) {
  const notes = [`call ${seconds(record.call_s ?? 0)}`, record.limiter_s && `limiter ${seconds(record.limiter_s)}`, record.retry_s && `retries ${seconds(record.retry_s)}`,
    (record.attempts ?? 1) > 1 && `${record.attempts} attempts`].filter(Boolean).join(" · ");
  return element("div", {}, outcomeMark(record.outcome), " ", element("span", { class: "quiet" }, notes),
    record.reason ? element("p", { class: "wrap", dir: "auto" }, visible(record.reason)) : null,
    Object.entries(record.extra ?? {}).map(([name, value]) => element("p", { class: "wrap", dir: "auto" }, element("code", {}, visible(name)), " ", known(value) ? figure(value) : visible(String(value)))));
}

function data({ ground_truth, extra_info }, all) {
  return element("div", {}, element("h4", {}, "Ground truth"), block(ground_truth, all),
    extra_info.characters > 2 ? details("Extra information", () => block(extra_info, all)).node : null);
}
