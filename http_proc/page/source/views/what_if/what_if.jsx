/** The view "what if": the last minutes in the simulator with other flags, beside what happened. */

import "./what_if.css";
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { loadModels, modelQuery } from "../../api/models.js";
import { ModelChoice } from "../../shell/model_choice.jsx";
import { preactView } from "../preact_view.jsx";
import { presets } from "./presets.js";
import { Results } from "./results.jsx";

const SPANS = [[60, "1 minute"], [300, "5 minutes"], [600, "10 minutes"], [3600, "1 hour"]];
const MAX_VARIANTS = 6;
const POLL_MS = 3000; // for requests that end meanwhile

/** What the user has entered and seen: it stays while other views are open. */
const lastS = signal(600);
const variants = signal([{ flags: {} }]); // with the name of a preset as long as it is as that one
const model = signal("");
const load = signal(null);
const answer = signal(null);
const problem = signal("");
const isRunning = signal(false);

function WhatIf({ page }) {
  const leaving = useRef(null);
  useEffect(() => {
    leaving.current = new AbortController();
    loadModels(page.server).catch(() => {}); // the load shows what is wrong
    look(page.server, leaving.current.signal);
    return () => leaving.current.abort();
  }, [model.value]);
  function choose(name) {
    [model.value, load.value, answer.value, problem.value] = [name, null, null, ""];
  }

  const known = load.value;
  return (
    <div class="what-if">
      <header class="what-if-head">
        <h1>What if</h1>
        <ModelChoice value={model.value} onChange={choose} />
        <label>
          <span class="muted">requests of the last</span>
          <select value={lastS.value} onChange={(event) => (lastS.value = Number(event.currentTarget.value))}>
            {SPANS.map(([seconds, name]) => <option key={seconds} value={seconds}>{name}</option>)}
          </select>
        </label>
        <button type="button" class="button primary" disabled={isRunning.value || !known?.num_choices} onClick={() => simulate(page.server, leaving.current.signal)}>
          {isRunning.value ? "Simulating" : "Simulate"}
        </button>
      </header>
      <p class="muted what-if-about" role="status">{isRunning.value ? "The simulation has the lowest priority: it yields to the requests of the server." : about(known)}</p>
      {problem.value && <p class="error-text" role="alert">{problem.value}</p>}
      {known?.num_choices > 0 && <Presets load={known} />}
      {known && <Table flags={known.flags} />}
      {answer.value && <Results {...answer.value} page={page} />}
    </div>
  );
}

function about(known) {
  if (!known) return "";
  if (!known.num_choices) return "No request by HTTP has been answered yet. Send some: they can be simulated as soon as they have ended.";
  const minutes = known.seconds / 60;
  const time = minutes < 1 ? `${known.seconds.toFixed(0)} s` : `${minutes.toFixed(0)} min`;
  return `${known.num_choices} answers are there, the first of ${time} ago. The scheduler itself runs in simulated time, with other flags and the same arrivals.`;
}

/** The path of the simulations of the chosen model. */
const path = () => `v1/what_if${modelQuery(model.value)}`;

