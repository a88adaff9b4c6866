/** Light or dark: the system's choice, or the user's. */

import { computed, effect, signal } from "@preact/signals";
import { stored } from "./stored.js";

const THEMES = ["auto", "light", "dark"];
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const systemIsDark = signal(prefersDark.matches);
prefersDark.addEventListener("change", (event) => {
  systemIsDark.value = event.matches;
});

/** The user's choice: auto, light or dark. */
export const choice = stored("quadriga.theme", "auto");

/** What is shown: light or dark. */
export const theme = computed(() =>
  choice.value === "auto" ? (systemIsDark.value ? "dark" : "light") : choice.value,
);

effect(() => {
  document.documentElement.dataset.theme = theme.value;
});

export function nextChoice() {
  choice.value = THEMES[(THEMES.indexOf(choice.value) + 1) % THEMES.length];
}

/** Return a colour of styles/base.css as a canvas takes it: color("accent"). */
export function color(name) {
  const probe = document.createElement("i");
  probe.hidden = true;
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
