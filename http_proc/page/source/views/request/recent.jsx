/** The requests that run and the recent ones, the slowest or the newest first. */

import { signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { address } from "../../shell/router.js";
import { duration } from "./duration.js";

const POLL_MS = 3000;
const SPANS = [[600, "the last 10 minutes"], [3600, "the last hour"], [86400, "the last day"], [1e9, "all that are kept"]];

/** What the user has chosen: it stays while a request or another view is open. */
const sort = signal("slowest");
const lastS = signal(600);

export function Recent({ server }) {
  const [found, setFound] = useState({});
  useEffect(() => {
    const leaving = new AbortController();
    watch(server, leaving.signal, setFound);
    return () => leaving.abort();
  }, [sort.value, lastS.value]);
  const { list, problem } = found;
  return (
    <section class="recent" aria-label="Recent requests">
      <div class="recent-head">
        <fieldset class="segments">
          <legend class="visually-hidden">Order</legend>
          {["slowest", "newest"].map((one) => (
            <label key={one}><input type="radio" name="sort" checked={sort.value === one} onChange={() => (sort.value = one)} /><span>{one} first</span></label>
          ))}
        </fieldset>
        <label class="muted">of <select value={lastS.value} onChange={(event) => (lastS.value = Number(event.currentTarget.value))}>
          {SPANS.map(([seconds, name]) => <option key={seconds} value={seconds}>{name}</option>)}
        </select></label>
        <span class="recent-legend muted">
          <i class="swatch bar-waiting" />queue <i class="swatch bar-prefill" />prompt <i class="swatch bar-decode" />decode <i class="swatch bar-muted" />the rest <i class="swatch bar-line-strong" />runs
        </span>
      </div>
      {problem && <p class="error-text" role="alert">{problem}</p>}
      {list && !list.keeps_all && <p class="muted">Only requests with a sampled traceparent are kept (<code>--keep-traces sampled</code>).</p>}
      {list && (list.data.length ? <Table list={list.data} /> : <p class="muted">No request to the model in this time.</p>)}
      {list?.has_more && <p class="muted">There are more: these are the first {list.data.length}.</p>}
    </section>
  );
}

async function watch(server, signal, setFound) {
  while (!signal.aborted) {
    try {
      const list = await server.get(`v1/requests?sort=${sort.value}&last_s=${lastS.value}`, { signal });
      setFound({ list });
    } catch (error) {
      if (signal.aborted) return;
      setFound({ problem: error.message });
      if ([401, 403].includes(error.status)) return;
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

function Table({ list }) {
  const longest = Math.max(...list.map((one) => one.seconds));
  return (
    <div class="recent-scroll">
      <table>
        <thead>
          <tr>
            <th scope="col">Request</th><th scope="col">Total</th><th scope="col">Where the time went</th>
            <th scope="col" class="wide-only">First token</th><th scope="col">Per token</th>
            <th scope="col" class="wide-only">Prompt + answer</th><th scope="col" class="wide-only">Ended</th><th scope="col" class="wide-only">Began</th>
          </tr>
        </thead>
        <tbody>{list.map((one) => <Row key={one.id || one.request_id} one={one} longest={longest} />)}</tbody>
      </table>
    </div>
  );
}

/** Of numbers in place of text: how many texts there were. */
const tokens = (one) =>
  one.vectors ? `${one.prompt_tokens} of ${one.vectors} text${one.vectors > 1 ? "s" : ""}` : `${one.prompt_tokens} + ${one.generated_tokens}`;

const time = (seconds) => (seconds == null ? "" : duration(1e6 * seconds));

function Row({ one, longest }) {
  const parts = [["waiting", one.queue_s], ["prefill", one.prefill_s], ["decode", one.decode_s]];
  const rest = one.seconds - parts.reduce((sum, [, seconds]) => sum + (seconds ?? 0), 0);
  const bars = [...parts, [one.is_running ? "line-strong" : "muted", rest]];
  const perToken = one.choices === 1 && one.generated_tokens > 1 ? one.decode_s / (one.generated_tokens - 1) : null;
  const end = one.is_running ? "runs" : one.code || one.finish_reason || String(one.status ?? "the client left");
  return (
    <tr>
      <th scope="row"><a href={address("request", one.id || one.request_id)} title={`${one.route} ${one.id}`}>{one.request_id}</a>{one.tenant && <small class="muted"> {one.tenant}</small>}{one.model && <small class="muted"> {one.model}</small>}</th>
      <td class="number"><b>{time(one.seconds)}</b></td>
      <td><span class="recent-bar" role="img" aria-label={one.is_running ? "runs" : parts.map(([name, seconds]) => `${name} ${time(seconds ?? 0)}`).join(", ")}>
        {bars.map(([color, seconds]) => seconds > 0 && <i key={color} class={`bar-${color}`} ref={(element) => element && (element.style.width = `${(100 * seconds) / longest}%`)} />)}
      </span></td>
      <td class="number wide-only">{time(one.first_token_s)}</td>
      <td class="number">{time(perToken)}</td>
      <td class="number wide-only">{one.choices > 0 && tokens(one)}</td>
      <td class={`wide-only ${one.code ? "error-text" : ""}`}>{end}</td>
      <td class="number wide-only muted">{new Date(1000 * one.began_at).toLocaleTimeString([], { hour12: false })}</td>
    </tr>
  );
}
