/** The address of the page: #/VIEW/part/part. */

import { signal } from "@preact/signals";

function read() {
  const [name, ...path] = location.hash.replace(/^#\/?/, "").split("/").map(decode);
  return { name, path: path.filter(Boolean) };
}

/** Decode a part of an address; a part that is no valid encoding stands for itself. */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** What the address names: { name, path }. */
export const route = signal(read());
let lastHash = location.hash;

/**
 * Return what the address names now.
 *
 * The browser reports a new address in a task of its own, and the user's next key may come first.
 */
export function currentRoute() {
  if (location.hash !== lastHash) {
    lastHash = location.hash;
    route.value = read();
  }
  return route.value;
}

addEventListener("hashchange", currentRoute);

export function address(name, ...path) {
  return `#/${[name, ...path].map(encodeURIComponent).join("/")}`;
}

/** Go to an address. */
export function go(name, ...path) {
  location.hash = address(name, ...path);
  currentRoute();
}

/** Go to an address without a step of the browser's history. */
export function replace(name, ...path) {
  history.replaceState(null, "", address(name, ...path));
  currentRoute();
}
