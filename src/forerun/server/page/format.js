// Numbers as text, and elements from text. Text from a model or a user is only ever set as textContent.

/** A number with about three significant digits; a dash where there is none. */
export function figure(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const whole = Math.floor(Math.log10(Math.abs(value))) + 1;
  const decimals = Math.max(0, Math.min(3, digits - Math.max(whole, 1)));
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

/** Seconds with a unit that suits them. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${figure(seconds * 1e6)} µs`;
  if (seconds < 1) return `${figure(seconds * 1000)} ms`;
  if (seconds < 120) return `${figure(seconds)} s`;
  return seconds < 7200 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}

/** Whole seconds, minutes or hours. */
export const age = (seconds) => (seconds < 120 ? `${Math.floor(seconds)} s` : duration(seconds));

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
}

export const count = (number) => number.toLocaleString("en");

/** A new element with a class and a text. */
export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Set the text of an element or of an id only where it changes, for screen readers and selections. */
export function setText(target, text) {
  const node = typeof target === "string" ? byId(target) : target;
  if (node.textContent !== text) node.textContent = text;
}
