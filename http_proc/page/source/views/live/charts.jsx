/** The last minutes as lines. */

import { useEffect, useRef } from "preact/hooks";
import { drawLines, niceMax } from "./charts.js";

const RATE_WINDOW_S = 3;

export function Charts({ picture, colors, tick }) {
  const { seconds } = picture;
  const last = seconds.length;
  const generated = rates(seconds, "generation_tokens_total");
  const prompts = rates(seconds, "prompt_tokens_total");
  const running = seconds.map((one) => one.running);
  const waiting = seconds.map((one) => one.waiting);
  const share = (name) => seconds.map((one) => (100 * one[name]) / Math.max(1, one.pages_held + one.pages_cached + one.pages_free));
  const times = seconds.map((one) => one.step_ms ?? 0);
  const charts = [
    { title: "Tokens/s", unit: "", parts: [["generated", "decode", generated], ["prompts", "prefill", prompts]] },
    { title: "Requests", unit: "", parts: [["running", "decode", running], ["waiting", "muted", waiting]] },
    { title: "KV pages", unit: " %", max: 100, parts: [["held", "decode", share("pages_held")], ["cached", "cached", share("pages_cached")]] },
    { title: "Step", unit: " ms", parts: [["median", "accent", times]] },
  ];
  return (
    <section class="live-panel live-charts" aria-label={`Charts of the last ${last} seconds`}>
      {charts.map((chart) => <Chart key={chart.title} {...chart} colors={colors} tick={tick} />)}
    </section>
  );
}

function Chart({ title, unit, parts, max, colors, tick }) {
  const canvas = useRef(null);
  const top = max ?? niceMax(parts.flatMap(([, , values]) => values));
  useEffect(() => {
    drawLines(
      canvas.current,
      parts.map(([, color, values], i) => ({ values, color: colors[color], isFilled: i === 0 })),
      top,
      colors,
    );
  }, [tick, colors]);
  return (
    <figure>
      <figcaption>
        <span>{title}</span>
        {parts.map(([name, color, values]) => (
          <span key={name} class="muted"><i class={`swatch swatch-${color}`} />{name} {Math.round(values.at(-1) ?? 0)}{unit}</span>
        ))}
        <span class="muted chart-max">{top}{unit}</span>
      </figcaption>
      <canvas ref={canvas} role="img" aria-label={`${title}: ${parts.map(([name, , values]) => `${name} ${Math.round(values.at(-1) ?? 0)}${unit}`).join(", ")}`} />
    </figure>
  );
}

/** Return the growth of a total per second at each second. */
function rates(seconds, name) {
  return seconds.map((one, i) => {
    const before = seconds[Math.max(0, i - RATE_WINDOW_S)];
    const passed = one.time - before.time;
    return passed > 0 ? Math.max(0, one[name] - before[name]) / passed : 0;
  });
}
