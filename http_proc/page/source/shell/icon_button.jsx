import { Icon } from "./icon.jsx";

/** A button with an icon alone. `pressed`: of a button that switches something on and off. */
export function IconButton({ icon, label, onClick, pressed, disabled, size = 17 }) {
  return (
    <button type="button" class="icon-button" onClick={onClick} title={label} aria-label={label} aria-pressed={pressed} disabled={disabled}>
      <Icon path={icon} size={size} />
    </button>
  );
}
