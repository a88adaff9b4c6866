/** The last minutes as lines. */

import { useEffect, useRef } from "preact/hooks";
import { drawLines, niceMax } from "./charts.js";

export function Charts({ picture, colors, tick }) {
  const { seconds, gauges } = picture;
  const last = seconds.length;
  const total = (name) => ({ values: picture.rates(name) });
  const gauge = (name) => ({ values: seconds.map((one) => one[name]), now: gauges?.[name] });
  const shareOf = (one, name) => (100 * one[name]) / Math.max(1, one.pages_held + one.pages_cached + one.pages_free);
  const share = (name) => ({ values: seconds.map((one) => shareOf(one, name)), now: gauges && shareOf(gauges, name) });
  const times = { values: seconds.map((one) => one.step_ms ?? 0), now: picture.stepMs() };
  const charts = [
    { title: "Tokens/s", unit: "", parts: [["generated", "decode", total("generation_tokens_total")], ["prompts", "prefill", total("prompt_tokens_total")]] },
    { title: "Requests", unit: "", parts: [["running", "decode", gauge("running")], ["waiting", "waiting", gauge("waiting")]] },
    { title: "KV pages", unit: " %", max: 100, parts: [["held", "decode", share("pages_held")], ["cached", "cached", share("pages_cached")]] },
    { title: "Step", unit: " ms", parts: [["median", "muted", times]] },
  ];
  return (
    <section class="live-panel live-charts" aria-label={`Charts of the last ${last} seconds`}>
      {charts.map((chart) => <Chart key={chart.title} {...chart} colors={colors} tick={tick} />)}
    </section>
  );
}

/** `parts`: name, color, and { values, now } of each line; `now` is the last value where it is later. */
function Chart({ title, unit, parts, max, colors, tick }) {
  const canvas = useRef(null);
  const top = max ?? niceMax(parts.flatMap(([, , { values }]) => values));
  const texts = parts.map(([name, , { values, now }]) => `${name} ${Math.round(now ?? values.at(-1) ?? 0)}${unit}`);
  useEffect(() => {
    drawLines(
      canvas.current,
      parts.map(([, color, { values }], i) => ({ values, color: colors[color], isFilled: i === 0 })),
      top,
      colors,
    );
  }, [tick, colors]);
  return (
    <figure>
      <figcaption>
        <span>{title}</span>
        {parts.map(([name, color], i) => (
          <span key={name} class="muted"><i class={`swatch swatch-${color}`} />{texts[i]}</span>
        ))}
        <span class="muted chart-max">{top}{unit}</span>
      </figcaption>
      <canvas ref={canvas} role="img" aria-label={`${title}: ${texts.join(", ")}`} />
    </figure>
  );
}
