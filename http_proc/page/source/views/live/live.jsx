/** The live view: what the server does now, step by step, and why each request waits. */

import "./live.css";
import { signal } from "@preact/signals";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { loadModels, modelQuery } from "../../api/models.js";
import { ModelChoice } from "../../shell/model_choice.jsx";
import { preactView } from "../preact_view.jsx";
import { palette } from "./canvas.js";
import { Charts } from "./charts.jsx";
import { Events, Processes, Tree } from "./panels.jsx";
import { LanesPanel } from "./lanes_panel.jsx";
import { Picture } from "./picture.js";

const DRAW_INTERVAL_MS = 100;
const RETRY_MS = 1000;

/** Read the feed of a model's replica until it is left. `state`: a signal, with what the user must know. */
async function watch(server, replica, model, picture, state, changed, signal) {
  while (!signal.aborted) {
    try {
      state.value = { text: "connecting", isBad: false };
      await server.events(`v1/live?replica=${replica}${modelQuery(model, "&")}`, {
        signal,
        onEvent(event) {
          if (event.event === "error") {
            state.value = { text: JSON.parse(event.data).message, isBad: true };
            return;
          }
          state.value = null;
          picture.current.take(event);
          changed();
        },
      });
      state.value = { text: "the server has ended the stream", isBad: true };
    } catch (error) {
      if (error.name === "AbortError") return;
      state.value = { text: error.message, isBad: true };
      if ([400, 401, 403, 404].includes(error.status)) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    picture.current = new Picture(); // what was known is old
  }
}

function Live({ path, page }) {
  const replica = Number(path[0] ?? 0) || 0;
  const model = path[1] ?? "";
  const picture = useRef(new Picture());
  const isPaused = useRef(false);
  const [paused, setPaused] = useState(false);
  const state = useMemo(() => signal(null), []);
  const tick = useMemo(() => signal(0), []);
  const colors = useMemo(() => palette(page.color), [page.theme.value]);

  useEffect(() => {
    const leaving = new AbortController();
    let timer = 0;
    const redraw = () => {
      timer = 0;
      if (!isPaused.current) tick.value += 1;
    };
    const changed = () => {
      timer ||= setTimeout(redraw, DRAW_INTERVAL_MS);
    };
    loadModels(page.server).catch(() => {}); // the feed shows what is wrong
    watch(page.server, replica, model, picture, state, changed, leaving.signal);
    return () => {
      leaving.abort();
      clearTimeout(timer);
      picture.current = new Picture();
    };
  }, [replica, model]);

  function pause() {
    isPaused.current = !isPaused.current;
    setPaused(isPaused.current);
    if (!isPaused.current) tick.value += 1;
  }

  const shown = { picture: picture.current, colors, tick: tick.value, page };
  return (
    <div class="live">
      <header class="live-head">
        <h1>Live</h1>
        <ModelChoice value={model} onChange={(name) => page.go("live", 0, name)} />
        <ReplicaChoice picture={picture.current} replica={replica} model={model} page={page} tick={tick.value} />
        <Figures picture={picture.current} tick={tick.value} />
        <button class="button" onClick={pause} aria-pressed={paused}>{paused ? "Continue" : "Pause"}</button>
      </header>
      {state.value && (
        <p class={`live-state ${state.value.isBad ? "error-text" : "muted"}`} role="status">{state.value.text}</p>
      )}
      <LanesPanel {...shown} />
      <div class="live-side" tabIndex={0} role="region" aria-label="Charts, pages, processes and events">
        <Charts {...shown} />
        <Tree {...shown} />
        <Processes {...shown} />
        <Events {...shown} />
      </div>
    </div>
  );
}

/** Which replica is shown, of a server that has several. */
function ReplicaChoice({ picture, replica, model, page }) {
  const count = Math.max(picture.server?.num_replicas ?? 1, replica + 1);
  if (count === 1) return null;
  return (
    <select aria-label="Replica" value={replica} onChange={(event) => page.go("live", event.currentTarget.value, ...(model ? [model] : []))}>
      {Array.from({ length: count }, (_, number) => <option key={number} value={number}>replica {number}</option>)}
    </select>
  );
}

function Figures({ picture }) {
  const { gauges } = picture;
  if (!gauges) return <p class="live-figures muted">Waiting for the first message</p>;
  const held = (100 * gauges.pages_held) / Math.max(1, gauges.pages_total);
  // A server of vectors or scores generates no tokens.
  const [speed, total] = gauges.generation_tokens_total || !gauges.prompt_tokens_total ? ["tokens/s", "generation_tokens_total"] : ["prompt tokens/s", "prompt_tokens_total"];
  const figures = [
    ["running", gauges.running],
    ["waiting", gauges.waiting],
    [speed, Math.round(picture.rates(total).at(-1) ?? 0)],
    ["ms per step", picture.stepMs().toFixed(0)],
    ["KV held", `${held.toFixed(0)} %`],
    ["retractions", gauges.retractions],
  ];
  if (picture.lost) figures.push(["messages lost", picture.lost]);
  return (
    <dl class="live-figures">
      {figures.map(([name, value]) => (
        <div key={name}><dt>{name}</dt><dd>{value}</dd></div>
      ))}
    </dl>
  );
}

export const liveView = preactView({
  name: "live",
  title: "Live",
  icon: "M3 12h4l3-8 4 16 3-8h4",
  component: Live,
});
