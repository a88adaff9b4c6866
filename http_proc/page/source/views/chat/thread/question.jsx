/** A message of the user, which can be edited and sent again. */

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { CopyButton } from "../../../shell/copy_button.jsx";
import { ICONS } from "../icons.js";
import { IconButton } from "../../../shell/icon_button.jsx";
import { Versions } from "./versions.jsx";

export function Question({ conversation, id, actions, onError }) {
  const message = conversation.messages.get(id).value;
  const [isEdited, setEdited] = useState(false);
  if (isEdited) {
    return <EditForm message={message} actions={actions} onError={onError} onEnd={() => setEdited(false)} />;
  }
  return (
    <article class="question">
      <div class="question-text">{message.content}</div>
      <div class="question-tools">
        <Versions conversation={conversation} message={message} />
        <IconButton icon={ICONS.edit} label="Edit and send again" onClick={() => setEdited(true)} />
        <CopyButton text={() => message.content} label="Copy message" />
      </div>
    </article>
  );
}

function EditForm({ message, actions, onEnd, onError }) {
  const [text, setText] = useState(message.content);
  const area = useRef(null);
  useLayoutEffect(() => {
    area.current.focus();
    area.current.setSelectionRange(text.length, text.length);
  }, []);
  function submit(event) {
    event?.preventDefault();
    if (!text.trim()) return;
    try {
      actions.edit(message, text);
      onEnd();
    } catch (error) {
      onError(error);
    }
  }
  function onKey(event) {
    if (event.key === "Escape") {
      event.stopPropagation();
      onEnd();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  }
  return (
    <form class="question edited" onSubmit={submit}>
      <textarea ref={area} aria-label="Edit message" value={text} rows={Math.min(10, text.split("\n").length + 1)} onInput={(event) => setText(event.target.value)} onKeyDown={onKey} />
      <div class="buttons">
        <button type="button" class="button" onClick={onEnd}>Cancel</button>
        <button class="button primary" disabled={!text.trim()}>Send</button>
      </div>
    </form>
  );
}
