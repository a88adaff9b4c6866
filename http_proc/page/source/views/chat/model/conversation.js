/**
 * A conversation: a tree of messages, of which one path is shown.
 *
 * A message that is edited, and an answer that is generated again, become new children of the same
 * parent; `selected` has the child that is shown. The answers of one request are a batch: they stand
 * side by side.
 *
 * A message: { id, parent, role, content, reasoning, toolCalls, toolCallId, batch, status, error,
 * finishReason, tokens, timings, rate, note, run }. `run`: the batch that writes it. `status`: waiting, streaming, done, stopped, failed,
 * or interrupted (the rest of the answer is lost).
 *
 * A batch: { id, requestId, lastEventId, isResumable, messageIds, askedAt, firstAt, usage };
 * isResumable is unknown (undefined) before the first event.
 */

import { signal } from "@preact/signals";
import { DEFAULTS } from "./settings.js";

const ROOT = "";

export const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random().toString(36).slice(2)}`;

export class Conversation {
  constructor(record = {}) {
    this.id = record.id ?? newId();
    this.createdAt = record.createdAt ?? Date.now();
    this.updatedAt = record.updatedAt ?? this.createdAt;
    this.title = signal(record.title ?? "");
    this.settings = signal({ ...DEFAULTS, ...record.settings });
    this.batches = new Map((record.batches ?? []).map((batch) => [batch.id, batch]));
    /** Messages by id, as signals: an answer that grows renders itself alone. */
    this.messages = new Map((record.messages ?? []).map((one) => [one.id, signal(one)]));
    this.selected = signal(record.selected ?? {});
  }

  record() {
    return {
      id: this.id,
      title: this.title.value,
      createdAt: this.createdAt,
      updatedAt: this.updatedAt,
      settings: this.settings.value,
      batches: [...this.batches.values()].map((batch) => ({ ...batch })),
      messages: [...this.messages.values()].map((one) => one.value),
      selected: this.selected.value,
    };
  }

  get(id) {
    return this.messages.get(id)?.value;
  }

  /** Add a message below another ("" for the first) and show it. */
  add(message) {
    const made = { id: newId(), parent: ROOT, content: "", status: "done", ...message };
    this.messages.set(made.id, signal(made));
    this.select(made);
    if (!this.title.value && made.role === "user") {
      this.title.value = made.content.trim().replace(/\s+/g, " ").slice(0, 80);
    }
    return made;
  }

  update(id, changes) {
    const one = this.messages.get(id);
    one.value = { ...one.value, ...changes };
    this.updatedAt = Date.now();
  }

  select(message) {
    this.selected.value = { ...this.selected.value, [message.parent]: message.id };
  }

  /** Return the messages with this parent, from the oldest on. */
  children(parent) {
    return [...this.messages.values()].map((one) => one.value).filter((one) => one.parent === parent);
  }

  /** Return the ids of the messages that are shown, from the first on. */
  shownPath() {
    const path = [];
    let id = this.selected.value[ROOT];
    while (id && this.messages.has(id)) {
      path.push(id);
      id = this.selected.value[id];
    }
    return path;
  }

  /** Return the messages from the first one to this one, without empty answers, for the API. */
  messagesUpTo(id) {
    const found = [];
    for (let one = this.get(id); one; one = this.get(one.parent)) found.unshift(one);
    return found.filter(hasContent).map(apiMessage);
  }

  /**
   * Return the versions of a message: the first message of each batch, or each message that is
   * in none. `current` is the index of the one that is shown.
   */
  versions(message) {
    const all = this.children(message.parent).filter((one) => one.role === message.role);
    const groups = [...Map.groupBy(all, (one) => one.batch ?? one.id).values()];
    const current = groups.findIndex((group) => group.some((one) => one.id === message.id));
    return { groups, current };
  }
}

/** Whether a message is more than an answer that failed before its first token. */
function hasContent({ role, content, reasoning, toolCalls }) {
  return role !== "assistant" || Boolean(content || reasoning || toolCalls?.length);
}

function apiMessage({ role, content, reasoning, toolCalls, toolCallId }) {
  const message = { role, content };
  if (toolCalls?.length) {
    message.tool_calls = toolCalls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
    if (!content) message.content = null;
  }
  if (reasoning) message.reasoning_content = reasoning;
  if (toolCallId) message.tool_call_id = toolCallId;
  return message;
}
