/** The page: navigation and the view that the address names. */

import "./styles/base.css";
import "./shell/shell.css";
import { render } from "preact";
import { Shell } from "./shell/shell.jsx";

render(<Shell />, document.getElementById("page"));
