/** Return a time in microseconds for people. */
export function duration(us) {
  if (us >= 1e6) return `${(us / 1e6).toFixed(us >= 1e7 ? 1 : 2)} s`;
  if (us >= 1e4) return `${(us / 1e3).toFixed(0)} ms`;
  return us >= 1e3 ? `${(us / 1e3).toFixed(1)} ms` : `${us.toFixed(0)} µs`;
}
