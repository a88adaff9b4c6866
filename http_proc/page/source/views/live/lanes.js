/** The lanes: a column is a step, a row a request. Only what is visible is drawn. */

import { prepare } from "./canvas.js";
import { COLUMNS, nameOf } from "./picture.js";
import { meaning, NONE, WAITING } from "./reasons.js";

export const ROW_HEIGHT = 18;
const CELL_WIDTH = 7;
const LABEL_WIDTH = 268;
const NARROW_LABEL_WIDTH = 120;
const TOKENS_WIDTH = 116;
const NARROW_TOKENS_WIDTH = 52;
const MIN_TENANT_WIDTH = 30;
const PADDING = 8;
const ENDED_ALPHA = 0.4;
const NARROW = 560;

/** Return a text, or as much of its begin and end as there is room for. */
function fitted(context, text, room) {
  let shown = text;
  for (let count = text.length - 1; count > 1 && context.measureText(shown).width > room; count -= 1) {
    shown = `${text.slice(0, Math.ceil(count / 2))}…${text.slice(-Math.floor(count / 2))}`;
  }
  return shown;
}

export class Lanes {
  constructor(canvas, scroller) {
    this.canvas = canvas;
    this.scroller = scroller;
    this.rows = [];
    this.selected = null; // { row, back }: a request, and the number of columns back from the newest
  }

  get labelWidth() {
    return this.canvas.clientWidth < NARROW ? NARROW_LABEL_WIDTH : LABEL_WIDTH;
  }

  get numColumns() {
    const room = this.canvas.clientWidth - this.labelWidth - 8;
    return Math.max(1, Math.min(COLUMNS, Math.floor(room / CELL_WIDTH)));
  }

  draw(picture, colors) {
    const { context, width, height } = prepare(this.canvas);
    this.rows = picture.visible(this.numColumns);
    this.column = picture.column;
    const top = this.scroller.scrollTop;
    const first = Math.floor(top / ROW_HEIGHT);
    const last = Math.min(this.rows.length, Math.ceil((top + height) / ROW_HEIGHT));
    context.font = `11px ${getComputedStyle(this.canvas).fontFamily}`;
    context.textBaseline = "middle";
    for (let place = first; place < last; place += 1) {
      const row = this.rows[place];
      const y = place * ROW_HEIGHT - top;
      if (this.selected?.row === row) {
        context.fillStyle = colors.raised;
        context.fillRect(0, y, width, ROW_HEIGHT);
      }
      this.drawLabel(context, row, y, colors);
      this.drawLane(context, row, y, picture, colors);
    }
    this.drawSelection(context, top, colors);
  }

  drawLabel(context, row, y, colors) {
    const { num_prompt_tokens: prompt, tenant } = row.about;
    const isNarrow = this.labelWidth === NARROW_LABEL_WIDTH;
    const room = this.labelWidth - (isNarrow ? NARROW_TOKENS_WIDTH : TOKENS_WIDTH) - 2 * PADDING;
    const middle = y + ROW_HEIGHT / 2;
    const name = fitted(context, nameOf(row.about), room);
    context.fillStyle = row.end ? colors.muted : colors.text;
    context.fillText(name, PADDING, middle);
    context.fillStyle = colors.muted;
    const left = room - context.measureText(`${name} · `).width;
    if (tenant && left > MIN_TENANT_WIDTH) {
      context.fillText(` · ${fitted(context, tenant, left)}`, PADDING + context.measureText(name).width, middle);
    }
    context.textAlign = "right";
    const text = isNarrow ? `${row.generated}` : `${prompt} + ${row.generated}`;
    context.fillText(text, this.labelWidth - PADDING, middle);
    context.textAlign = "left";
  }

  drawLane(context, row, y, picture, colors) {
    context.globalAlpha = row.end ? ENDED_ALPHA : 1;
    const count = Math.min(this.numColumns, picture.column);
    for (let back = 0; back < count; back += 1) {
      const column = picture.column - 1 - back;
      const code = row.codes[column % COLUMNS];
      if (code === NONE) continue;
      const color = colors[meaning(code).color];
      const x = this.x(back);
      context.fillStyle = color;
      if (code >= WAITING) context.fillRect(x, y + ROW_HEIGHT / 2 - 1.5, CELL_WIDTH - 1, 3);
      else context.fillRect(x, y + 3, CELL_WIDTH - 1, ROW_HEIGHT - 6);
      if (column === row.cached) this.drawCached(context, row, x, y, column, colors);
    }
    context.globalAlpha = 1;
  }

  /** The share of the prompt that came from the prefix cache, in the cell of the admission. */
  drawCached(context, row, x, y, column, colors) {
    const computed = row.tokens[column % COLUMNS];
    const cached = row.about.cached_tokens;
    const height = ((ROW_HEIGHT - 6) * cached) / Math.max(1, cached + computed);
    context.fillStyle = colors.cached;
    context.fillRect(x, y + 3, CELL_WIDTH - 1, Math.max(3, height));
  }

  drawSelection(context, top, colors) {
    if (!this.selected) return;
    const place = this.rows.indexOf(this.selected.row);
    if (place < 0) return;
    context.strokeStyle = colors.accent;
    context.lineWidth = 1.5;
    context.strokeRect(this.x(this.selected.back) - 1.5, place * ROW_HEIGHT - top + 1.5, CELL_WIDTH + 2, ROW_HEIGHT - 3);
  }

  x(back) {
    return this.canvas.clientWidth - 4 - (back + 1) * CELL_WIDTH;
  }

  // --- selection ---------------------------------------------------------------------------------

  /** Select the cell at a point of the canvas; none where there is no request. */
  selectAt(x, y) {
    const row = this.rows[Math.floor((y + this.scroller.scrollTop) / ROW_HEIGHT)];
    const back = Math.floor((this.canvas.clientWidth - 4 - x) / CELL_WIDTH);
    const isCell = x >= this.labelWidth && back >= 0 && back < this.numColumns;
    this.selected = row ? { row, back: isCell ? back : 0 } : null;
  }

  /** Move the selection by rows and columns. */
  move(down, right) {
    const place = this.rows.indexOf(this.selected?.row) + down;
    const row = this.rows[Math.max(0, Math.min(this.rows.length - 1, place))];
    const back = Math.max(0, Math.min(this.numColumns - 1, (this.selected?.back ?? 0) - right));
    this.selected = row ? { row, back } : null;
    const top = this.rows.indexOf(row) * ROW_HEIGHT;
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop) this.scroller.scrollTop = top;
    if (top + ROW_HEIGHT > scrollTop + clientHeight) this.scroller.scrollTop = top + ROW_HEIGHT - clientHeight;
  }

  /** What the selected cell says: { row, step, means, tokens, x, y }; null without one. */
  about(picture) {
    const { row, back } = this.selected ?? {};
    const column = picture.column - 1 - back;
    const place = this.rows.indexOf(row);
    if (!row || place < 0) return null;
    const slot = ((column % COLUMNS) + COLUMNS) % COLUMNS;
    return {
      row,
      step: column >= 0 ? picture.steps[slot] : null,
      means: column >= 0 ? meaning(row.codes[slot]) : null,
      tokens: row.tokens[slot],
      x: this.x(back),
      y: (place + 1) * ROW_HEIGHT - this.scroller.scrollTop,
    };
  }
}
