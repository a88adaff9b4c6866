/** The messages of a conversation that are shown, and how they scroll. */

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { Icon } from "../../../shell/icon.jsx";
import { ICONS } from "../icons.js";
import { Answer } from "./answer.jsx";
import { IconButton } from "../../../shell/icon_button.jsx";
import { Question } from "./question.jsx";
import { Versions } from "./versions.jsx";

const NEAR_END_PX = 60;

export function Thread({ conversation, actions, onError }) {
  const path = conversation.shownPath().map((id) => conversation.get(id));
  const shown = path.filter((one) => one.role !== "tool");
  const lastId = path.at(-1)?.id;
  return (
    <Scroller key={conversation.id} mark={lastId}>
      <div class="thread" role="log" aria-label="Conversation" aria-live="off">
        {shown.map((message) => message.role === "user"
          ? <Question key={message.id} conversation={conversation} id={message.id} actions={actions} onError={onError} />
          : <Answers key={message.batch ?? message.id} conversation={conversation} message={message} actions={actions} isLast={message.id === lastId} />
        )}
      </div>
    </Scroller>
  );
}

/** The answers of a batch, side by side if there are several. */
function Answers({ conversation, message, actions, isLast }) {
  const { groups, current } = conversation.versions(message);
  const group = groups[current];
  const tools = (
    <>
      <IconButton icon={ICONS.again} label="Regenerate" onClick={() => actions.regenerate(message)} />
      <Versions conversation={conversation} message={message} />
    </>
  );
  if (group.length === 1) {
    return <Answer conversation={conversation} id={message.id} actions={actions} isLast={isLast}>{tools}</Answer>;
  }
  return (
    <section class="side-by-side" aria-label={`${group.length} answers`}>
      {group.map((one, index) => (
        <div key={one.id} class="side" data-selected={one.id === message.id}>
          <label class="check">
            <input type="radio" name={message.batch} checked={one.id === message.id} onChange={() => conversation.select(one)} />
            <span>Answer {index + 1}</span>
            <span class="muted">{one.id === message.id ? "the conversation goes on with this one" : ""}</span>
          </label>
          <Answer conversation={conversation} id={one.id} actions={actions} isLast={isLast && one.id === message.id}>
            {one.id === message.id && tools}
          </Answer>
        </div>
      ))}
    </section>
  );
}

/** A scroller that stays at its end while the content grows, unless the user has scrolled up. */
function Scroller({ children, mark }) {
  const frame = useRef(null);
  const content = useRef(null);
  const follows = useRef(true);
  const [isAway, setAway] = useState(false);
  const toEnd = () => {
    follows.current = true;
    frame.current.scrollTop = frame.current.scrollHeight;
  };
  useLayoutEffect(() => {
    const observer = new ResizeObserver(() => {
      if (follows.current) toEnd();
    });
    observer.observe(content.current);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(toEnd, [mark]);
  function onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = frame.current;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    setAway(!follows.current);
  }
  return (
    <div class="scroller" ref={frame} onScroll={onScroll} tabIndex={-1}>
      <div ref={content}>{children}</div>
      {isAway && (
        <button class="to-end" onClick={toEnd} aria-label="To the end" title="To the end"><Icon path={ICONS.down} /></button>
      )}
    </div>
  );
}
