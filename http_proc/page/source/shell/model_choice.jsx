/** The choice of a model, where there are several; of an adapter it says whether it is pinned. */

import { wholeModels } from "../api/models.js";

/** `value`: a name; "" for the first of `list`. */
export function ModelChoice({ value, list = wholeModels(), onChange }) {
  if (list.length < 2) return null;
  const known = list.some((one) => one.id === value);
  const shown = value && !known ? [...list, { id: value }] : list; // it was chosen at another server
  return (
    <select class="model-choice" aria-label="Model" value={value || list[0].id} onChange={(event) => onChange(event.currentTarget.value)}>
      {shown.map(({ id, pinned }) => <option key={id} value={id}>{pinned ? `${id} (pinned)` : id}</option>)}
    </select>
  );
}
