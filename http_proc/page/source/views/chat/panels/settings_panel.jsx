/** What the conversation asks for: model, system prompt, sampling, form of the answer, tools. */

import { GRAMMARS, grammarFields } from "../model/grammars.js";
import { DEFAULTS, groups, MAX_ANSWERS, toolsOf } from "../model/settings.js";
import { fieldValue } from "../model/values.js";
import { ICONS } from "../icons.js";
import { IconButton } from "../../../shell/icon_button.jsx";

const TOOL_EXAMPLE = `[{"name": "get_weather",
  "description": "The weather of a city",
  "parameters": {"type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"]}}]`;

/** Return the message of the error that `check` throws; "" for none. */
function problem(check) {
  try {
    check();
    return "";
  } catch (error) {
    return error.message;
  }
}

/** `settings`: a signal. `ranges`: { minimum, maximum, default } of the fields by name. */
export function SettingsPanel({ settings, models, ranges, onClose }) {
  const current = settings.value;
  const set = (changes) => {
    settings.value = { ...settings.peek(), ...changes };
  };
  const setValue = (name, text) => set({ values: { ...settings.peek().values, [name]: text } });
  return (
    <>
      <div class="panel-head">
        <h2>Settings</h2>
        <IconButton icon={ICONS.close} label="Close settings" onClick={onClose} />
      </div>
      <div class="settings">
        <label class="field">
          <span>Model</span>
          <select value={current.model || models[0]?.id} onChange={(event) => set({ model: event.target.value })}>
            {models.map((one) => <option key={one.id} value={one.id}>{one.id}</option>)}
          </select>
        </label>
        <label class="field">
          <span>System prompt</span>
          <textarea rows={4} value={current.system} onInput={(event) => set({ system: event.target.value })} />
        </label>
        <label class="field">
          <span>Answers side by side <output>{current.numAnswers}</output></span>
          <input type="range" min={1} max={MAX_ANSWERS} value={current.numAnswers} onInput={(event) => set({ numAnswers: Number(event.target.value) })} />
        </label>
        <label class="check">
          <input type="checkbox" checked={current.hasProbabilities} onChange={(event) => set({ hasProbabilities: event.target.checked })} />
          <span>Token probabilities</span>
        </label>
        {groups.map((group, index) => (
          <details key={group.title} open={index === 0}>
            <summary>{group.title}<Count fields={group.fields} values={current.values} /></summary>
            {group.fields.map((field) => (
              <Field key={field.name} field={field} range={ranges[field.name] ?? {}} text={current.values[field.name] ?? ""} onText={(text) => setValue(field.name, text)} />
            ))}
          </details>
        ))}
        <details>
          <summary>Form of the answer{current.grammar.name && <span class="count">1</span>}</summary>
          <Grammar grammar={current.grammar} onChange={(grammar) => set({ grammar })} />
        </details>
        <details>
          <summary>Tools{problem(() => toolsOf(current)) || !toolsOf(current).length ? "" : <span class="count">{toolsOf(current).length}</span>}</summary>
          <Tools current={current} set={set} />
        </details>
        <button class="button" onClick={() => set({ ...DEFAULTS, model: current.model })}>Reset settings</button>
      </div>
    </>
  );
}

function Count({ fields, values }) {
  const num = fields.filter((field) => values[field.name]).length;
  return num ? <span class="count">{num}</span> : null;
}

function Field({ field, range, text, onText }) {
  const { name, label, kind, hint } = field;
  const error = problem(() => fieldValue(field, text));
  const common = {
    name, value: text, "aria-invalid": Boolean(error), "aria-describedby": `about-${name}`,
    onInput: (event) => onText(event.target.value),
  };
  const usual = range.default == null ? "default" : `${range.default}`;
  return (
    <label class="field">
      <span>{label}</span>
      {kind === "boolean" || kind === "choice" ? (
        <select {...common}>
          <option value="">default</option>
          {(field.choices ?? ["true", "false"]).map((one) => (
            <option key={one} value={one}>{{ true: "yes", false: "no" }[one] ?? one}</option>
          ))}
        </select>
      ) : kind === "number" || kind === "integer" ? (
        <input {...common} type="number" inputmode="decimal" step={field.step ?? (kind === "integer" ? 1 : "any")} min={range.minimum} max={range.maximum} placeholder={usual} />
      ) : kind === "integers" ? (
        <input {...common} type="text" placeholder="1, 2, 3" />
      ) : (
        <textarea {...common} rows={2} spellcheck={false} />
      )}
      <small id={`about-${name}`} class={error ? "error-text" : "muted"}>{error || hint}</small>
    </label>
  );
}

function Grammar({ grammar, onChange }) {
  const about = GRAMMARS.find((one) => one.name === grammar.name);
  const error = problem(() => grammarFields(grammar));
  return (
    <>
      <label class="field">
        <span>The answer is</span>
        <select value={grammar.name} onChange={(event) => onChange({ name: event.target.value, text: GRAMMARS.find((one) => one.name === event.target.value).example ?? "" })}>
          {GRAMMARS.map((one) => <option key={one.name} value={one.name}>{one.label}</option>)}
        </select>
      </label>
      {about?.value && (
        <label class="field">
          <span>{about.label}</span>
          <textarea class="code" rows={7} spellcheck={false} value={grammar.text} aria-invalid={Boolean(error)} onInput={(event) => onChange({ ...grammar, text: event.target.value })} />
          {error && <small class="error-text">{error}</small>}
        </label>
      )}
    </>
  );
}

function Tools({ current, set }) {
  const error = problem(() => toolsOf(current));
  const names = error ? [] : toolsOf(current).map((tool) => tool.function.name);
  return (
    <>
      <label class="field">
        <span>Definitions, as JSON</span>
        <textarea class="code" rows={7} spellcheck={false} value={current.tools} placeholder={TOOL_EXAMPLE} aria-invalid={Boolean(error)} onInput={(event) => set({ tools: event.target.value })} />
        {error && <small class="error-text">{error}</small>}
      </label>
      {!current.tools && <button class="button" onClick={() => set({ tools: TOOL_EXAMPLE })}>Insert an example</button>}
      <label class="field">
        <span>Calls</span>
        <select value={current.toolChoice} onChange={(event) => set({ toolChoice: event.target.value })}>
          <option value="auto">if the model wants to</option>
          <option value="required">at least one</option>
          <option value="none">none</option>
          {names.map((name) => <option key={name} value={name}>{name}</option>)}
        </select>
      </label>
      <label class="check">
        <input type="checkbox" checked={current.parallelToolCalls} onChange={(event) => set({ parallelToolCalls: event.target.checked })} />
        <span>Several calls at a time</span>
      </label>
      <p class="muted small">The model's calls appear in its answer; you type in their results.</p>
    </>
  );
}
