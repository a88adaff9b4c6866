/** What the feed has said up to now: requests with their lanes, gauges by the second, events. */

import { codeOf, DECODE, NONE, RETRACTED, SPECULATED } from "./reasons.js";

export const COLUMNS = 600; // steps that a lane remembers
const MAX_ROWS = 400; // ended requests leave beyond that, the oldest first
const MAX_EVENTS = 300;
const MAX_SECONDS = 600;
const MAX_STEP_TIMES = 64;
const RATE_WINDOW_S = 3;

/** A request and what it did in each of the last steps. */
class Row {
  constructor(about) {
    this.about = about;
    this.generated = about.num_generated_tokens;
    this.codes = new Uint8Array(COLUMNS);
    this.tokens = new Uint16Array(COLUMNS);
    this.cached = -1; // the column at which cached tokens came in
    this.code = NONE;
    this.end = null; // the event that ended it
    this.lastColumn = -1;
  }
}

export class Picture {
  constructor() {
    this.rows = new Map();
    this.events = [];
    this.seconds = []; // { time, and the gauges of history }
    this.gauges = null;
    this.tree = null;
    this.processes = [];
    this.server = null;
    this.steps = new Array(COLUMNS).fill(null); // { step, time } of each column
    this.column = 0; // number of the next column
    this.hidden = 0;
    this.lost = 0;
    this.nextNumber = -1;
    this.stepTimes = [];
  }

  /** Take in an event of GET /v1/live. */
  take({ event, data }) {
    const body = JSON.parse(data);
    if (event === "history") this.takeHistory(body);
    else if (event === "dropped") this.lost += body.events;
    else if (event === "live") {
      for (const step of body.steps) this.takeStep(step);
      if (body.server) this.takeServer(body.server);
    }
  }

  takeHistory({ columns, rows, events }) {
    this.seconds = rows.map((row) => Object.fromEntries(columns.map((name, i) => [name, row[i]])));
    this.events = events.map((event) => ({ ...event, text: eventText(event) }));
  }

  // --- steps -------------------------------------------------------------------------------------

  takeStep(step) {
    if (this.nextNumber >= 0 && step.number > this.nextNumber) this.lost += step.number - this.nextNumber;
    this.nextNumber = step.number + 1;
    this.gauges = step.gauges;
    this.hidden = step.num_hidden_rows + step.num_hidden_skipped;
    if (step.tree) this.tree = step.tree;
    this.describe(step);
    const isColumn = step.step >= 0;
    if (isColumn) this.addColumn(step);
    for (const event of step.events) this.takeEvent(step.time, event);
    step.began_at.forEach((began, i) => this.stepTimes.push(step.ended_at[i] - began));
    this.stepTimes.splice(0, this.stepTimes.length - MAX_STEP_TIMES);
  }

  describe(step) {
    for (const about of step.requests) {
      const row = this.rows.get(about.seq);
      if (row) {
        row.about = { ...about, caller_id: about.caller_id || row.about.caller_id };
        row.generated = about.num_generated_tokens;
      } else this.rows.set(about.seq, new Row(about));
    }
    // Messages without a step do not list the requests that run.
    if (step.is_whole && (step.step >= 0 || !step.gauges.running)) {
      const listed = new Set(step.requests.map((about) => about.seq));
      for (const row of this.rows.values()) {
        if (!listed.has(row.about.seq) && !row.end) row.end = { kind: "gone", detail: "" };
      }
    }
    this.forgetEnded();
  }

  forgetEnded() {
    for (const [seq, row] of this.rows) {
      const isOld = row.end && this.column - row.lastColumn > COLUMNS / 4;
      if (isOld || (row.end && this.rows.size > MAX_ROWS)) this.rows.delete(seq);
    }
  }

  addColumn(step) {
    const place = this.column % COLUMNS;
    this.steps[place] = { step: step.step, time: step.time };
    for (const row of this.rows.values()) row.codes[place] = NONE;
    for (const [reason, seqs] of Object.entries(step.skipped)) {
      for (const seq of seqs) this.setCell(seq, place, codeOf(reason), 0);
    }
    step.seqs.forEach((seq, i) => {
      const kind = step.kinds[i] + DECODE;
      const count = step.num_tokens[i];
      this.setCell(seq, place, kind === DECODE && count > 1 ? SPECULATED : kind, count);
      const row = this.rows.get(seq);
      if (row && kind === DECODE) row.generated += count;
    });
    this.column += 1;
  }

