/** The conversations of this browser: a list as a signal, and their records in IndexedDB. */

import { signal } from "@preact/signals";
import { createStore, del, delMany, get, set, values } from "idb-keyval";
import { Conversation } from "./conversation.js";

const SAVE_MS = 300;
const database = openDatabase();

function openDatabase() {
  try {
    return createStore("quadriga", "conversations");
  } catch {
    return undefined;
  }
}

/** Summaries, { id, title, updatedAt }, from the newest on. */
export const list = signal([]);

/** Whether the browser keeps nothing, as in some private windows. */
export const keepsNothing = signal(false);

/** Conversations that were opened, by id: one object each, so that all see the same. */
const open = new Map();
const timers = new Map();
const savedAt = new Map();

export async function loadList() {
  try {
    const records = await values(database);
    setList([...list.value, ...records.map(summary)]);
  } catch {
    keepsNothing.value = true;
  }
}

/** Show these summaries, the newest first; of several of one id the first. */
function setList(summaries) {
  const unique = new Map(summaries.toReversed().map((one) => [one.id, one]));
  list.value = [...unique.values()].sort((a, b) => b.updatedAt - a.updatedAt);
}

const summary = ({ id, title, updatedAt }) => ({ id, title, updatedAt });

/** Return a conversation; null: there is none of this id. */
export async function load(id) {
  if (open.has(id)) return open.get(id);
  const record = await get(id, database).catch(() => undefined);
  if (!record) return null;
  if (!open.has(id)) open.set(id, new Conversation(record));
  return open.get(id);
}

export function addNew(conversation) {
  open.set(conversation.id, conversation);
  return conversation;
}

/** Save a conversation, now or SAVE_MS after it was saved last. */
export function save(conversation) {
  const { id } = conversation;
  if (timers.has(id)) return;
  const wait = (savedAt.get(id) ?? 0) + SAVE_MS - performance.now();
  if (wait <= 0) saveNow(conversation);
  else timers.set(id, setTimeout(() => saveNow(conversation), wait));
}

async function saveNow(conversation) {
  clearTimeout(timers.get(conversation.id));
  timers.delete(conversation.id);
  savedAt.set(conversation.id, performance.now());
  if (open.get(conversation.id) !== conversation) return; // removed meanwhile
  const record = conversation.record();
  setList([summary(record), ...list.value]);
  try {
    await set(record.id, record, database);
  } catch {
    keepsNothing.value = true;
  }
}

addEventListener("pagehide", () => {
  for (const id of [...timers.keys()]) saveNow(open.get(id));
});

export async function remove(id) {
  forget(id);
  await del(id, database).catch(() => {});
}

export async function removeAll() {
  const ids = list.value.map((one) => one.id);
  ids.forEach(forget);
  await delMany(ids, database).catch(() => {});
}

function forget(id) {
  open.delete(id);
  clearTimeout(timers.get(id));
  timers.delete(id);
  savedAt.delete(id);
  list.value = list.value.filter((one) => one.id !== id);
}

/** Return the records of all conversations, or of some. */
export async function records(ids = list.value.map((one) => one.id)) {
  const found = await Promise.all(ids.map((id) => open.get(id)?.record() ?? get(id, database)));
  return found.filter(Boolean);
}
