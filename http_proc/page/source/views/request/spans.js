/** A trace in Chrome's format (docs/monitor.md) as rows of a waterfall. */

import { REASONS } from "../live/reasons.js";
import { duration } from "./duration.js";

/** What the spans are, and the colour of each. */
const SPANS = {
  receive: ["muted", "The gateway reads the request and hands it to the server."],
  llm_request: ["line-strong", "One choice, from its arrival at the server to its last text."],
  tokenize: ["accent", "The prompt is rendered and encoded, and its grammar checked."],
  queue: ["waiting", "It waits for a slot, pages, and room in a step."],
  prefill: ["prefill", "A part of the prompt is computed, up to the end of its step."],
  forward: ["prefill", "The worker computes the step of this part."],
  decode: ["decode", "Tokens are generated, one or more in each step."],
  detokenize: ["accent", "The last tokens become text, and stop strings are looked for."],
  deliver: ["muted", "The client gets the rest of the answer."],
  "worker restart": ["retracted", "The worker died. What its last steps had computed is lost."],
  "scheduler restart": ["retracted", "The scheduler died, and went on from its journal."],
  "other replica": ["retracted", "It was at a replica that was lost."],
  "queue and prefill": ["waiting", "The time before the first token, of which only that is known."],
};

const GATEWAY = "http_proc";

const RETRACTIONS = {
  pages: "others needed its pages",
  priority: "a request of a higher priority came",
  quarantine: "a request that may crash the worker runs alone",
};

/**
 * Return { rows, totalUs, beganAt, traceId, name } of a trace.
 *
 * A row has `name`, `process`, `atUs`, `durationUs`, `depth`, `color`, `about`, `args`, and `events`
 * of { atUs, name, text, isBad, args }. Choices follow each other, each with its spans in order of time;
 * what delivers the answer comes last.
 */
export function waterfall(trace) {
  const processes = {};
  for (const event of trace.traceEvents) {
    if (event.name === "process_name") processes[event.pid] = event.args.name;
  }
  const complete = trace.traceEvents.filter((event) => event.ph === "X");
  const rows = complete.map((event, place) => rowOf(event, place, processes));
  const isLast = (row) => row.name === "deliver" && row.process === GATEWAY;
  rows.sort((a, b) => isLast(a) - isLast(b) || a.tid - b.tid || a.atUs - b.atUs || a.depth - b.depth || a.place - b.place);
  const { trace_id: traceId, began_at: beganAt } = trace.otherData;
  for (const event of trace.traceEvents) {
    if (event.ph === "i") spanOf(rows, event)?.events.push(eventOf(event));
  }
  const name = rows.find((row) => row.depth === 0)?.args["gen_ai.request.id"];
  return { rows, totalUs: Math.max(...rows.map(endOf)), beganAt, traceId, name };
}

function rowOf(event, place, processes) {
  const isWeb = event.name.startsWith("/");
  const [color, about] = SPANS[event.name] ?? ["line-strong", isWeb ? "The web request, until its client has the answer." : ""];
  return {
    name: event.name,
    process: processes[event.pid],
    tid: event.tid,
    place,
    atUs: event.ts,
    durationUs: event.dur,
    depth: isWeb || event.name === "llm_request" ? 0 : event.name === "forward" ? 2 : 1,
    color,
    about,
    args: event.args,
    events: [],
  };
}

const endOf = (row) => row.atUs + row.durationUs;

/**
 * Return the span in which something happened: the last one of its choice by then. What a request
 * waited for and its retraction are noted when a span ends.
 */
function spanOf(rows, event) {
  const of = rows.filter((row) => row.tid === event.tid && row.depth === 1 && row.atUs <= event.ts + 1);
  const around = of.filter((row) => endOf(row) >= event.ts - 1);
  return (["waits", "retracted"].includes(event.name) ? around[0] : around.at(-1)) ?? of.at(-1);
}

function eventOf({ name, ts, args }) {
  const reason = args.reason;
  const event = { atUs: ts, name, text: "", isBad: false, args };
  if (name === "queued") event.text = `${args.waiting_before} requests waited before it`;
  else if (name === "waits") {
    event.name = `waits: ${reason}`;
    event.text = REASONS[reason] ?? "";
  } else if (name === "retracted") {
    event.text = RETRACTIONS[reason] ?? reason;
    event.isBad = true;
  } else if (name.endsWith("ready")) {
    event.text = "it was started anew";
    event.isBad = true;
  }
  return event;
}

/** Return the figures at the top: [name, text] each. */
export function figures({ rows, totalUs }) {
  const sum = (name) => rows.filter((row) => row.name === name).reduce((us, row) => us + row.durationUs, 0);
  const choices = rows.filter((row) => row.name === "llm_request");
  const total = (key) => choices.reduce((count, row) => count + (row.args[key] ?? 0), 0);
  const found = [["total", duration(totalUs)]];
  if (choices.length === 1) {
    for (const name of ["queue", "prefill", "decode"]) found.push([name, duration(sum(name))]);
  }
  if (choices.length) {
    found.push(["prompt tokens", choices[0].args["gen_ai.usage.prompt_tokens"]]);
    found.push(["cached", choices[0].args["quadriga.cached_tokens"]]);
    found.push(["generated", total("gen_ai.usage.completion_tokens")]);
    const retractions = total("quadriga.retractions");
    if (retractions) found.push(["retractions", retractions]);
    const restartsUs = sum("worker restart") + sum("scheduler restart");
    if (restartsUs) found.push(["restarts", duration(restartsUs)]);
  }
  const error = rows.find((row) => row.args.error)?.args.error;
  if (error) found.push(["error", error]);
  return found;
}

/** The arguments of spans that are shown: the name for people, and the unit of the number. */
const ARGUMENTS = {
  tokens: ["tokens"],
  steps: ["steps"],
  step: ["number of the step"],
  rows: ["rows of the step"],
  max_rows: ["rows of the largest step"],
  compute_ms: ["computed for", "ms"],
  prompt_parts: ["prompts in between, or parts"],
  prompt_tokens: ["tokens of these prompts"],
  prompt_steps_ms: ["steps with prompts took", "ms"],
  longest_gap_ms: ["longest time between tokens", "ms"],
  after: ["after"],
  merged_phases: ["phases in one"],
  error: ["error"],
  "http.response.status_code": ["status"],
  "error.type": ["code"],
  "gen_ai.request.id": ["id"],
  "gen_ai.request.max_tokens": ["largest number of tokens"],
  "gen_ai.request.temperature": ["temperature"],
  "gen_ai.request.top_p": ["top p"],
  "gen_ai.response.finish_reason": ["ended by"],
  "gen_ai.latency.time_in_queue": ["in the queue", "s"],
  "gen_ai.latency.time_to_first_token": ["first token after", "s"],
  "quadriga.choices": ["choices"],
  "quadriga.choice": ["choice"],
  "quadriga.tenant": ["tenant"],
  "quadriga.priority": ["priority"],
  "quadriga.retractions": ["retractions"],
  "quadriga.waited_for": ["waited for"],
};
const UNITS = { ms: 1e3, s: 1e6 };

/** Return the arguments of a span as [name, text], those that people can read. */
export function details({ args }) {
  return Object.entries(ARGUMENTS).filter(([key]) => key in args).map(([key, [name, unit]]) => {
    const value = args[key];
    return [name, unit ? duration(UNITS[unit] * value) : typeof value === "number" ? Number(value.toPrecision(6)).toLocaleString("en", { useGrouping: false }) : String(value)];
  });
}
