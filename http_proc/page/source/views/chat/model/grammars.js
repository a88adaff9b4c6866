/** Ways to bind an answer to a form: the names of their fields, and how a text becomes a value. */

import { parseJson } from "./values.js";

const lines = (text) => text.split("\n").filter(Boolean);

export const GRAMMARS = [
  { name: "", label: "Free text" },
  { name: "json_object", label: "Any JSON object" },
  { name: "json_schema", label: "JSON schema", example: '{"type": "object", "properties": {}}', value: parseJson },
  { name: "regex", label: "Regular expression", example: "(yes|no)", value: (text) => text },
  { name: "choice", label: "One of these lines", example: "yes\nno", value: lines },
  { name: "ebnf", label: "EBNF grammar", example: 'start: "yes" | "no"', value: (text) => text },
  { name: "structural_tag", label: "Structural tag", example: '{"format": {}}', value: parseJson },
];

/** Return the fields of a request for a grammar, { name, text }. Throws InvalidValue. */
export function grammarFields({ name, text }) {
  const grammar = GRAMMARS.find((one) => one.name === name);
  if (!name || !grammar) return {};
  if (name === "json_object") return { response_format: { type: "json_object" } };
  const value = grammar.value(text, grammar.label);
  if (name !== "json_schema") return { [name]: name === "structural_tag" ? text : value };
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: value } } };
}
