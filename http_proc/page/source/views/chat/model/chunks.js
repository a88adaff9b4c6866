/** Chunks of the API's streams: what they add to the messages of a batch. */

/** Add a chunk to drafts of the messages, which are plain objects, in order of the choices. */
export function addChunk(chunk, batch, drafts) {
  for (const choice of chunk.choices ?? []) {
    const draft = drafts[choice.index];
    if (!draft) continue;
    draft.status = "streaming";
    draft.note = undefined;
    addDelta(draft, choice.delta ?? { content: choice.text });
    if (choice.logprobs) addTokens(draft, choice.logprobs);
    if (choice.finish_reason) {
      draft.finishReason = choice.finish_reason;
      draft.status = choice.finish_reason === "abort" ? "stopped" : "done";
    }
    if (chunk.timings && choice.finish_reason) draft.timings = chunk.timings;
  }
  if (chunk.usage) {
    batch.usage = chunk.usage;
    if (chunk.timings && drafts.length === 1) drafts[0].timings = chunk.timings;
  }
}

function addDelta(draft, { content, reasoning_content: reasoning, tool_calls: calls }) {
  if (content) draft.content += content;
  if (reasoning) draft.reasoning = (draft.reasoning ?? "") + reasoning;
  for (const call of calls ?? []) {
    const list = (draft.toolCalls = [...(draft.toolCalls ?? [])]);
    const index = call.index ?? 0;
    const { id, name, arguments: text } = list[index] ?? { id: "", name: "", arguments: "" };
    const { name: moreName = "", arguments: moreText = "" } = call.function ?? {};
    list[index] = { id: call.id ?? id, name: name + moreName, arguments: text + moreText };
  }
}

/**
 * Add tokens as { id, text, logprob, top: [{ id, text, logprob }] }.
 *
 * Those with which the request lets the answer begin have no logprob, and the draft has them.
 */
function addTokens(draft, logprobs) {
  const found = logprobs.content
    ? logprobs.content
        .filter((one) => one.logprob !== null)
        .map((one) => ({
          id: one.id,
          text: one.token,
          logprob: one.logprob,
          top: one.top_logprobs.map(({ id, token, logprob }) => ({ id, text: token, logprob })),
        }))
    : (logprobs.tokens ?? []).map((text, index) => ({
        text,
        logprob: logprobs.token_logprobs[index],
        top: Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([text, logprob]) => ({ text, logprob })),
      }));
  draft.tokens = [...(draft.tokens ?? []), ...found];
}
