/** Server-sent events of a response whose request an EventSource cannot make: POST, with a key. */

/** Call `onEvent({ event, data, id })` and `onComment(text)` until the stream ends. */
export async function readEvents(stream, { onEvent, onComment }) {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  const parser = new EventParser(onEvent, onComment);
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      parser.feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export class EventParser {
  constructor(onEvent, onComment) {
    this.onEvent = onEvent;
    this.onComment = onComment;
    this.rest = "";
    this.begin();
  }

  begin() {
    this.event = "message";
    this.id = undefined;
    this.lines = [];
  }

  feed(text) {
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop();
    for (const line of lines) this.take(line);
  }

  take(line) {
    if (line === "") {
      const { event, id, lines } = this;
      this.begin();
      if (lines.length) this.onEvent?.({ event, id, data: lines.join("\n") });
      return;
    }
    const [, name, value] = line.match(/^([^:]*)(?::\s?(.*))?$/s);
    if (name === "") this.onComment?.(value.trim());
    else if (name === "data") this.lines.push(value ?? "");
    else if (name === "event") this.event = value;
    else if (name === "id") this.id = value;
  }
}
