/** The dialog in which the user enters an API key. */

import { useEffect, useRef } from "preact/hooks";
import { askForKey, isKept, key, question, setKey } from "../api/keys.js";
import { Icon } from "./icon.jsx";

const KEY_ICON = "M15 3a6 6 0 0 0-5.800 7.500L3 16.700V21h4.300v-2.500H10V16h2.500l1-1.200A6 6 0 1 0 15 3zM16.500 7.500h.01";

export function KeyButton() {
  const label = key.value ? "API key: set" : "API key: none";
  return (
    <button class="icon-button" onClick={() => askForKey("")} title={label} aria-label={label}>
      <Icon path={KEY_ICON} />
      {key.value && <span class="dot" />}
    </button>
  );
}

export function KeyDialog() {
  const dialog = useRef(null);
  const open = question.value;
  useEffect(() => {
    if (open) dialog.current.showModal();
  }, [open]);
  if (!open) return null;

  function save(event) {
    event.preventDefault();
    const form = event.currentTarget.elements;
    setKey(form.key.value.trim(), form.kept.checked);
    open.answer(key.value);
  }
  return (
    <dialog ref={dialog} class="key-dialog" aria-labelledby="key-title" onCancel={() => open.answer(null)}>
      <form onSubmit={save}>
        <h2 id="key-title">API key</h2>
        {open.reason && <p class="error-text" role="alert">{open.reason}</p>}
        <p class="muted">The key that the server was started with (<code>--api-key</code>), or a tenant's.</p>
        <label class="field">
          <span>Key</span>
          <input name="key" type="password" autocomplete="off" defaultValue={key.value} />
        </label>
        <label class="check">
          <input name="kept" type="checkbox" defaultChecked={isKept()} />
          <span>Keep it in this browser; otherwise it is forgotten with the tab</span>
        </label>
        <div class="buttons">
          <button type="button" class="button" onClick={() => open.answer(null)}>Cancel</button>
          <button class="button primary">Use key</button>
        </div>
      </form>
    </dialog>
  );
}
