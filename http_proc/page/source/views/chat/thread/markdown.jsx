/** Markdown of a model: parsed block by block, so that an answer that grows renders its last block. */

import createPurifier from "dompurify";
import { marked } from "marked";
import { useLayoutEffect, useRef } from "preact/hooks";
import { copyText } from "../../../shell/clipboard.js";
import { highlight } from "./highlight.js";
import { memo } from "./memo.js";

/** Elements of an answer's own HTML that are shown as such; any other is shown as text. */
const OWN_HTML = /^<\/?(br|sub|sup|kbd|b|i|em|strong|u|s|mark)\s*\/?>$/i;
const SAFE_LINK = /^(https?:|mailto:)/i;

const escape = (text) =>
  text.replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);

marked.use({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => (OWN_HTML.test(text.trim()) ? text : escape(text)),
    // A picture would be loaded from another host, and say there that the answer was read.
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const name = (lang ?? "").trim().split(/\s/)[0].toLowerCase();
      return `<pre data-language="${escape(name)}"><code>${highlight(text, name) ?? escape(text)}</code></pre>`;
    },
  },
});

const purifier = createPurifier(window);
purifier.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName !== "A") return;
  const href = element.getAttribute("href") ?? "";
  if (!SAFE_LINK.test(href)) {
    element.removeAttribute("href");
    return;
  }
  element.setAttribute("target", "_blank");
  element.setAttribute("rel", "noopener noreferrer nofollow");
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i",
    "kbd", "li", "mark", "ol", "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody",
    "td", "th", "thead", "tr", "u", "ul",
  ],
  ALLOWED_ATTR: ["href", "class", "start", "align", "data-language", "title"],
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Return the nodes of a block of Markdown. */
function nodesOf(token, links) {
  const tokens = Object.assign([token], { links });
  return purifier.sanitize(marked.parser(tokens), ALLOWED);
}

export function Markdown({ text }) {
  const blocks = marked.lexer(text);
  return (
    <div class="markdown">
      {blocks.map((token, index) => (
        token.type !== "space" && token.type !== "def" && (
          <Block key={index} token={token} raw={token.raw} links={blocks.links} />
        )
      ))}
    </div>
  );
}

const Block = memo(function Block({ token, links }) {
  const root = useRef(null);
  useLayoutEffect(() => {
    const nodes = nodesOf(token, links);
    for (const pre of nodes.querySelectorAll("pre")) addBar(pre);
    for (const table of nodes.querySelectorAll("table")) wrap(table, "table-frame");
    root.current.replaceChildren(nodes);
  });
  return <div ref={root} />;
}, (before, after) => before.raw === after.raw);

/** Put the language and a copy button above a piece of code. */
function addBar(pre) {
  const bar = document.createElement("div");
  bar.className = "code-bar";
  const name = document.createElement("span");
  name.textContent = pre.dataset.language;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await copyText(pre.querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  bar.append(name, button);
  const frame = wrap(pre, "code-frame");
  pre.tabIndex = 0; // so that keys can scroll it
  frame.prepend(bar);
}

function wrap(element, name) {
  const frame = document.createElement("div");
  frame.className = name;
  element.replaceWith(frame);
  frame.append(element);
  return frame;
}
