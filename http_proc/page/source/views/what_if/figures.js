/** The rows of the table: what each run is compared by. */

const SPREADS = [
  ["queue_wait", "Wait in the queue", "from the encoded prompt to its admission"],
  ["ttft", "Time to first token", "from the arrival to the first token"],
  ["tpot", "Time per token", "after the first one"],
  ["latency", "Latency", "from the arrival to the end"],
];

/** Return the rows: { name, about, value(column), text(value), isLessBetter }. */
export const ROWS = [
  ...SPREADS.flatMap(([key, name, about]) =>
    ["p50", "p95"].map((share) => ({
      name: `${name}, ${share === "p50" ? "median" : share}`,
      about,
      value: (column) => column[key]?.[share] ?? null,
      text: milliseconds,
      isLessBetter: true,
    })),
  ),
  { name: "Tokens/s", about: "generated", value: (column) => column.throughput, text: (value) => value.toFixed(1) },
  { name: "Cached tokens", about: "of prompts", value: (column) => column.cached_tokens, text: String },
  { name: "Retractions", about: "", value: (column) => column.retractions, text: String, isLessBetter: true },
  { name: "Refused or failed", about: "", value: failures, text: String, isLessBetter: true },
];

function failures(column) {
  return Object.values(column.failed).reduce((sum, count) => sum + count, 0);
}

export function milliseconds(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
}

/** Return { text, isGood } of a value against that of the server as it was; null: as good as equal. */
export function change(row, column, base) {
  const [value, before] = [row.value(column), row.value(base)];
  if (value === null || !before) return null;
  const ratio = value / before;
  if (Math.abs(ratio - 1) < 0.02) return null;
  const text = ratio >= 10 ? `× ${ratio.toFixed(0)}` : `${ratio > 1 ? "+" : "−"}${Math.abs(100 * (ratio - 1)).toFixed(0)} %`;
  return { text, isGood: ratio < 1 === Boolean(row.isLessBetter) };
}
