/** The lanes with their legend, and what the selected cell means. */

import { useEffect, useRef, useState } from "preact/hooks";
import { Lanes, ROW_HEIGHT } from "./lanes.js";
import { nameOf } from "./picture.js";
import { KINDS, meaning } from "./reasons.js";

const LEGEND = [
  ["waiting", "waits"], ["prefill", "prefill"], ["cached", "cached"], ["decode", "decode"],
  ["speculated", "several tokens"], ["retracted", "retracted"],
];
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

export function LanesPanel({ picture, colors, tick, page }) {
  const scroller = useRef(null);
  const canvas = useRef(null);
  const lanes = useRef(null);
  const [about, setAbout] = useState(null);
  const [rows, setRows] = useState(0);
  const latest = useRef(null);
  latest.current = { picture, colors };

  function draw() {
    lanes.current ??= new Lanes(canvas.current, scroller.current);
    lanes.current.draw(latest.current.picture, latest.current.colors);
    setRows(lanes.current.rows.length);
    setAbout(lanes.current.about(latest.current.picture));
  }
  useEffect(draw, [tick, colors]);
  useEffect(() => {
    const observer = new ResizeObserver(draw);
    observer.observe(canvas.current);
    return () => observer.disconnect();
  }, []);

  function point(event) {
    const box = canvas.current.getBoundingClientRect();
    lanes.current.selectAt(event.clientX - box.left, event.clientY - box.top);
    draw();
  }
  function leave() {
    lanes.current.selected = null;
    draw();
  }
  function press(event) {
    const move = MOVES[event.key];
    if (move) {
      event.preventDefault();
      lanes.current.move(...move);
      draw();
    } else if (event.key === "Enter" && about) open();
    else if (event.key === "Escape") leave();
  }
  function open() {
    const selected = lanes.current.selected;
    if (selected) page.go("request", selected.row.about.request_id);
  }

  return (
    <section class="live-panel live-lanes" aria-label="Requests by step">
      <div class="live-legend">
        {LEGEND.map(([color, text]) => (
          <span key={color}><i class={`swatch swatch-${color}`} />{text}</span>
        ))}
        <span><i class="swatch swatch-decode swatch-ended" />faded: has ended</span>
        <Waiting picture={picture} />
      </div>
      <div class="lanes-head muted" aria-hidden="true">
        <span>request</span>
        <span class="lanes-tokens" title="Tokens of the prompt, and of the answer so far"><span>prompt + </span>answer</span>
        <span>steps, the newest at the right</span>
      </div>
      <div class="lanes-scroll" ref={scroller} onScroll={draw}>
        <div class="lanes-space" ref={(one) => one && (one.style.height = `${Math.max(1, rows) * ROW_HEIGHT}px`)}>
          <canvas
            ref={canvas}
            tabIndex={0}
            role="application"
            aria-label="Lanes: a row is a request, a column a step. Arrow keys move, Enter opens the request."
            onPointerMove={point}
            onPointerDown={point}
            onPointerLeave={leave}
            onKeyDown={press}
            onDblClick={open}
          />
        </div>
        {!rows && <p class="lanes-empty muted">No request is here now. Send one, and its steps appear.</p>}
      </div>
      <Tip about={about} narrow={canvas.current?.clientWidth} />
      {picture.hidden > 0 && <p class="muted">… and {picture.hidden} other requests</p>}
    </section>
  );
}

/** How many requests wait, by reason. */
function Waiting({ picture }) {
  const waiting = picture.waiting();
  if (!waiting.length) return null;
  return (
    <span class="live-waiting">
      {waiting.map(([code, count]) => (
        <span key={code} class="chip" title={meaning(code).text}>{count} {meaning(code).title.replace("waits:", "wait:")}</span>
      ))}
    </span>
  );
}

function Tip({ about, narrow }) {
  if (!about) return <div class="lanes-tip" role="status" hidden />;
  const { row, step, means, tokens } = about;
  const request = row.about;
  const place = (one) => {
    if (!one) return;
    const left = Math.max(8, Math.min(about.x - 130, (narrow ?? 600) - 288));
    one.style.transform = `translate(${left}px, ${about.y + 8}px)`;
  };
  const isRow = KINDS.some((kind) => kind === means);
  return (
    <div class="lanes-tip" role="status" ref={place}>
      <strong>{means?.title ?? "no step"}{isRow ? ` · ${tokens} token${tokens === 1 ? "" : "s"}` : ""}</strong>
      {step && <span class="muted"> step {step.step} · {clock(step.time)}</span>}
      <p>{means?.text ?? "The request was not here, or the feed did not list it."}</p>
      <p class="tip-id">{nameOf(request)}</p>
      <p class="muted">
        prompt {request.num_prompt_tokens} tokens ({request.cached_tokens} cached) · generated {row.generated} of
        {" "}{request.max_total_tokens - request.num_prompt_tokens}
        {request.priority ? ` · priority ${request.priority}` : ""}
        {request.tenant ? ` · tenant ${request.tenant}` : ""}
        {request.num_retractions ? ` · retracted ${request.num_retractions}×` : ""}
        {request.waited_for.length ? ` · waited for ${request.waited_for.join(", ")}` : ""}
        {row.end ? ` · ${row.end.kind} ${row.end.detail}` : ""}
      </p>
    </div>
  );
}

export function clock(time) {
  return new Date(1000 * time).toLocaleTimeString([], { hour12: false });
}
