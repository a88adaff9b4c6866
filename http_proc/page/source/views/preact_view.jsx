import { signal } from "@preact/signals";
import { render } from "preact";

/** Make a view of a component, which gets `path` and `page`. */
export function preactView({ name, title, icon, component: Component }) {
  function mount(root, page) {
    const path = signal([]);
    const Root = () => <Component path={path.value} page={page} />;
    return {
      show(parts) {
        path.value = parts;
        render(<Root />, root);
      },
      unmount() {
        render(null, root);
      },
    };
  }
  return { name, title, icon, mount };
}
