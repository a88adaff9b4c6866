/** A trace in Chrome's format (docs/observability.md) as rows of a waterfall. */

import { REASONS } from "../live/reasons.js";

/** What the spans are, and the colour of each. */
const SPANS = {
  receive: ["muted", "The gateway reads the request and hands it to the server."],
  llm_request: ["line-strong", "One choice, from its arrival at the server to its last text."],
  tokenize: ["accent", "The prompt is rendered and encoded, and its grammar checked."],
  queue: ["waiting", "It waits for a slot, pages, and room in a step."],
  prefill: ["prefill", "A part of the prompt is computed, up to the end of its step."],
  forward: ["cached", "The worker computes the step of this part."],
  decode: ["decode", "Tokens are generated, one or more in each step."],
  detokenize: ["accent", "The last tokens become text, and stop strings are looked for."],
  deliver: ["muted", "The client gets the rest of the answer."],
  "worker restart": ["retracted", "The worker died. What its last steps had computed is lost."],
  "scheduler restart": ["retracted", "The scheduler died, and went on from its journal."],
  "other replica": ["retracted", "It was at a replica that was lost."],
  "queue and prefill": ["waiting", "The time before the first token, of which only that is known."],
};

const RETRACTIONS = {
  pages: "others needed its pages",
  priority: "a request of a higher priority came",
  quarantine: "a request that may crash the worker runs alone",
};

/**
 * Return { rows, totalUs, beganAt, traceId } of a trace.
 *
 * A row has `name`, `process`, `atUs`, `durationUs`, `depth`, `color`, `about`, `args`, and `events`
 * of { atUs, name, text, isBad }. Choices follow each other, each with its spans in order of time.
 */
export function waterfall(trace) {
  const processes = {};
  for (const event of trace.traceEvents) {
    if (event.name === "process_name") processes[event.pid] = event.args.name;
  }
  const complete = trace.traceEvents.filter((event) => event.ph === "X");
  const rows = complete.map((event, place) => rowOf(event, place, processes));
  for (const event of trace.traceEvents) {
    if (event.ph === "i") spanOf(rows, event)?.events.push(eventOf(event));
  }
  rows.sort((a, b) => a.tid - b.tid || a.atUs - b.atUs || a.depth - b.depth || a.place - b.place);
  const { trace_id: traceId, began_at: beganAt } = trace.otherData;
  return { rows, totalUs: Math.max(...rows.map(endOf)), beganAt, traceId };
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

/** Return the span in which something happened: the last one of its choice and process by then. */
function spanOf(rows, event) {
  const of = rows.filter((row) => row.tid === event.tid && row.depth === 1 && row.atUs <= event.ts + 1);
  return of.filter((row) => endOf(row) >= event.ts - 1).at(-1) ?? of.at(-1);
}

function eventOf({ name, ts, args }) {
  const reason = args.reason;
  const event = { atUs: ts, name, text: "", isBad: false };
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

/** Return a time for people. */
export function duration(us) {
  if (us >= 1e6) return `${(us / 1e6).toFixed(2)} s`;
  if (us >= 1e4) return `${(us / 1e3).toFixed(0)} ms`;
  return us >= 1e3 ? `${(us / 1e3).toFixed(1)} ms` : `${us.toFixed(0)} µs`;
}
