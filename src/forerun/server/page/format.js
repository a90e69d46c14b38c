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
  return `${Math.floor(seconds / 60)} min`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
}

/** A new element with a class and a text. */
export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Set a text only where it changes, so that screen readers and selections are left alone. */
export function setText(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}
