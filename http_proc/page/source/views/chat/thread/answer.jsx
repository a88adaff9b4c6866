/** One answer: thinking, text or tokens, calls, figures, and what can be done with it. */

import { useState } from "preact/hooks";
import { CopyButton } from "../../../shell/copy_button.jsx";
import { Icon } from "../../../shell/icon.jsx";
import { IconButton } from "../../../shell/icon_button.jsx";
import { address } from "../../../shell/router.js";
import { ICONS } from "../icons.js";
import { Markdown } from "./markdown.jsx";
import { Tokens } from "./tokens.jsx";
import { ToolCalls } from "./tool_calls.jsx";

const ENDS = {
  length: "The answer reached its limit of tokens.",
  abort: "Stopped.",
};

export function Answer({ conversation, id, actions, isLast, children }) {
  const message = conversation.messages.get(id).value;
  const [showsTokens, setShowsTokens] = useState(false);
  const isOpen = message.status === "waiting" || message.status === "streaming";
  const canGoOn = !isOpen && isLast && message.content && !message.toolCalls?.length &&
    (message.status !== "done" || message.finishReason === "length");
  const hasIds = message.tokens?.every((one) => one.id !== undefined);
  const canBranch = !isOpen && (hasIds || (!message.reasoning && !message.toolCalls?.length));
  return (
    <article class="answer" aria-busy={isOpen} data-status={message.status}>
      {message.reasoning && <Thinking text={message.reasoning} isOpen={isOpen && !message.content} />}
      {showsTokens && message.tokens ? (
        <Tokens tokens={message.tokens} onBranch={canBranch ? (index, token) => actions.branch(message, index, token) : undefined} />
      ) : (
        message.content && <Markdown text={message.content} />
      )}
      {isOpen && <Waiting message={message} />}
      {!isOpen && message.toolCalls?.length > 0 && (
        <ToolCalls
          calls={message.toolCalls}
          results={resultsOf(conversation, message)}
          onSend={isLast ? (texts) => actions.sendResults(message, texts) : undefined}
        />
      )}
      {message.error && <Problem error={message.error} isPartial={message.status === "interrupted"} />}
      {!isOpen && (
        <footer class="answer-foot">
          <Figures conversation={conversation} message={message} />
          <div class="answer-tools">
            {canGoOn && (
              <IconButton icon={ICONS.goOn} label="Continue" onClick={() => actions.goOn(message)} />
            )}
            {message.tokens && (
              <IconButton icon={ICONS.tokens} label="Token probabilities" pressed={showsTokens} onClick={() => setShowsTokens(!showsTokens)} />
            )}
            <TraceLink batch={conversation.batches.get(message.run)} />
            <CopyButton text={() => message.content} label="Copy answer" />
            {children}
          </div>
        </footer>
      )}
    </article>
  );
}

function Thinking({ text, isOpen }) {
  return (
    <details class="thinking" open={isOpen}>
      <summary>{isOpen ? "Thinking …" : "Thinking"}</summary>
      <Markdown text={text} />
    </details>
  );
}

function Waiting({ message }) {
  const note = message.note && message.note[0].toUpperCase() + message.note.slice(1);
  return (
    <p class="waiting">
      <span class="pulse" aria-hidden="true" />
      <span role="status">{note ?? (message.status === "waiting" ? "Waiting for the first token" : "")}</span>
      {message.rate > 0 && !note && <span>{rateText(message.rate)}</span>}
    </p>
  );
}

function Problem({ error, isPartial }) {
  return (
    <div class="problem" role="alert">
      <p>{error.message}</p>
      {isPartial && <p class="muted">What has arrived is above. "Continue" goes on from there.</p>}
      {(error.code || error.status > 0) && (
        <p class="muted"><code>{[error.status || "", error.code].filter(Boolean).join(" · ")}</code></p>
      )}
    </div>
  );
}

const seconds = (ms) => (ms < 10_000 ? `${(ms / 1000).toFixed(2)} s` : `${Math.round(ms / 1000)} s`);

const rateText = (rate) => `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`;

/** Time to the first token, speed and counts, as the server measured them. */
function Figures({ conversation, message }) {
  const timings = message.timings;
  const batch = conversation.batches.get(message.run);
  const usage = batch?.messageIds.length === 1 ? batch.usage : undefined;
  const rate = timings?.tokens_per_second;
  const num = usage?.completion_tokens ?? (rate && timings.decode_ms ? Math.round((rate * timings.decode_ms) / 1000) + 1 : undefined);
  const parts = [
    timings?.ttft_ms != null && [`${seconds(timings.ttft_ms)} to first token`, `in the queue ${seconds(timings.queue_ms ?? 0)}, prefill ${seconds(timings.prefill_ms ?? 0)}`],
    rate != null && [rateText(rate), ""],
    num && [`${num} tokens`, usage ? `prompt ${usage.prompt_tokens} tokens, ${timings?.cached_tokens ?? 0} of them from the cache` : ""],
    timings?.cached_tokens > 0 && [`${timings.cached_tokens} cached`, "tokens of the prompt from the prefix cache"],
  ].filter(Boolean);
  const end = message.status === "stopped" ? "Stopped." : ENDS[message.finishReason];
  return (
    <p class="figures">
      {parts.map(([text, title]) => <span key={text} title={title}>{text}</span>)}
      {end && <span>{end}</span>}
    </p>
  );
}

/** A link to the request view, where the server has traced the request. */
function TraceLink({ batch }) {
  if (!batch?.isTraced) return null;
  const label = "Where the time of this answer went";
  return (
    <a class="icon-button" href={address("request", batch.requestId)} title={label} aria-label={label}>
      <Icon path={ICONS.trace} size={17} />
    </a>
  );
}

/** Return the results of an answer's calls that follow it, by call id. */
function resultsOf(conversation, message) {
  const found = new Map();
  let id = conversation.selected.value[message.id];
  for (let one = conversation.get(id); one?.role === "tool"; one = conversation.get(id)) {
    found.set(one.toolCallId, one.content);
    id = conversation.selected.value[id];
  }
  return found;
}
