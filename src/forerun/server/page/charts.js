// Small SVG charts. Each draws into a container, at the container's own width, and states its content
// in a label for screen readers. Charts over time show the values under the pointer.

import { figure, duration, percent } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 44;
const pointers = new WeakMap();

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

/** Round values from 0 to above the largest: steps are 1, 2 or 5 times a power of ten. */
function ticks(largest, most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(largest / most, 1e-9)));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size * most >= largest - 1e-9);
  return [...Array(Math.max(1, Math.ceil(largest / step - 1e-9)) + 1).keys()].map((index) => index * step);
}

/** Show what `describe` says of the point nearest to the pointer, now and while the pointer moves. */
function underPointer(container, svg, width, ages, span, bottom, describe) {
  const x = (age) => LEFT + (1 - age / span) * (width - LEFT - 4);
  const mark = node("g", { class: "pointer" });
  svg.append(mark);
  const draw = () => {
    mark.replaceChildren();
    const at = pointers.get(container);
    if (at === undefined || !ages.length) return;
    const near = ages.reduce((best, age, index) => (Math.abs(x(age) - at) < Math.abs(x(ages[best]) - at) ? index : best), 0);
    const place = x(ages[near]);
    if (Math.abs(place - at) > 24) return;
    const isRight = place > width / 2;
    const text = node("text", { x: place + (isRight ? -6 : 6), y: 11, "text-anchor": isRight ? "end" : "start", class: "strong" },
      `${describe(near)}, ${Math.round(ages[near])} s ago`);
    mark.append(node("line", { x1: place, x2: place, y1: 0, y2: bottom }), text);
    const box = text.getBBox();
    text.before(node("rect", { x: box.x - 3, y: box.y - 1, width: box.width + 6, height: box.height + 2, rx: 3 }));
  };
  container.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    pointers.set(container, (event.clientX - box.left) * (width / box.width));
    draw();
  };
  container.onpointerleave = () => {
    pointers.delete(container);
    draw();
  };
  draw();
}

/** A value over time: `points` of [age in seconds, value or null], the oldest first. */
export function timeline(container, points, { span, height, unit, name, kind = "", gap = 1.5 }) {
  const known = points.filter(([age, value]) => value !== null && age <= span);
  if (!known.length) return empty(container, height, "no tokens in this time");
  const latest = known[known.length - 1][1];
  const { svg, width } = canvas(container, height, `${name}: latest ${figure(latest)} ${unit}`);
  const bottom = height - 6;
  const top = 20;
  const values = ticks(Math.max(...known.map(([, value]) => value), 1e-9), height > 100 ? 4 : 2);
  const most = values[values.length - 1];
  const x = (age) => LEFT + (1 - age / span) * (width - LEFT - 4);
  const y = (value) => bottom - (value / most) * (bottom - top);
  for (const value of values) {
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
  svg.append(node("text", { x: LEFT, y: 11, class: "strong" }, `${name} (${unit})`));
  underPointer(container, svg, width, known.map(([age]) => age), span, bottom, (index) => `${figure(known[index][1])} ${unit}`);
}

/** Which drafter the steps of every second used: columns split by share, above the axis of time. */
export function shares(container, points, kinds, { span, height }) {
  const { svg, width } = canvas(container, height, `Drafters over time: ${kinds.map((k) => k.name).join(", ")}`);
  const bottom = height - 18;
  const x = (age) => LEFT + (1 - age / span) * (width - LEFT - 4);
  const column = Math.max(1, (width - LEFT - 4) / span);
  svg.append(node("rect", { x: LEFT, y: 0, width: width - LEFT, height: bottom, rx: 2, class: "track" }));
  const known = points.filter(([age]) => age <= span);
  const total = (methods) => Object.values(methods).reduce((sum, steps) => sum + steps, 0);
  for (const [age, methods] of known) {
    let at = bottom;
    for (const { name, style } of kinds) {
      const part = (bottom * (methods[name] ?? 0)) / total(methods);
      if (!part) continue;
      at -= part;
      svg.append(node("rect", { x: Math.max(LEFT, x(age)), y: at, width: Math.min(column + 0.3, width - x(age)), height: part, class: style }));
    }
  }
  for (const share of [1, 3 / 4, 1 / 2, 1 / 4, 0]) {
    const anchor = share === 0 ? "end" : share === 1 ? "start" : "middle";
    const text = share === 0 ? "now" : `${span * share} s`;
    svg.append(node("text", { x: share === 0 ? width : x(span * share), y: height - 3, "text-anchor": anchor }, text));
  }
  underPointer(container, svg, width, known.map(([age]) => age), span, bottom, (index) => {
    const methods = known[index][1];
    return Object.entries(methods).map(([name, steps]) => `${name} ${percent(steps / total(methods))}`).join(", ");
  });
}

/** The speedup's interval on a scale around 1, where halving and doubling have the same length. */
export function interval(container, speedup) {
  const label = speedup ? `Speedup ${figure(speedup.estimate)}, between ${figure(speedup.low)} and ${figure(speedup.high)}` : "Speedup not measured";
  const { svg, width } = canvas(container, 40, label);
  const reach = speedup ? Math.min(8, Math.max(2, speedup.high * 1.1, 1.1 / Math.max(speedup.low, 0.01))) : 2;
  const x = (value) => width / 2 + ((width - 24) / 2) * (Math.log(Math.min(reach, Math.max(1 / reach, value))) / Math.log(reach));
  svg.append(node("line", { x1: 8, x2: width - 8, y1: 14, y2: 14, class: "gridline" }));
  if (speedup) {
    svg.append(node("rect", { x: x(speedup.low), y: 10, width: Math.max(2, x(speedup.high) - x(speedup.low)), height: 8, rx: 4, class: "range" }));
    svg.append(node("circle", { cx: x(speedup.estimate), cy: 14, r: 5, class: "range-value" }));
  }
  svg.append(node("line", { x1: width / 2, x2: width / 2, y1: 4, y2: 24, class: "one" }));
  for (const value of [1 / reach, 1, reach]) svg.append(node("text", { x: x(value), y: 37, "text-anchor": "middle" }, value === 1 ? "1 (plain)" : figure(value, 2)));
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

/** Times per token, each split into the parts of a step. */
export function tokenTimes(container, rows) {
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
    for (const [kind, name, seconds] of row.parts) {
      const size = (seconds / most) * width;
      const part = node("rect", { x: at, y: y + 8, width: Math.max(0, size), height: 20, class: `part-${kind}` });
      part.append(node("title", {}, `${name}: ${duration(seconds)} per token`));
      svg.append(part);
      at += size;
    }
  });
}
