/** Small settings that the browser keeps, as signals. */

import { effect, signal } from "@preact/signals";

/** Return a signal whose value is kept under `name` as JSON. */
export function stored(name, initial, storage = localStorage) {
  const value = signal(read(name, initial, storage));
  effect(() => {
    try {
      storage.setItem(name, JSON.stringify(value.value));
    } catch {
      // A browser that keeps nothing for pages: the value lasts as long as the page.
    }
  });
  return value;
}

function read(name, initial, storage) {
  try {
    return JSON.parse(storage.getItem(name)) ?? initial;
  } catch {
    return initial;
  }
}
