/** Why a request took its time: sentences made of the figures of its trace. */

import { duration } from "./duration.js";

const PARTS = { tokenize: "to encode the prompt", queue: "in the queue", prefill: "for the prompt", decode: "to generate the answer" };
const SLOW_DELIVERY_US = 100e3;
const BUSY_SHARE = 0.9; // of a decode that the worker computes for the request: less says that it took turns
const LONG_GAP = 3; // times the mean

const WAITS = {
  slots: "no slot was free (--max-running-requests)",
  pages: "no KV page was free for it (--max-total-tokens)",
  budget: "the steps computed as many prompt tokens as they may (--chunked-prefill-size)",
  turn: "steps that decode went first (--batch-mode)",
  width: "the steps had as many rows as they may (--max-batch-size)",
  priority: "requests of a larger priority went first",
  fairness: "other clients or tenants had their turn",
  policy: "the policy preferred others (--schedule-policy)",
  grammar: "its grammar was compiled",
  adapter: "its adapter was loaded",
  worker: "the worker was not ready",
  quarantine: "a request that may crash the worker ran alone",
};

/** Return the sentences about a trace, as spans.js has it; of several choices about the longest one. */
export function sentences({ rows, totalUs }) {
  const choices = rows.filter((row) => row.name === "llm_request");
  if (!choices.length) return [];
  const longest = choices.reduce((one, other) => (other.durationUs > one.durationUs ? other : one));
  const spans = rows.filter((row) => row.tid === longest.tid && row.depth === 1);
  const of = (name) => spans.filter((row) => row.name === name);
  return [
    whole(totalUs, of, choices.length),
    ...queue(of("queue")),
    ...prompt(of("prefill"), longest.args),
    ...decode(of("decode")),
    ...trouble(spans),
    ...delivery(rows),
  ];
}

const sum = (rows, get = (row) => row.durationUs) => rows.reduce((total, row) => total + get(row), 0);
const total = (rows, name) => sum(rows, ({ args }) => args[name] ?? 0);
const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

function whole(totalUs, of, numChoices) {
  const parts = Object.entries(PARTS).map(([name, text]) => [sum(of(name)), text]);
  const [us, text] = parts.reduce((one, other) => (other[0] > one[0] ? other : one));
  const choice = numChoices > 1 ? ` This is the longest of ${numChoices} choices.` : "";
  return `${duration(totalUs)} in total, most of it ${text}: ${duration(us)}.${choice}`;
}

function queue(rows) {
  const us = sum(rows);
  const events = rows.flatMap((row) => row.events);
  const before = events.find((event) => event.args.waiting_before)?.args.waiting_before;
  const reasons = [...new Set(events.filter((event) => event.args.reason in WAITS).map((event) => WAITS[event.args.reason]))];
  if (!reasons.length && us < 10e3) return [];
  const behind = before ? `, behind ${count(before, "request")}` : "";
  return [`It waited ${duration(us)} in the queue${behind}${reasons.length ? `: ${reasons.join("; ")}` : ""}.`];
}

function prompt(rows, args) {
  if (!rows.length) return [];
  const cached = args["quadriga.cached_tokens"] ?? 0;
  const tokens = total(rows, "tokens");
  const parts = rows.length > 1 ? ` in ${rows.length} parts` : "";
  const rowsOf = Math.max(...rows.map((row) => row.args.rows ?? 1));
  const shared = rowsOf > 1 ? `, in steps of up to ${count(rowsOf, "row")}` : "";
  const found = cached ? ` ${count(cached, "token")} came from the prefix cache.` : "";
  return [`Its prompt took ${duration(sum(rows))}: ${count(tokens, "token")} were computed${parts}${shared}.${found}`];
}

/** 72 ms per token: 149 tokens in as many steps, up to 20 rows in a step, 3 prompts in between. */
function decode(rows) {
  const [tokens, steps] = [total(rows, "tokens"), total(rows, "steps")];
  if (!tokens) return [];
  const us = sum(rows);
  const found = [];
  const inSteps = steps === tokens ? "one in each step" : `in ${count(steps, "step")}`;
  const mostRows = Math.max(...rows.map((row) => row.args.max_rows ?? 0));
  const shared = mostRows > 1 ? `. The steps had up to ${mostRows} rows, one for each request in them` : mostRows ? ", alone in its steps" : "";
  found.push(`${duration(us / tokens)} per token: ${count(tokens, "token")} in ${duration(us)}, ${inSteps}${shared}.`);
  const parts = total(rows, "prompt_parts");
  if (parts) {
    const promptUs = 1000 * total(rows, "prompt_steps_ms");
    found.push(`${count(parts, "prompt or part of one was", "prompts or parts of them were")} computed in between (${count(total(rows, "prompt_tokens"), "token")}), in steps that took ${duration(promptUs)} together.`);
  }
  const computeUs = 1000 * total(rows, "compute_ms");
  if (us - computeUs > 10e3 && computeUs < BUSY_SHARE * us) {
    found.push(`The worker computed ${duration(computeUs)} for it; for ${duration(us - computeUs)} it was in no step.`);
  }
  const gapUs = 1000 * Math.max(...rows.map((row) => row.args.longest_gap_ms ?? 0));
  if (gapUs > (LONG_GAP * us) / tokens) found.push(`The longest time between two tokens was ${duration(gapUs)}.`);
  return found;
}

function trouble(spans) {
  const retracted = spans.flatMap((row) => row.events).filter((event) => event.name === "retracted");
  const again = retracted.length ? [`It lost its place ${retracted.length === 1 ? "once" : `${retracted.length} times`} and was computed again: ${[...new Set(retracted.map((event) => event.text))].join("; ")}.`] : [];
  const lost = spans.filter((row) => row.color === "retracted");
  return lost.length ? [...again, `A process was lost meanwhile (${[...new Set(lost.map((row) => row.name))].join(", ")}): ${duration(sum(lost))}.`] : again;
}

function delivery(rows) {
  const us = sum(rows.filter((row) => row.name === "deliver"));
  return us > SLOW_DELIVERY_US ? [`Its client had the last text ${duration(us)} after it was made: it, or the network, reads slowly.`] : [];
}
