/** A canvas in the pixels of the screen. */

/** Size a canvas to its element and return its context, scaled to CSS pixels: { context, width, height }. */
export function prepare(canvas) {
  const scale = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const NAMES = [
  "text", "muted", "line", "surface", "raised", "hover", "accent", "danger", "good",
  "waiting", "prefill", "cached", "decode", "speculated", "retracted", "shared",
];

/** Return the colours of the theme by name. */
export function palette(color) {
  return Object.fromEntries(NAMES.map((name) => [name, color(name)]));
}
