/** The field for the next message. */

import { useEffect, useRef, useState } from "preact/hooks";
import { Icon } from "../../shell/icon.jsx";
import { ICONS } from "./icons.js";

const MAX_HEIGHT_PX = 240;

/**
 * `onSend(text)` returns whether the text was sent, or throws what is wrong with the settings; then
 * the text stays.
 */
export function Composer({ isBusy, onSend, onStop, onError, hint }) {
  const [text, setText] = useState("");
  const area = useRef(null);
  useEffect(() => {
    if (matchMedia("(pointer: fine)").matches) area.current.focus();
    const focus = (event) => {
      if (event.key !== "/" || event.target.closest("input, textarea, select, dialog")) return;
      event.preventDefault();
      area.current.focus();
    };
    addEventListener("keydown", focus);
    return () => removeEventListener("keydown", focus);
  }, []);
  useEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight + 2, MAX_HEIGHT_PX)}px`;
  }, [text]);

  function submit(event) {
    event.preventDefault();
    if (!text.trim() || isBusy) return;
    try {
      if (onSend(text)) setText("");
    } catch (error) {
      onError(error);
    }
  }
  function onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  }
  return (
    <form class="composer" onSubmit={submit}>
      <div class="composer-box">
        <textarea
          ref={area} rows={1} aria-label="Message" placeholder="Message" enterkeyhint="send"
          value={text} onInput={(event) => setText(event.target.value)} onKeyDown={onKey}
        />
        {isBusy ? (
          <button key="stop" type="button" class="round" onClick={onStop} aria-label="Stop" title="Stop (Esc)"><Icon path={ICONS.stop} /></button>
        ) : (
          <button key="send" class="round" disabled={!text.trim()} aria-label="Send" title="Send (Enter)"><Icon path={ICONS.send} /></button>
        )}
      </div>
      <p class="composer-hint">{hint}</p>
    </form>
  );
}
