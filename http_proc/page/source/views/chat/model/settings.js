/** What a conversation asks for beside its messages. */

import groups from "../parameters.json";
import { grammarFields } from "./grammars.js";
import { fieldValue, InvalidValue, parseJson } from "./values.js";

export { groups };

export const NUM_TOP = 5;
export const MAX_ANSWERS = 8;

/**
 * values: texts of the fields of parameters.json by name. tools: a JSON list, as text. toolChoice:
 * auto, none, required, or a function's name.
 */
export const DEFAULTS = {
  model: "",
  system: "",
  numAnswers: 1,
  hasProbabilities: false,
  values: {},
  grammar: { name: "", text: "" },
  tools: "",
  toolChoice: "auto",
  parallelToolCalls: true,
};

/** Return the last part of a model's name, which may be a path or that of a repository. */
export const shortName = (id) => id.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1).replace(/\.gguf$/i, "");

/** Return the tools of the settings; a function without its wrapper gets it. Throws InvalidValue. */
export function toolsOf({ tools }) {
  if (!tools.trim()) return [];
  const list = parseJson(tools, "Tools");
  const all = Array.isArray(list) ? list : [list];
  return all.map((tool) => {
    const wrapped = tool?.function ? tool : { type: "function", function: tool };
    if (!wrapped.function?.name) throw new InvalidValue("Tools: each needs a name");
    return wrapped;
  });
}

function toolFields(settings) {
  const tools = toolsOf(settings);
  if (!tools.length) return {};
  const { toolChoice: choice, parallelToolCalls } = settings;
  const isName = !["auto", "none", "required"].includes(choice);
  return {
    tools,
    tool_choice: isName ? { type: "function", function: { name: choice } } : choice,
    ...(parallelToolCalls ? {} : { parallel_tool_calls: false }),
  };
}

function samplingFields({ values }) {
  const found = {};
  for (const field of groups.flatMap((group) => group.fields)) {
    const value = fieldValue(field, values[field.name]);
    if (value !== undefined) found[field.name] = value;
  }
  return found;
}

/** Return the body of a request for answers to `messages`. Throws InvalidValue. */
export function requestBody(settings, messages, numAnswers) {
  const system = settings.system.trim();
  return {
    ...(settings.model ? { model: settings.model } : {}),
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    ...samplingFields(settings),
    ...grammarFields(settings.grammar),
    ...toolFields(settings),
    ...(settings.hasProbabilities ? { logprobs: true, top_logprobs: NUM_TOP, return_token_ids: true } : {}),
    // With several answers each has its own timings in its last chunk, without the usage of all.
    ...(numAnswers > 1 ? { n: numAnswers } : { stream_options: { include_usage: true } }),
  };
}

/** Return the body for a model without a chat template: its prompt is the text so far. */
export function completionBody(settings, messages, numAnswers) {
  const { messages: all, logprobs, top_logprobs: numTop, tools: _, tool_choice: __, ...rest } =
    requestBody(settings, messages, numAnswers);
  const prompt = all.map((message) => message.content ?? "").join("");
  return { max_tokens: 256, ...rest, prompt, ...(logprobs ? { logprobs: numTop } : {}) };
}
