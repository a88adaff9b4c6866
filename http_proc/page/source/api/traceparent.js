/** Traces of the page's own requests: the header `traceparent`, as in W3C Trace Context. */

/** Return a header that begins a trace, which the server keeps for the request view. */
export function newTraceparent() {
  return `00-${hexDigits(16)}-${hexDigits(8)}-01`;
}

function hexDigits(numBytes) {
  const bytes = crypto.getRandomValues(new Uint8Array(numBytes));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
