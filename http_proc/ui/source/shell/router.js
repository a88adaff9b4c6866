/** The address of the page: #/VIEW/part/part. */

import { signal } from "@preact/signals";
import { VIEWS } from "../views/index.js";

function read() {
  const [name, ...path] = location.hash.replace(/^#\/?/, "").split("/").map(decode);
  const view = VIEWS.find((one) => one.name === name) ?? VIEWS[0];
  return { view, path: view.name === name ? path.filter(Boolean) : [] };
}

/** Decode a part of an address; a part that is no valid encoding stands for itself. */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** What the address names: { view, path }. */
export const route = signal(read());

addEventListener("hashchange", () => {
  route.value = read();
});

export function address(name, ...path) {
  return `#/${[name, ...path].map(encodeURIComponent).join("/")}`;
}

/** Go to an address; */
export function go(name, ...path) {
  location.hash = address(name, ...path);
}

/** Go to an address without a step of the browser's history. */
export function replace(name, ...path) {
  history.replaceState(null, "", address(name, ...path));
  route.value = read();
}
