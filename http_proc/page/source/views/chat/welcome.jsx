/** What an empty conversation shows. */

import { shortName } from "./model/settings.js";

const IDEAS = [
  "Explain how a prefix cache saves work, with an example.",
  "Write a Python function that parses ISO 8601 durations.",
  "Make a table of three sorting algorithms and their costs.",
  "Suggest a name for a horse that is never late.",
];

export function Welcome({ model, onPick }) {
  const context = model?.max_model_len?.toLocaleString("en");
  return (
    <div class="welcome">
      <img src="ui/icon.svg" alt="" width="52" height="52" />
      <h2 title={model?.id}>{model ? shortName(model.id) : "…"}</h2>
      {model && <p class="muted">{context} tokens of context{model.capabilities?.chat === false && " · a base model: it continues the text"}</p>}
      <ul>
        {IDEAS.map((idea) => <li key={idea}><button onClick={() => onPick(idea)}>{idea}</button></li>)}
      </ul>
    </div>
  );
}