/** Ask what can be simulated until there is something. */
async function look(server, signal) {
  while (!signal.aborted) {
    try {
      load.value = await server.get(path(), { signal });
      if (load.value.num_choices) return;
    } catch (error) {
      if (signal.aborted) return;
      problem.value = error.message;
      if ([401, 403].includes(error.status)) return;
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

async function simulate(server, signal) {
  isRunning.value = true;
  problem.value = "";
  const body = { last_s: lastS.value, variants: named(variants.value) };
  try {
    const changes = Object.fromEntries(body.variants.map(({ name, flags }) => [name, flagsText(flags)]));
    answer.value = { answer: await server.post(path(), body, { signal }), changes };
    load.value = await server.get(path(), { signal });
  } catch (error) {
    if (!signal.aborted) problem.value = error.message;
  }
  isRunning.value = false;
}

/** Return the variants that change something, each called by its place and what it changes. */
function named(list) {
  return list
    .map(({ name, flags }, index) => ({ name: name ?? title(index), flags }))
    .filter(({ flags }) => Object.keys(flags).length);
}

const title = (index) => `variant ${String.fromCharCode(65 + index)}`;

function flagsText(flags) {
  return Object.entries(flags).map(([name, value]) => `${flagName(name)} ${shown(value)}`).join(", ");
}

const flagName = (name) => `--${name.replaceAll("_", "-")}`;

function change(index, name, value) {
  variants.value = variants.value.map((one, place) => {
    if (place !== index) return one;
    const { [name]: _, ...others } = one.flags;
    return { flags: value === undefined ? others : { ...others, [name]: value } };
  });
}

/** Questions that become a variant by a click. */
function Presets({ load }) {
  const taken = variants.value.map((one) => one.name);
  const isFull = variants.value.length === MAX_VARIANTS && variants.value.every(({ flags }) => Object.keys(flags).length);
  return (
    <section class="what-if-presets" aria-label="Presets">
      <span class="muted">What if there were</span>
      {presets(load).map(({ name, about, flags }) => (
        <button key={name} type="button" class="preset" title={about} disabled={isFull || taken.includes(name)} onClick={() => add(name, flags)}>{name}</button>
      ))}
    </section>
  );
}

/** Make a preset the first variant that changes nothing, or one more. */
function add(name, flags) {
  const place = variants.value.findIndex((one) => !Object.keys(one.flags).length);
  variants.value = place < 0 ? [...variants.value, { name, flags }] : variants.value.with(place, { name, flags });
}

/** The flags: a column as the server runs, and one for each variant. */
function Table({ flags }) {
  const columns = variants.value;
  return (
    <div class="what-if-scroll">
      <table class="what-if-table">
        <thead>
          <tr>
            <th scope="col">Flag</th>
            <th scope="col">as it was</th>
            {columns.map(({ name }, index) => (
              <th scope="col" key={index}>
                {name ?? title(index)}
                {columns.length > 1 && (
                  <button type="button" class="icon-button" aria-label={`Remove ${name ?? title(index)}`} onClick={() => (variants.value = columns.filter((_, place) => place !== index))}>×</button>
                )}
              </th>
            ))}
            <td>
              {columns.length < MAX_VARIANTS && (
                <button type="button" class="button" onClick={() => (variants.value = [...columns, { flags: {} }])}>Add a variant</button>
              )}
            </td>
          </tr>
        </thead>
        <tbody>
          {flags.map((flag) => (
            <tr key={flag.name}>
              <th scope="row" title={flag.help}><code>{flagName(flag.name)}</code><small>{unbroken(flag.help)}</small></th>
              <td>{shown(flag.value)}</td>
              {columns.map(({ name, flags: changed }, index) => (
                <td key={index}>
                  <Field flag={flag} value={changed[flag.name]} label={`${flag.name} of ${name ?? title(index)}`} onChange={(value) => change(index, flag.name, value)} />
                </td>
              ))}
              <td />
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** A text whose names of flags are never broken between two lines. */
const unbroken = (text) => text.split(/(--[a-z-]+)/).map((part, index) => (index % 2 ? <span key={index} class="unbroken">{part}</span> : part));

const shown = (value) => (value === null ? "default" : value === true ? "yes" : value === false ? "no" : String(value));

/** A value of a flag; without one it is as it was. */
function Field({ flag, value, label, onChange }) {
  if (flag.kind === "int" || flag.kind === "float") {
    const take = (event) => onChange(event.currentTarget.value === "" ? undefined : Number(event.currentTarget.value));
    return <input type="number" step={flag.kind === "int" ? 1 : "any"} aria-label={label} value={value ?? ""} placeholder="as it was" onInput={take} />;
  }
  const options = flag.kind === "bool" ? ["yes", "no"] : flag.choices;
  const take = (event) => {
    const chosen = event.currentTarget.value;
    onChange(chosen === "" ? undefined : flag.kind === "bool" ? chosen === "yes" : chosen);
  };
  return (
    <select aria-label={label} value={value === undefined ? "" : shown(value)} onChange={take}>
      <option value="">as it was</option>
      {options.map((name) => <option key={name} value={name}>{name}</option>)}
    </select>
  );
}

export const whatIfView = preactView({
  name: "what-if",
  title: "What if",
  icon: "M4 18c6 0 6-12 16-12M4 18c8 0 10-4 16-4M17 3l3 3-3 3",
  component: WhatIf,
});
