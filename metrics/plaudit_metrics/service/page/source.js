/**
 * Where answers come from: the service this page was loaded from, or, in a report, the answers it carries. Paths are
 * those of the API below `api/v1/`.
 */

const POLL_S = 2;
const LONGEST_PAUSE_S = 30;
const QUIET_REDIS_S = 15;

const carried = document.getElementById("answers");
const answers = carried === null ? null : JSON.parse(carried.textContent);

/** What a report says of itself; null on the live page. */
export const report = answers === null ? null : answers.report;

/** The answer to a path, or null when there is none (not closed yet, not in the report). Throws when nobody answers. */
export async function load(path, query = {}) {
  if (answers !== null) return (await part(answers.parts[path]))[path] ?? null;
  const response = await fetch(`api/v1/${path}?${new URLSearchParams(query)}`, {
    cache: "no-store",
    signal: AbortSignal.timeout(10_000),
  });
  if (response.status === 404) return null;
  if (!response.ok) throw Object.assign(new Error(`${path}: ${response.status}`), { refusal: response.status === 403 ? (await response.json()).error : undefined });
  return response.json();
}

const parts = new Map();

/** A part of a report's answers, unpacked when something of it is shown for the first time. */
function part(number) {
  if (number === undefined) return {};
  if (!parts.has(number)) parts.set(number, unpacked(document.getElementById(`part-${number}`).content.textContent));
  return parts.get(number);
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

/**
 * Asks for news every two seconds, for as long as the page is open; at growing intervals when the service is lost, and
 * not while nobody looks at the page.
 *
 * @param {function(): Promise<Object>} ask throws when the service is lost
 * @param {function(Object)} show takes what `ask` got
 * @param {function({state: string, text: string})} tell takes what to say of the connection
 */
export async function follow(ask, show, tell) {
  let pause_s = POLL_S;
  for (;;) {
    await visible();
    let news = null;
    try {
      news = await ask();
      pause_s = POLL_S;
    } catch {
      pause_s = Math.min(2 * pause_s, LONGEST_PAUSE_S);
    }
    if (news !== null) show(news);
    tell(news === null ? lost(pause_s) : connection(news));
    await new Promise((resolve) => setTimeout(resolve, 1000 * pause_s));
  }
}

function lost(pause_s) {
  return { state: "lost", text: `The service does not respond; this page is out of date. Next try in ${pause_s} s` };
}

let newest = { time: null, since: performance.now() };

/** The service takes a snapshot of Redis every two seconds; without a new one, Redis does not respond to it. */
function connection(news) {
  if (news.time !== newest.time) newest = { time: news.time, since: performance.now() };
  const quiet_s = (performance.now() - newest.since) / 1000;
  if (!news.away && quiet_s < QUIET_REDIS_S) return { state: "live", text: "Live" };
  return { state: "quiet", text: "Redis does not respond" };
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}
