/** The API key of the user: kept for the tab, or for the browser if the user wants that. */

import { signal } from "@preact/signals";

const NAME = "quadriga.key";

function storages() {
  try {
    return [sessionStorage, localStorage];
  } catch {
    return [];
  }
}

/** The key; "" for none. */
export const key = signal(storages().map((one) => one.getItem(NAME)).find(Boolean) ?? "");

/** The open question for a key: { reason, answer(key or null) }; null while there is none. */
export const question = signal(null);

export function setKey(value, isKept) {
  key.value = value;
  const [tab, browser] = storages();
  tab?.removeItem(NAME);
  browser?.removeItem(NAME);
  if (value) (isKept ? browser : tab)?.setItem(NAME, value);
}

export function isKept() {
  return Boolean(storages()[1]?.getItem(NAME));
}

let asked = null;

/** Ask the user for a key, once for all who ask at the same time. Return it; null: cancelled. */
export function askForKey(reason) {
  asked ??= new Promise((resolve) => {
    question.value = { reason, answer: resolve };
  }).finally(() => {
    asked = question.value = null;
  });
  return asked;
}
