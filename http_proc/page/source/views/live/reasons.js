/** What a request does in a step: the kinds of rows, and the reasons to have none. docs/live.md */

/** Codes of the cells of a lane. The kinds of rows are those of the feed, plus 1. */
export const NONE = 0;
export const DECODE = 1;
export const SPECULATED = 5;
export const RETRACTED = 6;
export const WAITING = 16; // plus the place of the reason in REASONS

export const KINDS = [
  { code: DECODE, color: "decode", title: "decode", text: "computes its next token" },
  { code: 2, color: "prefill", title: "prefill", text: "computes the rest of its prompt" },
  { code: 3, color: "prefill", title: "chunk", text: "computes a part of its prompt" },
  { code: 4, color: "retracted", title: "again", text: "computes again what it had before it lost its pages, or its worker" },
  { code: SPECULATED, color: "speculated", title: "several", text: "computes several tokens at once, which a grammar forces or a draft guesses" },
];

export const REASONS = {
  budget: "The step computes as many prompt tokens as it may.",
  slots: "No slot is free.",
  pages: "No KV page is free for it.",
  turn: "The step decodes only, or computes prompts only.",
  width: "The step has as many decode rows as it may.",
  priority: "Requests of a larger priority go first.",
  fairness: "It is the turn of another client or tenant.",
  policy: "The policy prefers a request that arrived later.",
  grammar: "The worker compiles its grammar.",
  adapter: "Its adapter is being loaded, or others have all places (--max-loras).",
  worker: "The worker is not ready.",
  quarantine: "A request that may crash the worker runs alone.",
  retracted: "It has lost its pages, and its last step is not answered yet.",
  ending: "Its last step is in flight.",
};
const NAMES = Object.keys(REASONS);

/** Return the code of a reason; one that this page does not know is a plain wait. */
export function codeOf(reason) {
  return WAITING + Math.max(0, NAMES.indexOf(reason));
}

/** Return { title, text, color } of a code; null for a cell without anything. */
export function meaning(code) {
  if (code === NONE) return null;
  if (code >= WAITING) {
    const name = NAMES[code - WAITING];
    return { title: `waits: ${name}`, text: REASONS[name], color: name === "retracted" ? "retracted" : "waiting" };
  }
  if (code === RETRACTED) {
    return { title: "retracted", text: "It was retracted: others needed its pages.", color: "retracted" };
  }
  return KINDS.find((kind) => kind.code === code);
}
