// A small chart of the last two minutes: up to two lines, drawn by hand.

import { drawing, element } from "./dom.js";
import { text as say } from "./language.js";

const WIDTH = 280;
const HEIGHT = 72;
const CLASSES = ["one", "two"];
const STEPS = [1, 2, 2.5, 5, 10];

export class Chart {
  /** `lines`: names of their texts; `format`: a value in words; `top`: of the scale, if it is fixed. */
  constructor(title, lines, format, { size, top = null }) {
    this.title = title;
    this.lines = lines;
    this.format = format;
    this.size = size;
    this.top = top;
    this.values = lines.map(() => []);
    this.now = lines.map((_, index) => element("span", { className: CLASSES[index] }));
    this.paths = lines.map((_, index) => drawing("path", { class: CLASSES[index] }));
    this.heading = element("span");
    this.scale = element("span");
    this.ago = element("span");
    const gridLines = [0, 0.5, 1].map((share) =>
      drawing("line", { class: "grid-line", x1: 0, x2: WIDTH, y1: share * HEIGHT, y2: share * HEIGHT }),
    );
    const attributes = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    this.svg = drawing("svg", attributes, ...gridLines, ...this.paths);
    const caption = element("figcaption", {}, this.heading, element("span", { className: "now" }, ...this.now));
    const foot = element("div", { className: "scale" }, this.ago, this.scale);
    this.element = element("figure", { className: "chart" }, caption, this.svg, foot);
    this.draw();
  }

  /** A value for each line; null where there is none. */
  add(values) {
    values.forEach((value, index) => {
      const line = this.values[index];
      line.push(value);
      if (line.length > this.size) line.shift();
    });
    this.draw();
  }

  clear() {
    for (const line of this.values) line.length = 0;
    this.draw();
  }

  draw() {
    const title = say(this.title);
    const top = this.top ?? niceTop(Math.max(0, ...this.values.flat().filter((value) => value !== null)));
    this.heading.textContent = title;
    this.ago.textContent = say("ago");
    this.scale.textContent = top ? `0 – ${this.format(top)}` : "";
    const told = this.lines.map((name, index) => {
      const value = this.values[index].findLast((each) => each !== null);
      const words = `${say(name)} ${value === undefined ? "–" : this.format(value)}`;
      this.now[index].textContent = words;
      this.paths[index].setAttribute("d", this.path(this.values[index], top || 1));
      return words;
    });
    this.svg.setAttribute("aria-label", say("chartLabel", { title, values: told.join(", ") }));
  }

  /** The newest value at the right; a gap where there is none, a dash for one by itself. */
  path(values, top) {
    const step = WIDTH / (this.size - 1);
    let previous = null;
    let path = "";
    values.forEach((value, index) => {
      if (value !== null) {
        const x = (WIDTH - (values.length - 1 - index) * step).toFixed(1);
        const y = (HEIGHT * (1 - Math.min(value / top, 1))).toFixed(1);
        path += previous === null ? `M${x} ${y}h0.1` : `L${x} ${y}`;
      }
      previous = value;
    });
    return path;
  }
}

/** A round number that is at least `value`. */
function niceTop(value) {
  if (value <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return STEPS.find((step) => step * power >= value) * power;
}
