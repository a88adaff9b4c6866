/** Requests that run: their streams become messages, over broken connections and reloads. */

import { signal } from "@preact/signals";
import { errorOf, ServerError } from "../../../api/errors.js";
import { newTraceparent } from "../../../api/traceparent.js";
import { addChunk } from "./chunks.js";
import { newId } from "./conversation.js";

const FLUSH_MS = 40;
/** A connection that fails later than this has reached the server. */
const REACHED_AFTER_MS = 1000;
const RETRY_MS = [200, 500, 1000, 2000, 3000];
const MAX_RETRIES = 20;
/** The speed of an answer that runs is that of the last tokens. */
const RATE_WINDOW_MS = 3000;
const LOST = "The connection broke, and the server does not have the rest of this answer any more.";

let isLeaving = false;
addEventListener("pagehide", () => (isLeaving = true));
addEventListener("pageshow", () => (isLeaving = false));

/** The batches that run, by id. */
export const running = signal(new Map());

export function isRunning(batchId) {
  return running.value.has(batchId);
}

function setRunning(batchId, generation) {
  const next = new Map(running.value);
  if (generation) next.set(batchId, generation);
  else next.delete(batchId);
  running.value = next;
}

/** One request of a batch, from its first event to its end. */
class Generation {
  /** `isContinued`: the first chunk continues texts that are there. */
  constructor(conversation, batch, server, save) {
    this.conversation = conversation;
    this.batch = batch;
    this.server = server;
    this.save = save;
    this.abort = new AbortController();
    this.isOver = this.isStopped = false;
    this.lastEventId = batch.lastEventId;
    this.drafts = batch.messageIds.map((id) => ({ ...conversation.get(id) }));
    this.timer = 0;
    this.arrivals = this.drafts.map(() => []); // of the last tokens of each answer
  }

  /** Run to the end; nothing is thrown. `body`: of the request; without one the rest is read. */
  async run(path, body) {
    setRunning(this.batch.id, this);
    try {
      if (body) await this.ask(path, body);
      if (!this.isOver) await this.readRest(body ? "The connection broke: reading on …" : "Reading on …");
    } catch (error) {
      if (isLeaving) return; // the page that is loaded next reads on
      this.fail(error);
    } finally {
      clearTimeout(this.timer);
      this.flush();
      setRunning(this.batch.id, null);
      this.save();
    }
  }

  async ask(path, body) {
    const headers = {
      "X-Request-Id": this.batch.requestId,
      "X-Resumable": "true",
      traceparent: newTraceparent(),
    };
    const askedAt = performance.now();
    let isOpen = false;
    try {
      await this.server.events(path, {
        body, headers, signal: this.abort.signal, ...this.handlers(),
        onOpen: (response) => {
          isOpen = true;
          this.batch.isResumable = response.headers.has("X-Stream-Id");
          this.batch.isTraced = response.headers.has("traceparent");
        },
      });
    } catch (error) {
      const wasReached = isOpen || performance.now() - askedAt > REACHED_AFTER_MS;
      if (!wasReached || error.status !== 0) throw error;
    }
  }

  /** Read the events after the last one that arrived, with new connections until the end. */
  async readRest(note) {
    if (this.batch.isResumable === false) throw new ServerError(LOST);
    const path = `v1/streams/${encodeURIComponent(this.batch.requestId)}`;
    for (let retry = 0; !this.isOver; retry++) {
      if (retry > MAX_RETRIES) throw new ServerError(LOST);
      this.setNote(note);
      const before = this.lastEventId;
      try {
        const headers = before ? { "Last-Event-ID": before } : {};
        await this.server.events(path, {
          headers, signal: this.abort.signal, ...this.handlers(),
          onOpen: () => (this.batch.isResumable = true), // a reload may have come before it was kept
        });
      } catch (error) {
        if (error.status === 404) throw new ServerError(LOST);
        if (error.status !== 0 && error.status !== 503) throw error;
      }
      if (this.lastEventId !== before) retry = 0;
      if (!this.isOver) await pause(RETRY_MS[Math.min(retry, RETRY_MS.length - 1)], this.abort.signal);
    }
  }

