/** The calls of an answer, and the form in which the user types in their results. */

import { useState } from "preact/hooks";
import { Icon } from "../../../shell/icon.jsx";
import { ICONS } from "../icons.js";

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
};

/** `results`: texts that were sent, by call id. `onSend(texts)`: there are none yet. */
export function ToolCalls({ calls, results, onSend }) {
  const [texts, setTexts] = useState(() => calls.map(() => ""));
  function submit(event) {
    event.preventDefault();
    onSend(calls.map((_, index) => texts[index] ?? ""));
  }
  return (
    <form class="tool-calls" onSubmit={submit}>
      {calls.map((call, index) => (
        <div class="tool-call" key={call.id || index}>
          <div class="tool-name"><Icon path={ICONS.tool} size={16} /><code>{call.name}</code></div>
          <pre tabIndex={0}>{pretty(call.arguments)}</pre>
          {results?.has(call.id) ? (
            <p class="tool-result"><span class="muted">Result</span> <code>{results.get(call.id)}</code></p>
          ) : onSend && (
            <label class="field">
              <span>Result of {call.name}</span>
              <textarea
                rows={2}
                value={texts[index]}
                placeholder='{"temperature": 21}'
                onInput={(event) => setTexts(calls.map((_, i) => (i === index ? event.target.value : texts[i] ?? "")))}
              />
            </label>
          )}
        </div>
      ))}
      {onSend && <div class="buttons"><button class="button primary">Send results</button></div>}
    </form>
  );
}
