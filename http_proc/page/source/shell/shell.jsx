/** The frame around the views: navigation, theme, key. */

import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import * as server from "../api/server.js";
import { MENUS, VIEWS } from "../views/index.js";
import { Icon } from "./icon.jsx";
import { KeyButton, KeyDialog } from "./key_dialog.jsx";
import { address, go, route } from "./router.js";
import { choice, color, nextChoice, theme } from "./theme.js";

const page = { server, theme, color, go };

/** Return the view of the address, or the first one, and the path within it. */
function shown() {
  const { name, path } = route.value;
  const view = VIEWS.find((one) => one.name === name);
  return view ? { view, path } : { view: VIEWS[0], path: [] };
}

export function Shell() {
  const { view } = shown();
  useEffect(() => {
    document.title = `${view.title} · Quadriga`;
  }, [view]);
  return (
    <div class="shell">
      <header class="topbar">
        <a class="brand" href={address(VIEWS[0].name)} aria-label="Quadriga, first view">
          <img src="ui/icon.svg" alt="" width="24" height="24" />
          <span>Quadriga</span>
        </a>
        <Navigation current={view} />
        <div class="tools">
          <KeyButton />
          <ThemeButton />
        </div>
      </header>
      <ViewFrame key={view.name} view={view} />
      <KeyDialog />
    </div>
  );
}

function Navigation({ current }) {
  return (
    <nav aria-label="Views">
      {MENUS.map(({ title, views }) => (
        <div key={title} class="menu" role={title ? "group" : undefined} aria-label={title || undefined}>
          {title && <span class="menu-title" aria-hidden="true">{title}</span>}
          {views.map((view) => (
            <a key={view.name} href={address(view.name)} aria-current={view === current ? "page" : undefined}>
              <Icon path={view.icon} />
              <span>{view.title}</span>
            </a>
          ))}
        </div>
      ))}
    </nav>
  );
}

/** The element that a view is mounted in; views/index.js has the contract. */
function ViewFrame({ view }) {
  const root = useRef(null);
  const mounted = useRef(null);
  // Layout effects: what a user does right after a change of the address meets the new one.
  useLayoutEffect(() => {
    const mounting = (mounted.current = Promise.resolve(view.mount(root.current, page)));
    return () => {
      mounting.then((one) => one.unmount());
    };
  }, [view]);
  const { path } = shown();
  useLayoutEffect(() => {
    mounted.current.then((one) => shown().view === view && one.show(path));
  }, [path.join("/")]);
  return <main ref={root} class={`view view-${view.name}`} tabIndex={-1} />;
}

const THEME_ICONS = {
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  light:
    "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M4.900 4.900l1.400 1.400M17.700 17.700l1.400 1.400M2 12h2M20 12h2M4.900 19.100l1.400-1.400M17.700 6.300l1.400-1.400",
  dark: "M20 14.500A8.500 8.500 0 0 1 9.500 4a8.500 8.500 0 1 0 10.500 10.500z",
};

function ThemeButton() {
  const label = `Colours: ${choice.value === "auto" ? "as the system" : choice.value}`;
  return (
    <button class="icon-button" onClick={nextChoice} title={label} aria-label={label}>
      <Icon path={THEME_ICONS[choice.value]} />
    </button>
  );
}
