/** The models of the server, as GET /v1/models lists them: the first one answers by default. */

import { signal } from "@preact/signals";

export const models = signal([]);

/** Ask the server for its models. Throws ServerError. */
export async function loadModels(server) {
  models.value = (await server.get("v1/models")).data;
}

/** Return the models that have processes of their own, as adapters have not. */
export function wholeModels() {
  return models.value.filter((one) => !one.parent);
}

/** Whether a model generates text, as encoders and rerankers do not. */
const generates = ({ capabilities: can = {} }) => can.chat !== false || !(can.embeddings || can.rerank || can.classify);

/** Return the models that generate text; all, where none is known to. */
export function textModels() {
  const found = models.value.filter(generates);
  return found.length ? found : models.value;
}

/** Return the name of the first model that generates text; "" where it answers by default. */
export function nameOfDefault() {
  const [first] = textModels();
  return first === models.value[0] ? "" : first.id;
}

/** Return the part of a query that chooses a model; "" for the default one. */
export function modelQuery(name, sign = "?") {
  return name ? `${sign}model=${encodeURIComponent(name)}` : "";
}
