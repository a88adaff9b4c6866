import { useState } from "preact/hooks";
import { copyText } from "./clipboard.js";
import { Icon } from "./icon.jsx";

const COPY = "M9 9h11v11H9zM15 9V4H4v11h5";
const DONE = "M5 12.500l4.500 4.500L19 7";

/** A button that copies what `text()` returns. */
export function CopyButton({ text, label }) {
  const [isDone, setDone] = useState(false);
  async function copy() {
    await copyText(text());
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  }
  return (
    <button class="icon-button" onClick={copy} title={label} aria-label={isDone ? "Copied" : label}>
      <Icon path={isDone ? DONE : COPY} size={17} />
    </button>
  );
}
