/** The spans of a request below each other, each where it lies in the request's time. */

import { useState } from "preact/hooks";
import { duration } from "./duration.js";
import { details } from "./spans.js";

const NUM_TICKS = 4;

export function Waterfall({ trace }) {
  const [open, setOpen] = useState(null);
  const { rows, totalUs } = trace;
  return (
    <div class="waterfall">
      <Scale totalUs={totalUs} />
      <ol class="spans" aria-label="Spans of the request">
        {rows.map((row) => (
          <li key={row.place}>
            <button
              type="button"
              class={`span depth-${row.depth}`}
              aria-expanded={open === row.place}
              onClick={() => setOpen(open === row.place ? null : row.place)}
            >
              <span class="span-name">
                {row.name}
                <small class="muted">{row.process}</small>
              </span>
              <Bar row={row} totalUs={totalUs} />
              <span class="span-time">{duration(row.durationUs)}</span>
            </button>
            {row.events.length > 0 && <Events row={row} />}
            {open === row.place && <Details row={row} />}
          </li>
        ))}
      </ol>
    </div>
  );
}

/** A style is set on the element: the page allows no styles in its markup. */
function place(element, atUs, durationUs, totalUs) {
  if (!element) return;
  element.style.left = `${(100 * atUs) / totalUs}%`;
  element.style.width = `${(100 * durationUs) / totalUs}%`;
}

function Bar({ row, totalUs }) {
  return (
    <span class="span-track">
      <i class={`bar bar-${row.color}`} ref={(one) => place(one, row.atUs, row.durationUs, totalUs)} />
      {row.events.map((event, index) => (
        <i key={index} class={`mark ${event.isBad ? "mark-bad" : ""}`} ref={(one) => one && (one.style.left = `${(100 * event.atUs) / totalUs}%`)} />
      ))}
    </span>
  );
}

function Scale({ totalUs }) {
  const ticks = Array.from({ length: NUM_TICKS + 1 }, (_, index) => (index * totalUs) / NUM_TICKS);
  return (
    <div class="scale muted" aria-hidden="true">
      <span />
      <span class="scale-ticks">{ticks.map((us) => <span key={us}>{us ? duration(us) : "0"}</span>)}</span>
      <span />
    </div>
  );
}

function Events({ row }) {
  return (
    <ul class="span-events">
      {row.events.map((event, index) => (
        <li key={index} class={event.isBad ? "error-text" : ""}>
          <time>+{duration(event.atUs - row.atUs)}</time> <b>{event.name}</b> <span class="muted">{event.text}</span>
        </li>
      ))}
    </ul>
  );
}

function Details({ row }) {
  return (
    <div class="span-details">
      <p class="muted">{row.about}</p>
      <dl>
        <div><dt>begins</dt><dd>+{duration(row.atUs)}</dd></div>
        {details(row).map(([name, text]) => <div key={name}><dt>{name}</dt><dd>{text}</dd></div>)}
      </dl>
    </div>
  );
}
