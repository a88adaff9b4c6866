/**
 * The views of the page, by menu, in the order of the navigation: one file or folder each, and one
 * name here.
 *
 * A view is an object:
 *
 *   name    the first part of its address: "live" is shown at #/live and at #/live/anything
 *   title   its name in the navigation
 *   icon    the `d` of an icon's path, drawn as a line in 24 × 24
 *   mount   mount(root, page) fills the empty element `root` and returns an object with
 *             show(path)   the address has changed within the view; `path` are its parts after
 *                          the name, decoded: ["abc"] for #/request/abc. Called once after `mount`
 *             unmount()    the view is left: end its streams and timers
 *           It may return a promise of that object.
 *
 * `page` has what a view needs of the page:
 *
 *   server     calls of the API with the user's key (api/server.js): get, post, events
 *   theme      a signal whose value changes when the colours change (shell/theme.js)
 *   color      color("accent") is the colour of --accent as a canvas takes it
 *   go         go("request", id) changes the address
 *
 * `preactView` makes a view of a Preact component. Styles are imported by the view's own files, and
 * take their colours from styles/base.css.
 */

import { chatView } from "./chat/chat.jsx";
import { liveView } from "./live/live.jsx";
import { requestView } from "./request/request.jsx";
import { whatIfView } from "./what_if/what_if.jsx";

export const MENUS = [
  { title: "", views: [chatView] },
  { title: "Operate", views: [liveView, requestView, whatIfView] },
];
export const VIEWS = MENUS.flatMap((menu) => menu.views);
