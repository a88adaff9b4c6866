/** The choice of a model, where there are several. */

import { wholeModels } from "../api/models.js";

/** `value`: a name; "" for the first of `list`. */
export function ModelChoice({ value, list = wholeModels(), onChange }) {
  if (list.length < 2) return null;
  const names = list.map((one) => one.id);
  if (value && !names.includes(value)) names.push(value); // it was chosen at another server
  return (
    <select class="model-choice" aria-label="Model" value={value || names[0]} onChange={(event) => onChange(event.currentTarget.value)}>
      {names.map((name) => <option key={name} value={name}>{name}</option>)}
    </select>
  );
}
