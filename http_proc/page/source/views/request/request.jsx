/** The request view: one request's whole way by its id, with the reasons why it waited. */

import "./request.css";
import { useEffect, useState } from "preact/hooks";
import { download } from "../../shell/download.js";
import { preactView } from "../preact_view.jsx";
import { figures, waterfall } from "./spans.js";
import { Waterfall } from "./waterfall.jsx";

const POLL_MS = 1000; // of a request that has not ended

function Request({ path, page }) {
  const [id = ""] = path;
  const [found, setFound] = useState({ id: "" });
  useEffect(() => {
    if (!id) return;
    const leaving = new AbortController();
    load(page.server, id, leaving.signal, setFound);
    return () => leaving.abort();
  }, [id]);

  function show(event) {
    event.preventDefault();
    const name = new FormData(event.target).get("id").trim();
    if (name) page.go("request", name);
  }

  const shown = found.id === id ? found : { id };
  return (
    <div class="request">
      <header class="request-head">
        <h1>Request</h1>
        <form onSubmit={show} role="search">
          <input key={id} name="id" defaultValue={id} placeholder="id of an answer, or its X-Request-Id" aria-label="Id of a request" autoComplete="off" spellcheck={false} />
          <button class="button primary">Show</button>
        </form>
        {shown.raw && (
          <button type="button" class="button" onClick={() => download(`trace-${id}.json`, JSON.stringify(shown.raw))}>
            Export for Perfetto
          </button>
        )}
      </header>
      <div class="request-body" aria-live="polite">
        {!id && <Hint />}
        {id && !shown.trace && !shown.error && (
          <p class="muted">{shown.isRunning ? `${id} is being answered. Its story is here when it has ended.` : `Looking for ${id}`}</p>
        )}
        {shown.error && <p class="error-text">{shown.error}</p>}
        {shown.trace && <Story trace={shown.trace} />}
      </div>
    </div>
  );
}

/** Give `onFound` what the server knows of a request, and again when one that runs has ended. */
async function load(server, id, signal, onFound) {
  const path = `v1/requests/${encodeURIComponent(id)}/trace`;
  while (!signal.aborted) {
    try {
      const raw = await server.get(path, { signal });
      return onFound({ id, raw, trace: waterfall(raw) });
    } catch (error) {
      if (signal.aborted) return;
      if (error.code !== "request_not_ended") return onFound({ id, error: error.message });
      onFound({ id, isRunning: true });
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

function Hint() {
  return (
    <p class="muted request-hint">
      The way of one request through all processes: where its time went, and what it waited for. The
      server keeps it for requests with a sampled <code>traceparent</code>, and for all with{" "}
      <code>--keep-traces all</code>.
    </p>
  );
}

function Story({ trace }) {
  return (
    <>
      <dl class="request-figures">
        {figures(trace).map(([name, value]) => (
          <div key={name}><dt>{name}</dt><dd>{value}</dd></div>
        ))}
      </dl>
      <Waterfall trace={trace} />
      <p class="muted request-ids">
        {new Date(1000 * trace.beganAt).toLocaleString()} · trace <code>{trace.traceId}</code>
      </p>
    </>
  );
}

export const requestView = preactView({
  name: "request",
  title: "Request",
  icon: "M4 6h8M8 12h9M13 18h7",
  component: Request,
});
