/** KV pages, processes and events. */

import { useEffect, useRef, useState } from "preact/hooks";
import { drawTree } from "./charts.js";
import { clock } from "./lanes_panel.jsx";

const MIB = 2 ** 20;

export function Tree({ picture, colors, tick }) {
  const canvas = useRef(null);
  const boxes = useRef([]);
  const [about, setAbout] = useState("");
  const { tree, gauges } = picture;
  useEffect(() => {
    if (tree) boxes.current = drawTree(canvas.current, tree, colors);
  }, [tick, colors, tree]);

  function point(event) {
    const { left, top } = canvas.current.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    const box = boxes.current.find((one) => x >= one.x && x < one.x + one.width && y >= one.y && y < one.y + one.height);
    setAbout(box ? pagesText(tree, box.place) : "");
  }

  const total = Math.max(1, gauges?.pages_total ?? 1);
  const parts = gauges ? [["decode", "held", gauges.pages_held], ["cached", "cached", gauges.pages_cached], ["hover", "free", gauges.pages_free]] : [];
  return (
    <section class="live-panel" aria-label="KV pages">
      <h2>KV pages</h2>
      <div class="kv-bar" role="img" aria-label={parts.map(([, name, pages]) => `${pages} ${name}`).join(", ") || "not known yet"}>
        {parts.map(([color, name, pages]) => (
          <i key={name} class={`swatch-${color}`} ref={(one) => one && (one.style.flexGrow = pages / total)} />
        ))}
      </div>
      <p class="muted kv-legend">
        {parts.map(([color, name, pages]) => <span key={name}><i class={`swatch swatch-${color}`} />{pages} {name}</span>)}
        {tree && <span><i class="swatch swatch-shared" />{tree.num_shared_pages} shared</span>}
      </p>
      <canvas ref={canvas} class="kv-tree" role="img" aria-label="Prefix tree: each box is a run of pages, below the pages before it" onPointerMove={point} onPointerLeave={() => setAbout("")} />
      <p class="muted kv-about" role="status">{about || (tree && !tree.is_whole ? "The newest part of the prefix tree" : "The prefix tree: width is pages, depth is what follows")}</p>
    </section>
  );
}

function pagesText(tree, place) {
  const holders = tree.num_holders[place];
  const pages = `${tree.num_pages[place]} page${tree.num_pages[place] === 1 ? "" : "s"}`;
  if (holders > 1) return `${pages}, shared by ${holders} requests`;
  return holders ? `${pages}, held by one request` : `${pages}, cached: no request uses them now`;
}

export function Processes({ picture }) {
  if (!picture.processes.length) return null;
  return (
    <section class="live-panel" aria-label="Processes">
      <h2>Processes</h2>
      <table class="processes">
        <thead><tr><th>name</th><th>CPU</th><th>memory</th><th>pid</th></tr></thead>
        <tbody>
          {picture.processes.map((process) => (
            <tr key={process.pid}>
              <td>{process.name}</td>
              <td class="number"><Meter share={process.share} /></td>
              <td class="number">{(process.resident_bytes / MIB).toFixed(0)} MiB</td>
              <td class="number muted">{process.pid}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

function Meter({ share }) {
  const percent = share === null ? null : Math.round(100 * share);
  return (
    <span class="meter">
      <i ref={(one) => one && (one.style.width = `${Math.min(100, percent ?? 0)}%`)} />
      <span>{percent === null ? "…" : `${percent} %`}</span>
    </span>
  );
}

export function Events({ picture }) {
  const events = picture.events.slice(-60).reverse();
  return (
    <section class="live-panel live-events" aria-label="Events">
      <h2>Events</h2>
      {events.length === 0 && <p class="muted">Nothing has happened yet.</p>}
      <ol tabIndex={0}>
        {events.map((event) => (
          <li key={`${event.time}-${event.text}`} class={`event-${event.kind}`}>
            <time>{clock(event.time)}</time> <span>{event.text}</span>
          </li>
        ))}
      </ol>
    </section>
  );
}
