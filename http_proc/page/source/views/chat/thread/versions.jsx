/** Steps between the versions of a message. */

import { ICONS } from "../icons.js";
import { IconButton } from "../../../shell/icon_button.jsx";

export function Versions({ conversation, message }) {
  conversation.selected.value; // renders again with each new version
  const { groups, current } = conversation.versions(message);
  if (groups.length < 2) return null;
  const show = (index) => conversation.select(groups[index][0]);
  return (
    <span class="versions">
      <IconButton icon={ICONS.before} label="Version before" disabled={current <= 0} onClick={() => show(current - 1)} />
      <span aria-label={`Version ${current + 1} of ${groups.length}`}>{current + 1}/{groups.length}</span>
      <IconButton icon={ICONS.after} label="Version after" disabled={current >= groups.length - 1} onClick={() => show(current + 1)} />
    </span>
  );
}
