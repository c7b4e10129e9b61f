/**
 * What time is spent on, in words and colours: the same in every chart, table and timeline. The colours themselves are
 * in style.css, once for light and once for dark; they keep apart for colour-blind eyes too.
 */

const named = (key, label, color = `--${key}`) => ({ key, label, color });

/** Of a step: the trainer's own part, and the causes of its waiting in the order of the pipeline. */
export const CAUSES = [
  named("trainer", "trainer busy"),
  named("generation", "generation"),
  named("sandboxes", "machines of samples"),
  named("tools", "tools"),
  named("sample_queue", "sample queue"),
  named("limiter", "limiter"),
  named("score", "scorers"),
  named("group_scorer", "group scorers"),
  named("ready_queue", "ready queue"),
  named("pause", "pause: too many without a score"),
  named("redis", "Redis did not answer"),
  named("unknown", "unknown: Redis’s clock was set"),
];

/** Of a sample, in their order. */
export const STAGES = [
  named("rollout_queue", "rollout queue"),
  named("sandboxes", "wait for its machine"),
  named("engine_queue", "engine queue"),
  named("generation", "generation"),
  named("tools", "tools"),
  named("sample_queue", "sample queue"),
  named("redelivery", "redelivery"),
  named("limiter", "limiter"),
  named("retry", "retry"),
  named("score", "score"),
  named("commit", "commit"),
  named("group_wait", "group wait"),
  named("group_scorer", "group scorers"),
  named("ready_queue", "ready queue"),
];

/** Of a sample's machine, in their order. */
export const MACHINE = [
  named("claim", "wait for a place", "--sample_queue"),
  named("start", "start", "--sandboxes"),
  named("wait", "commands’ waits", "--limiter"),
  named("exec", "commands", "--tools"),
  named("verify_wait", "tests’ wait for a place", "--ready_queue"),
  named("verify", "tests", "--score"),
];

/** How a sample's scoring ended. */
export const OUTCOMES = [
  named("scored", "scored", "--generation"),
  named("data_error", "data error", "--sample_queue"),
  named("infra_error", "infra error", "--score"),
  named("timeout", "timeout", "--limiter"),
  named("skipped", "skipped", "--trainer"),
  named("poison", "poison", "--ready_queue"),
  named("given_up", "given up", "--group_scorer"),
];

/** The streams, in the colours of what their consumers do. */
export const QUEUES = [
  named("prompts", "prompts → rollouts", "--generation"),
  named("samples", "samples → reward workers", "--sample_queue"),
  named("groups", "groups → group scorers", "--group_scorer"),
  named("ready", "ready → trainer", "--ready_queue"),
];

/** Of up to six lines in one chart: those colours that are easiest to keep apart. */
export const LINES = ["--generation", "--sample_queue", "--score", "--group_scorer", "--limiter", "--ready_queue"];

/** What a step with this verdict waited for. */
export const VERDICTS = {
  unscored: { words: "scores: too many samples have none", color: "--pause" },
  redis: { words: "Redis, which was away or slow", color: "--redis" },
  generation: { words: "generation", color: "--generation" },
  sandboxes: { words: "machines of samples", color: "--sandboxes" },
  tools: { words: "tools of agents", color: "--tools" },
  reward: { words: "scorers", color: "--score" },
  "reward-queue": { words: "a free reward worker", color: "--sample_queue" },
  limiter: { words: "a limit of the job", color: "--limiter" },
  endpoint: { words: "a judge’s endpoint (429, Retry-After)", color: "--limiter" },
  "group-scorer": { words: "group scorers", color: "--group_scorer" },
  straggler: { words: "one straggler", color: "--redelivery" },
  trainer: { words: "nothing: the trainer is the bottleneck", color: "--trainer" },
  balanced: { words: "both generation and rewards", color: "--engine_queue" },
};

export function verdictOf(name) {
  return VERDICTS[name] ?? { words: name || "an unknown cause", color: "--trainer" };
}

/** A colour for a canvas, as it is in the theme of now. */
export function resolved(color) {
  const probe = document.createElement("i");
  probe.style.color = `var(${color})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
