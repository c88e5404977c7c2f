// Two small line charts as SVG, in the look of the report: masked fraction and evaluations against steps.
import { curve, totalSteps } from "./frames.js";

const WIDTH = 420, HEIGHT = 170, LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 34;
const MOST_POINTS = 300; // more than there are pixels says nothing
const NAMESPACE = "http://www.w3.org/2000/svg"; // a name, not a request

/** 1, 2 or 5 times a power of ten, so that at most `most` steps cover the range. */
export function tickStep(range, most = 5) {
  const rough = range / most;
  const scale = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((m) => m * scale).find((step) => step >= rough * (1 - 1e-9));
}

/** Round numbers from 0 to `high`; what is counted here comes whole. */
export function ticks(high) {
  const step = Math.max(1, tickStep(high));
  return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, i) => Number((i * step).toPrecision(12)));
}

/** Every point, or evenly chosen ones with the last. */
export function thin(points, most = MOST_POINTS) {
  if (points.length <= most) return points;
  const stride = Math.ceil(points.length / most);
  return points.filter((_, i) => i % stride === 0 || i === points.length - 1);
}

function node(name, attributes = {}, text = "") {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}

/** `column`: 1 for the masked fraction, 2 for evaluations. `onStep(step)` when the chart is clicked. */
export function makePlot(root, { column, label, percent = false }, onStep) {
  const svg = node("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": label });
  root.append(svg);
  let high = 1, right = 1;
  const across = (x) => LEFT + (x / right) * (WIDTH - LEFT - RIGHT);
  const down = (y) => HEIGHT - BOTTOM - (y / high) * (HEIGHT - TOP - BOTTOM);

  /** Draw the tapes and a line at index k of each; `steps` is the axis while there are none. */
  function draw(tapes, k, steps) {
    const curves = tapes.map(curve);
    right = Math.max(...(tapes.length ? tapes.map(totalSteps) : [steps]));
    high = percent ? 1 : Math.max(tapes.length ? 1 : steps, ...curves.map((points) => points.at(-1)[column]));
    const parts = [];
    for (const value of percent ? [0, 0.5, 1] : ticks(high)) {
      const y = down(value);
      parts.push(node("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, class: "grid" }));
      const text = percent ? `${value * 100} %` : String(value);
      parts.push(node("text", { x: LEFT - 6, y, dy: "0.35em", "text-anchor": "end" }, text));
    }
    const bottom = HEIGHT - BOTTOM;
    for (const value of ticks(right)) {
      const x = across(value);
      parts.push(node("line", { x1: x, x2: x, y1: bottom, y2: bottom + 4, class: "axis" }));
      parts.push(node("text", { x, y: bottom + 16, "text-anchor": "middle" }, String(value)));
    }
    parts.push(node("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: bottom, y2: bottom, class: "axis" }));
    parts.push(node("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, "step"));
    curves.forEach((points, lane) => {
      const line = thin(points).map((p) => `${across(p[0]).toFixed(1)},${down(p[column]).toFixed(1)}`).join(" ");
      parts.push(node("polyline", { points: line, class: `line s${lane}` }));
      const now = points[Math.min(k, points.length - 1)];
      const x = across(now[0]);
      parts.push(node("line", { x1: x, x2: x, y1: TOP, y2: bottom, class: `cursor s${lane}` }));
      parts.push(node("circle", { cx: x, cy: down(now[column]), r: 4, class: `point f${lane}` }));
    });
    svg.replaceChildren(...parts);
  }

  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    onStep(Math.max(0, ((x - LEFT) / (WIDTH - LEFT - RIGHT)) * right));
  });

  return { draw };
}
