/** Questions that operators ask often, as flags of a variant. */

const SMALLEST_CHUNK = 64;
const USUAL_CHUNK = 512; // of a server that does not cut prompts

/**
 * `flags(now, load)`: what the variant changes; `now` has the values of the server's flags by name,
 * `load` what can be simulated.
 */
const PRESETS = [
  {
    name: "fewer streams at once",
    about: "half of the requests that ran at the same time: each is faster, and others wait longer",
    flags: (now, { most_running: most }) => ({ max_running_requests: Math.max(1, Math.ceil(most / 2)) }),
  },
  {
    name: "shorter prompt chunks",
    about: "streams stop for a shorter time while a long prompt is computed, which takes longer itself",
    flags: ({ chunked_prefill_size: size }) => ({ chunked_prefill_size: size > 0 ? Math.max(SMALLEST_CHUNK, size >> 1) : USUAL_CHUNK }),
  },
  { name: "streams before prompts", about: "prompts only fill up what the streams leave of a step", flags: () => ({ batch_mode: "decode-first" }) },
  { name: "prompts before streams", about: "first tokens come sooner, and streams stop meanwhile", flags: () => ({ batch_mode: "prefill-first" }) },
  { name: "shortest first", about: "requests with few tokens do not wait behind long ones", flags: () => ({ schedule_policy: "shortest" }) },
  { name: "half of the KV pages", about: "what a smaller --max-total-tokens would do", flags: ({ max_total_tokens: tokens }) => ({ max_total_tokens: tokens >> 1 }) },
  { name: "no prefix cache", about: "what the cache of prompts brings", flags: () => ({ disable_radix_cache: true }) },
  { name: "twice the replicas", about: "another copy of the model for each that there is, on hardware of its own", flags: ({ dp }) => ({ dp: 2 * dp }) },
];

/** Return the presets that change something of a server: { name, about, flags }. */
export function presets(load) {
  const now = Object.fromEntries(load.flags.map((flag) => [flag.name, flag.value]));
  return PRESETS.map((one) => ({ ...one, flags: one.flags(now, load) }))
    .filter(({ flags }) => Object.entries(flags).some(([name, value]) => name in now && now[name] !== value));
}
