import { Component, createElement } from "preact";

/** Return a component that renders again only where `isSame(before, after)` is false. */
export function memo(render, isSame) {
  return class Memo extends Component {
    shouldComponentUpdate(after) {
      return !isSame(this.props, after);
    }

    render(props) {
      return createElement(render, props);
    }
  };
}
