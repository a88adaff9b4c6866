/**
 * The answer of a simulation: the requests in flight as lines, and the figures as a table.
 *
 * `changes` has the flags of each variant, as a text.
 */

import { useEffect, useMemo, useRef } from "preact/hooks";
import { palette } from "../live/canvas.js";
import { drawLines, niceMax } from "../live/charts.js";
import { change, ROWS } from "./figures.js";

/** Colours of the columns, measured first. */
const COLORS = ["text", "muted", "accent", "prefill", "decode", "speculated", "retracted", "cached"];

export function Results({ answer, changes, page }) {
  const colors = useMemo(() => palette(page.color), [page.theme.value]);
  const { columns } = answer;
  return (
    <section class="what-if-results" aria-label="Results">
      <p class="muted what-if-about">
        {answer.num_requests} answers in {answer.duration_s.toFixed(0)} s. Steps as those of {answer.cost_model}, {answer.slowdown.toFixed(2)} times as long.
      </p>
      {answer.doubt && <p class="error-text">Read the columns as a tendency: {answer.doubt}.</p>}
      <ul class="what-if-legend">
        {columns.map((column, place) => <li key={column.name}><i class={`swatch line-${COLORS[place]}`} />{column.name}</li>)}
      </ul>
      <div class="what-if-charts">
        {["waiting", "running"].map((name) => <InFlight key={name} name={name} answer={answer} colors={colors} />)}
      </div>
      <div class="what-if-scroll" tabIndex={0} role="region" aria-label="Figures">
        <table class="what-if-table">
          <thead>
            <tr>
              <th scope="col">Figure</th>
              {columns.map((column) => <th scope="col" key={column.name}>{column.name}{changes[column.name] && <small>{changes[column.name]}</small>}</th>)}
            </tr>
          </thead>
          <tbody>
            {ROWS.map((row) => (
              <tr key={row.name}>
                <th scope="row" title={row.about}>{row.name}</th>
                {columns.map((column, place) => <Cell key={column.name} row={row} column={column} base={place > 1 ? columns[1] : null} />)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Cell({ row, column, base }) {
  const value = row.value(column);
  const changed = base && change(row, column, base);
  return (
    <td>
      {value === null ? <span class="muted">not known</span> : row.text(value)}
      {changed && <small class={changed.isGood ? "is-better" : "is-worse"}>{changed.text}</small>}
    </td>
  );
}

function InFlight({ name, answer, colors }) {
  const canvas = useRef(null);
  const { columns } = answer;
  const top = niceMax(columns.flatMap((column) => column[name]));
  useEffect(() => {
    const element = canvas.current;
    const draw = () => drawLines(element, columns.map((column, place) => ({ values: column[name], color: colors[COLORS[place]], isFilled: place === 0 })), top, colors);
    draw();
    const observer = new ResizeObserver(draw);
    observer.observe(element);
    return () => observer.disconnect();
  }, [answer, colors]);
  const length = (answer.interval_s * (columns[0][name].length - 1)).toFixed(0);
  return (
    <figure>
      <figcaption><span>Requests that {name === "waiting" ? "wait" : "run"}</span><span class="muted">0 to {top}, over {length} s</span></figcaption>
      <canvas ref={canvas} role="img" aria-label={`Requests ${name}, at most: ${columns.map((column) => `${column.name} ${Math.max(...column[name])}`).join(", ")}`} />
    </figure>
  );
}