  handlers() {
    return {
      onComment: (text) => this.setNote(text),
      onEvent: ({ data, id }) => {
        if (data === "[DONE]") this.end();
        else this.take(JSON.parse(data));
        if (id !== undefined) this.lastEventId = id;
        this.timer ||= setTimeout(() => this.flush(), FLUSH_MS);
      },
    };
  }

  end() {
    this.isOver = true;
    for (const draft of this.drafts) {
      if (draft.status === "waiting" || draft.status === "streaming") draft.status = "done";
      draft.note = undefined;
    }
  }

  take(chunk) {
    if (chunk.error) throw errorOf(chunk, 200, this.batch.requestId);
    this.batch.firstAt ??= Date.now();
    addChunk(chunk, this.batch, this.drafts);
    for (const { index } of chunk.choices ?? []) this.arrivals[index]?.push(performance.now());
  }

  /** Return the tokens/s of an answer: a chunk of a stream that can be read again is a token. */
  rate(index) {
    const times = this.arrivals[index];
    while (times.at(-1) - times[0] > RATE_WINDOW_MS) times.shift();
    const seconds = (times.at(-1) - times[0]) / 1000;
    return seconds > 0.2 ? (times.length - 1) / seconds : undefined;
  }

  setNote(note) {
    for (const draft of this.drafts) {
      if (draft.status === "waiting" || draft.status === "streaming") draft.note = note;
    }
    this.flush();
  }

  /** Show and keep what has arrived. */
  flush() {
    this.timer = 0;
    this.drafts.forEach((draft, index) => {
      draft.rate = draft.status === "streaming" ? this.rate(index) : undefined;
      this.conversation.update(draft.id, draft);
    });
    this.batch.lastEventId = this.lastEventId; // with the texts, so that both are kept together
    this.save();
  }

  /** End the messages that have not ended. */
  fail(error) {
    const isStop = this.isStopped || error.name === "AbortError";
    const hasText = this.drafts.some((draft) => draft.content || draft.reasoning);
    for (const draft of this.drafts) {
      if (draft.status !== "waiting" && draft.status !== "streaming") continue;
      draft.note = undefined;
      draft.status = isStop ? "stopped" : error.status === 0 && hasText ? "interrupted" : "failed";
      draft.error = isStop ? undefined : { message: error.message, code: error.code, status: error.status };
    }
  }

  /** End the request. A server that keeps the stream is asked to; else the connection's end does. */
  stop() {
    this.isStopped = true;
    if (this.batch.isResumable) {
      const path = `v1/streams/${encodeURIComponent(this.batch.requestId)}`;
      this.server.get(path, { method: "DELETE" }).catch(() => {});
    }
    this.abort.abort();
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    addEventListener("online", resolve, { once: true });
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    });
  });
}

/** Make a batch of these messages, and return it. */
export function newBatch(conversation, messageIds) {
  const id = newId();
  const batch = { id, requestId: `page-${id}`, messageIds, askedAt: Date.now() };
  conversation.batches.set(id, batch);
  for (const one of messageIds) {
    conversation.update(one, { run: id, status: "waiting", error: undefined, note: undefined });
  }
  return batch;
}

/** Send a request whose answers become the messages of a batch. */
export function generate(conversation, batch, { path, body, server, save }) {
  return new Generation(conversation, batch, server, save).run(path, body);
}

/** Go on with the answers that were not over when the page was left. */
export function resume(conversation, { server, save }) {
  for (const batch of conversation.batches.values()) {
    const isOpen = batch.messageIds.some((id) => {
      const { status, run } = conversation.get(id) ?? {};
      return run === batch.id && (status === "waiting" || status === "streaming");
    });
    if (isOpen && !isRunning(batch.id)) new Generation(conversation, batch, server, save).run();
  }
}

/** Stop everything that runs in a conversation. */
export function stopAll(conversation) {
  for (const generation of running.value.values()) {
    if (generation.conversation === conversation) generation.stop();
  }
}
