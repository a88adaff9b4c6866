/** Calls of the server's API with the user's key. */

import { errorOf, ServerError } from "./errors.js";
import { askForKey, key } from "./keys.js";
import { readEvents } from "./sse.js";

/**
 * Send a request and return the response, whose status is below 400.
 *
 * A 401 asks the user for a key and tries again. Throws ServerError; AbortError after `signal`.
 */
async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  for (;;) {
    const used = key.value;
    const response = await reach(path, {
      method,
      signal,
      headers: {
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...(used ? { Authorization: `Bearer ${used}` } : {}),
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "omit",
      cache: "no-store",
    });
    if (response.ok) return response;
    const error = await errorFrom(response);
    if (response.status !== 401) throw error;
    const isNew = key.value !== used; // another call has asked meanwhile
    if (!isNew && (await askForKey(used ? "The server refuses this key." : "")) === null) {
      throw error;
    }
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
}

async function errorFrom(response) {
  const body = await response.json().catch(() => null);
  return errorOf(body, response.status, response.headers.get("X-Request-Id") ?? "");
}

/** Return the JSON body of GET `path`. */
export async function get(path, options) {
  return (await send(path, options)).json();
}

/** Return the JSON body of POST `path`. */
export async function post(path, body, options) {
  return (await send(path, { ...options, method: "POST", body })).json();
}

/**
 * Read a stream of server-sent events to its end.
 *
 * `body`: of a POST; without one the request is a GET. `onOpen(response)` comes first, then
 * `onEvent({ event, data, id })` and `onComment(text)`. Throws ServerError, with status 0 where the
 * connection broke, and AbortError after `signal`.
 */
export async function events(path, { body, headers, signal, onOpen, onEvent, onComment } = {}) {
  const method = body === undefined ? "GET" : "POST";
  const accept = { Accept: "text/event-stream", ...headers };
  const response = await send(path, { method, body, headers: accept, signal });
  onOpen?.(response);
  try {
    await readEvents(response.body, { onEvent, onComment });
  } catch (error) {
    if (error.name === "AbortError" || !(error instanceof TypeError)) throw error;
    throw new ServerError("The connection to the server broke.");
  }
}
