/** The tokens of an answer, shaded by their probability, each with its alternatives. */

import { useRef, useState } from "preact/hooks";

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
};

/** Return the level of a probability, 0 (sure) to 4 (unlikely): the shades of the stylesheet. */
const level = (logprob) => [0.9, 0.6, 0.3, 0.1].findIndex((bound) => Math.exp(logprob) >= bound);

const shown = (text) => text.replace(/\n/g, "⏎\n");
const quoted = (text) => text.replace(/\n/g, "⏎").replace(/ /g, "·").replace(/\t/g, "⇥");

/** `onBranch(index, token)`: the user wants another token in the place of one; optional. */
export function Tokens({ tokens, onBranch }) {
  const [at, setAt] = useState(null);
  const root = useRef(null);
  const current = Math.min(at ?? 0, tokens.length - 1);

  function move(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -tokens.length, End: tokens.length };
    const step = steps[event.key];
    if (step === undefined || event.target.dataset.token === undefined) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(tokens.length - 1, current + step));
    setAt(next);
    root.current.querySelectorAll("[data-token]")[next].focus();
  }
  const leave = () => {
    const focused = root.current.contains(document.activeElement) && document.activeElement.dataset.token;
    setAt(focused ? Number(focused) : null);
  };
  const over = (event) => {
    const { token } = event.target.dataset;
    if (token !== undefined) setAt(Number(token));
  };
  return (
    <div class="tokens" ref={root} onKeyDown={move} onMouseLeave={leave}>
      <div class="token-text" role="group" aria-label="Tokens; arrow keys move" onMouseOver={over} onFocusIn={over}>
        {tokens.map((token, index) => (
          <span
            key={index}
            data-token={index}
            data-level={level(token.logprob) < 0 ? 4 : level(token.logprob)}
            tabIndex={index === current ? 0 : -1}
            class={index === at ? "token current" : "token"}
            title={`${quoted(token.text)} ${percent(token.logprob)}`}
          >
            {shown(token.text)}
          </span>
        ))}
      </div>
      <Alternatives token={tokens[at]} onBranch={onBranch && ((token) => onBranch(at, token))} />
    </div>
  );
}

function Alternatives({ token, onBranch }) {
  if (!token) return <p class="alternatives muted">Point at a token to see its probability and what else it could have been.</p>;
  const top = token.top.some((one) => one.text === token.text)
    ? token.top
    : [...token.top, { text: token.text, logprob: token.logprob }];
  return (
    <table class="alternatives" aria-live="polite">
      <caption class="visually-hidden">Alternatives</caption>
      <tbody>
        {top.map((one) => (
          <tr key={one.text} class={one.text === token.text ? "taken" : ""}>
            <td><code>{quoted(one.text)}</code></td>
            <td class="share"><meter min="0" max="1" value={Math.exp(one.logprob)} /></td>
            <td>{percent(one.logprob)}</td>
            <td>
              {onBranch && one.text !== token.text && (
                <button class="link" onClick={() => onBranch(one)}>go on from here</button>
              )}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
