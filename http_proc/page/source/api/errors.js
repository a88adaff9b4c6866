/** An answer of the server that is an error, or the lack of an answer. */
export class ServerError extends Error {
  /** `status`: of HTTP; 0: the server could not be reached, or the connection broke. */
  constructor(message, { status = 0, code = "", requestId = "" } = {}) {
    super(message);
    this.name = "ServerError";
    this.status = status;
    this.code = code;
    this.requestId = requestId;
  }
}

/** Return the error that the body of an answer, or an event of a stream, has. */
export function errorOf(body, status, requestId) {
  const about = body?.error ?? {};
  const text = about.message ?? `The server answered with status ${status}`;
  return new ServerError(text, { status, code: about.code ?? "", requestId });
}