  setCell(seq, place, code, tokens) {
    const row = this.rows.get(seq);
    if (!row) return;
    row.codes[place] = row.code = code;
    row.tokens[place] = tokens;
    row.lastColumn = this.column;
  }

  takeEvent(time, event) {
    const row = this.rows.get(event.seq);
    const place = (this.column - 1 + COLUMNS) % COLUMNS;
    if (row && event.kind === "retracted") row.codes[place] = row.code = RETRACTED;
    if (row && event.kind === "admitted" && event.detail !== "0") row.cached = this.column - 1;
    if (row && (event.kind === "finished" || event.kind === "refused")) row.end = event;
    const named = { ...event, time, request_id: row ? nameOf(row.about) : `#${event.seq}` };
    this.addEvent({ ...named, text: eventText(named) });
  }

  addEvent(event) {
    this.events.push(event);
    this.events.splice(0, this.events.length - MAX_EVENTS);
  }

  // --- the server --------------------------------------------------------------------------------

  takeServer(server) {
    const seconds = this.server ? server.time - this.server.time : 0;
    const known = new Map(this.processes.map((one) => [one.pid, one]));
    const processes = server.processes.map((process) => {
      const before = known.get(process.pid);
      if (this.server && !before) this.addProcessEvent(server.time, process, "was started");
      const share = before && seconds > 0 ? (process.cpu_seconds - before.cpu_seconds) / seconds : null;
      return { ...process, share };
    });
    const pids = new Set(processes.map((one) => one.pid));
    for (const one of this.processes) {
      if (!pids.has(one.pid)) this.addProcessEvent(server.time, one, "has ended");
    }
    this.processes = processes;
    this.server = server;
    if (this.gauges) {
      this.seconds.push({ time: server.time, step_ms: this.stepMs(), ...this.gauges });
      this.seconds.splice(0, this.seconds.length - MAX_SECONDS);
    }
  }

  addProcessEvent(time, process, what) {
    this.addEvent({ time, kind: "process", text: `${process.name} ${what} (pid ${process.pid})` });
  }

  /** Median duration of the last steps in ms. */
  stepMs() {
    const times = [...this.stepTimes].sort((a, b) => a - b);
    return times.length ? 1000 * times[times.length >> 1] : 0;
  }

  /** Growth of a total per second at each second, over the RATE_WINDOW_S before it. */
  rates(name) {
    return this.seconds.map((one, i) => {
      const before = this.seconds[Math.max(0, i - RATE_WINDOW_S)];
      const passed = one.time - before.time;
      return passed > 0 ? Math.max(0, one[name] - before[name]) / passed : 0;
    });
  }

  /**
   * The rows of the lanes, the oldest request first, where the last `numColumns` steps are shown:
   * those that have not ended, or did something in these steps.
   */
  visible(numColumns) {
    return [...this.rows.values()]
      .filter((row) => !row.end || this.column - row.lastColumn <= numColumns)
      .sort((a, b) => a.about.seq - b.about.seq);
  }

  /** How many requests wait for each reason: [[code, count], …], the most common first. */
  waiting() {
    const counts = new Map();
    for (const row of this.rows.values()) {
      if (!row.end && row.code >= RETRACTED) counts.set(row.code, (counts.get(row.code) ?? 0) + 1);
    }
    return [...counts].sort((a, b) => b[1] - a[1]);
  }
}

/** What people call a request: the caller's X-Request-Id, or else its id at the server. */
export function nameOf({ caller_id: callerId, request_id: id, index }) {
  return `${callerId || id}${index ? ` #${index}` : ""}`;
}

function eventText({ kind, request_id: id, seq, detail }) {
  const name = id || `#${seq}`;
  if (kind === "admitted") return `${name} admitted${detail === "0" ? "" : `, ${detail} tokens cached`}`;
  if (kind === "retracted") return `${name} retracted: others need its pages`;
  return `${name} ${kind}: ${detail}`;
}
