// Small SVG charts. Each draws into a container, at the container's own width, and states its content
// in a label for screen readers.

import { figure, duration, percent } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 44;

function node(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function canvas(container, height, label) {
  const width = Math.max(240, container.clientWidth);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  container.replaceChildren(svg);
  return { svg, width };
}

function empty(container, height, text) {
  const { svg, width } = canvas(container, height, text);
  svg.append(node("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "empty" }, text));
}

/** The next round number above a value: 1, 2 or 5 times a power of ten. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value - 1e-9);
}

/** A value over time: `points` of [age in seconds, value or null], the oldest first. */
export function timeline(container, points, { span, height, unit, name, kind = "", isLast = false, gap = 1.5 }) {
  const known = points.filter(([age, value]) => value !== null && age <= span);
  if (!known.length) return empty(container, height, "no tokens in this time");
  const latest = known[known.length - 1][1];
  const { svg, width } = canvas(container, height, `${name}: latest ${figure(latest)} ${unit}`);
  const bottom = height - (isLast ? 18 : 6);
  const top = 8;
  const most = ceiling(Math.max(...known.map(([, value]) => value)));
  const x = (age) => LEFT + (1 - age / span) * (width - LEFT - 4);
  const y = (value) => bottom - (value / most) * (bottom - top);
  for (const value of [0, most]) {
    svg.append(node("line", { x1: LEFT, x2: width, y1: y(value), y2: y(value), class: "gridline" }));
    svg.append(node("text", { x: LEFT - 8, y: y(value) + 3, "text-anchor": "end" }, value.toLocaleString("en")));
  }
  const runs = [[]];
  known.forEach(([age, value], index) => {
    if (index && known[index - 1][0] - age > gap) runs.push([]);
    runs[runs.length - 1].push([x(age), y(value)]);
  });
  for (const run of runs) {
    const path = run.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
    if (!kind) {
      const closed = `${path}L${run[run.length - 1][0].toFixed(1)} ${bottom}L${run[0][0].toFixed(1)} ${bottom}Z`;
      svg.append(node("path", { d: closed, class: "area" }));
    }
    svg.append(run.length > 1
      ? node("path", { d: path, class: `line ${kind}` })
      : node("circle", { cx: run[0][0], cy: run[0][1], r: 2, class: `spot ${kind}` }));
  }
  svg.append(node("text", { x: LEFT + 6, y: top + 4, class: "strong" }, `${name} (${unit})`));
  if (isLast) ages(svg, width, height, span, x);
}

function ages(svg, width, height, span, x) {
  for (const age of [span, span / 2, 0]) {
    const anchor = age === 0 ? "end" : age === span ? "start" : "middle";
    const text = age === 0 ? "now" : `${age} s ago`;
    svg.append(node("text", { x: age === 0 ? width : x(age), y: height - 3, "text-anchor": anchor }, text));
  }
}

/** Which drafter the steps of every second used: columns split by share. */
export function shares(container, points, kinds, { span, height }) {
  const { svg, width } = canvas(container, height, `Drafters over time: ${kinds.map((k) => k.name).join(", ")}`);
  const bottom = height - 18;
  const x = (age) => LEFT + (1 - age / span) * (width - LEFT - 4);
  const column = Math.max(1, (width - LEFT - 4) / span);
  svg.append(node("rect", { x: LEFT, y: 0, width: width - LEFT, height: bottom, rx: 2, class: "track" }));
  for (const [age, methods] of points) {
    if (age > span) continue;
    const total = Object.values(methods).reduce((sum, count) => sum + count, 0);
    let at = bottom;
    for (const { name, style } of kinds) {
      const part = (bottom * (methods[name] ?? 0)) / total;
      if (!part) continue;
      at -= part;
      svg.append(node("rect", { x: Math.max(LEFT, x(age)), y: at, width: column + 0.3, height: part, class: style }));
    }
  }
  ages(svg, width, height, span, x);
}

/** The share accepted through every position, as columns. */
export function positions(container, rows) {
  if (!rows.length) return empty(container, 190, "no draft so far");
  const shown = rows.slice(0, 16);
  const height = 190;
  const rates = shown.map((row) => row.num_accepted / Math.max(1, row.num_drafted));
  const label = shown.map((row, i) => `position ${row.position}: ${percent(rates[i])}`).join(", ");
  const { svg, width } = canvas(container, height, `Acceptance by position. ${label}`);
  const bottom = height - 34;
  const top = 16;
  const step = width / shown.length;
  const bar = Math.min(56, step * 0.62);
  shown.forEach((row, index) => {
    const middle = step * (index + 0.5);
    const size = rates[index] * (bottom - top);
    const group = node("g");
    group.append(node("title", {}, `${row.num_accepted} of ${row.num_drafted} steps`));
    group.append(node("rect", { x: middle - bar / 2, y: top, width: bar, height: bottom - top, rx: 3, class: "track" }));
    group.append(node("rect", { x: middle - bar / 2, y: bottom - size, width: bar, height: Math.max(1, size), rx: 3, class: "bar" }));
    group.append(node("text", { x: middle, y: bottom - size - 5, "text-anchor": "middle", class: "strong" }, percent(rates[index])));
    group.append(node("text", { x: middle, y: bottom + 14, "text-anchor": "middle" }, String(row.position)));
    svg.append(group);
  });
  svg.append(node("text", { x: width / 2, y: height - 3, "text-anchor": "middle" }, "draft position"));
}

/** Time per token with and without a draft, each split into the parts of a step. */
export function stepTimes(container, rows) {
  if (!rows.length) return empty(container, 120, "no decode step so far");
  const height = 16 + rows.length * 58;
  const label = rows.map((row) => `${row.name}: ${duration(row.total)} per token`).join(", ");
  const { svg, width } = canvas(container, height, `Time per token. ${label}`);
  const most = Math.max(...rows.map((row) => row.total));
  rows.forEach((row, index) => {
    const y = 14 + index * 58;
    svg.append(node("text", { x: 0, y, class: "strong" }, row.name));
    svg.append(node("text", { x: width, y, "text-anchor": "end", class: "strong" }, `${duration(row.total)} per token`));
    svg.append(node("rect", { x: 0, y: y + 8, width, height: 20, rx: 4, class: "track" }));
    let at = 0;
    for (const [kind, seconds] of row.parts) {
      const size = (seconds / most) * width;
      const part = node("rect", { x: at, y: y + 8, width: Math.max(0, size), height: 20, class: `part-${kind}` });
      part.append(node("title", {}, `${kind}: ${duration(seconds)} per token`));
      svg.append(part);
      at += size;
    }
  });
}
