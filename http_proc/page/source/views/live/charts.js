/** Small charts: lines over the last minutes, and the prefix tree as an icicle. */

import { prepare } from "./canvas.js";

const PADDING = 4;

/** Draw lines: `series` is a list of { values, color, isFilled }; all share the scale from 0 to `max`. */
export function drawLines(canvas, series, max, colors) {
  const { context, width, height } = prepare(canvas);
  context.strokeStyle = colors.line;
  context.lineWidth = 1;
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(PADDING + (height - 2 * PADDING) * share) + 0.5;
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
  }
  for (const { values, color, isFilled } of series) {
    if (values.length < 2) continue;
    const x = (i) => (width * i) / (values.length - 1);
    const y = (value) => height - PADDING - ((height - 2 * PADDING) * Math.min(value, max)) / max;
    context.beginPath();
    values.forEach((value, i) => (i ? context.lineTo(x(i), y(value)) : context.moveTo(x(0), y(value))));
    context.strokeStyle = context.fillStyle = color;
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.stroke();
    if (!isFilled) continue;
    context.lineTo(width, height - PADDING);
    context.lineTo(0, height - PADDING);
    context.globalAlpha = 0.14;
    context.fill();
    context.globalAlpha = 1;
  }
}

/** A number at or above the largest value that reads well: 1, 2 or 5 times a power of ten. */
export function niceMax(values, least = 1) {
  const top = Math.max(least, ...values);
  const power = 10 ** Math.floor(Math.log10(top));
  return [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= top);
}

const MAX_DEPTH = 6;

/** Draw the tree from the top down, and return its boxes: [{ x, y, width, height, place }]. */
export function drawTree(canvas, tree, colors) {
  const { context, width, height } = prepare(canvas);
  const boxes = layout(tree, width, height);
  for (const box of boxes) {
    const holders = tree.num_holders[box.place];
    context.fillStyle = holders > 1 ? colors.shared : holders ? colors.decode : colors.cached;
    context.fillRect(box.x, box.y, Math.max(0.5, box.width - 1), box.height - 1);
  }
  return boxes;
}

/** Give each node a width by the pages below it, and a level by its parents. */
function layout({ parents, num_pages: pages }, width, height) {
  const sums = [...pages];
  for (let place = parents.length - 1; place >= 0; place -= 1) {
    if (parents[place] >= 0) sums[parents[place]] += sums[place];
  }
  const total = parents.reduce((sum, parent, place) => sum + (parent < 0 ? sums[place] : 0), 0);
  const level = height / MAX_DEPTH;
  const boxes = [];
  const ends = new Map([[-1, 0]]); // where the next child of a node begins
  const depths = new Map([[-1, -1]]);
  parents.forEach((parent, place) => {
    const x = ends.get(parent);
    const share = (width * sums[place]) / Math.max(1, total);
    const depth = depths.get(parent) + 1;
    ends.set(parent, x + share);
    ends.set(place, x);
    depths.set(place, depth);
    if (depth < MAX_DEPTH) boxes.push({ x, y: depth * level, width: share, height: level, place });
  });
  return boxes;
}
