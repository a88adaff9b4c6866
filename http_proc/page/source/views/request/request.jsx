/** The request view: the recent requests, and one's whole way with the reasons why it waited. */

import "./request.css";
import { useEffect, useState } from "preact/hooks";
import { download } from "../../shell/download.js";
import { Icon } from "../../shell/icon.jsx";
import { address } from "../../shell/router.js";
import { preactView } from "../preact_view.jsx";
import { Recent } from "./recent.jsx";
import { figures, waterfall } from "./spans.js";
import { sentences } from "./story.js";
import { Waterfall } from "./waterfall.jsx";

const BACK = "M14 6l-6 6 6 6";
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
        {id && <a class="button" href={address("request")}><Icon path={BACK} size={17} />Recent</a>}
        <h1>{id ? shown.trace?.name ?? "Request" : "Requests"}</h1>
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
      <div class="request-body" aria-live={id ? "polite" : undefined} tabIndex={0} role="region" aria-label={id ? "The request" : "Requests"}>
        {!id && <Recent server={page.server} />}
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

function Story({ trace }) {
  return (
    <>
      <dl class="request-figures">
        {figures(trace).map(([name, value]) => (
          <div key={name}><dt>{name}</dt><dd>{value}</dd></div>
        ))}
      </dl>
      <ul class="request-story">{sentences(trace).map((text) => <li key={text}>{text}</li>)}</ul>
      <Waterfall trace={trace} />
      <p class="muted request-ids">
        {new Date(1000 * trace.beganAt).toLocaleString()} · trace <code>{trace.traceId}</code>
      </p>
    </>
  );
}

export const requestView = preactView({
  name: "request",
  title: "Requests",
  icon: "M4 6h8M8 12h9M13 18h7",
  component: Request,
});
