/** Texts of form fields as values of a request. */

/** A field of the form that cannot be sent as it is. */
export class InvalidValue extends Error {}

export function parseJson(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new InvalidValue(`${label} is not valid JSON: ${error.message}`);
  }
}

function parseNumber(text, label) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new InvalidValue(`${label} is ${text}: it must be a number`);
  return value;
}

function parseInteger(text, label) {
  const value = parseNumber(text, label);
  if (!Number.isInteger(value)) throw new InvalidValue(`${label} is ${text}: it must be a whole number`);
  return value;
}

const PARSERS = {
  number: parseNumber,
  integer: parseInteger,
  integers: (text, label) => text.split(/[\s,]+/).filter(Boolean).map((one) => parseInteger(one, label)),
  lines: (text) => text.split("\n").filter(Boolean),
  json: parseJson,
  choice: (text) => text,
  boolean: (text) => text === "true",
};

/** Return the value of a field's text; undefined for an empty one, which is the server's default. */
export function fieldValue({ kind, label }, text) {
  return (text ?? "").trim() === "" ? undefined : PARSERS[kind](text, label);
}
