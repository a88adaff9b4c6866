/** The field for the next message. */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Icon } from "../../shell/icon.jsx";
import { ICONS } from "./icons.js";

const MAX_HEIGHT_PX = 240;

/**
 * `isReady()`: the conversation of the address is the one that is shown. A text that is sent earlier
 * is held until then, unless the text or the address changes first. `onSend(text)` returns whether the text was sent; otherwise it stays.
 */
export function Composer({ isBusy, isReady, onSend, onStop, hint }) {
  const [text, setText] = useState("");
  const [heldAt, setHeldAt] = useState(null); // the address
  const area = useRef(null);
  // A layout effect: a key that is pressed as soon as the field is there has its effect.
  useLayoutEffect(() => {
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

  useLayoutEffect(() => {
    if (heldAt === location.hash) send();
    else setHeldAt(null);
  });

  function send() {
    const isNow = isReady();
    setHeldAt(isNow ? null : location.hash);
    if (isNow && !isBusy && onSend(text)) setText("");
  }
  function submit(event) {
    event.preventDefault();
    if (text.trim()) send();
  }
  function onInput(event) {
    setText(event.target.value);
    setHeldAt(null);
  }
  function onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  }
  return (
    <form class="composer" onSubmit={submit}>
      <div class="composer-box">
        <textarea
          ref={area} rows={1} aria-label="Message" placeholder="Message" enterkeyhint="send"
          value={text} onInput={onInput} onKeyDown={onKey}
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
