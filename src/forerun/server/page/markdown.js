// Markdown as elements, made from ranges of the source. Nothing is parsed as HTML: all text is set as
// text nodes, and the only attribute that comes from a text is the address of an http or https link.

import { element } from "./format.js";

const MAX_DEPTH = 8;
const FENCE = /^(\s*)(`{3,}|~{3,})[ \t]*([^`\s]{0,40})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(?=\S)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^([ \t]*)(?:[-*+]|(\d{1,9})[.)])[ \t]+(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
// What an inline mark encloses is at most so long that a text of nothing but marks takes no long time.
const INLINE = new RegExp([
  /\\(?<escaped>[!-/:-@[-`{-~])/,
  /(?<ticks>`+)(?:(?<code>[^]{1,500}?)(?<!`)\k<ticks>(?!`))?/,
  /\[(?<label>[^[\]\n]{1,1000})\]\((?<target>https?:\/\/[^\s()<>]{1,2000})\)/,
  /(?<!\w)(?<address>https?:\/\/[\p{L}\p{N}.:@_-]{0,300}[\p{L}\p{N}](?:[/?#](?:[^\s<>"'`*]{0,2000}[^\s<>"'`*.,;:!?)\]])?)?)/,
  /\*\*(?=\S)(?<bold>[^]{1,500}?)(?<!\s)\*\*/,
  /(?<![\p{L}\p{N}_])__(?=\S)(?<strong>[^]{1,500}?)(?<!\s)__(?![\p{L}\p{N}_])/,
  /\*(?![\s*])(?<slanted>[^]{1,500}?)(?<![\s*])\*(?!\*)/,
  /(?<![\p{L}\p{N}_])_(?![\s_])(?<em>[^]{1,500}?)(?<![\s_])_(?![\p{L}\p{N}_])/,
].map((each) => each.source).join("|"), "giu");

/**
 * Return a function that makes nodes for a range of the text of `pieces`, which are [text, origin].
 * With colours every range of one origin is a span of its own.
 */
export function painter(pieces, isColoured) {
  const text = pieces.map(([part]) => part).join("");
  let index = 0;
  let from = 0;
  return (start, end) => {
    if (!isColoured) return [document.createTextNode(text.slice(start, end))];
    if (start < from) index = from = 0;
    const made = [];
    while (index < pieces.length && start < end) {
      const [part, origin] = pieces[index];
      const until = Math.min(end, from + part.length);
      if (until > start) {
        const span = element("span", `origin ${origin}`, text.slice(start, until));
        span.dataset.origin = origin;
        made.push(span);
        start = until;
      }
      if (start >= end) break;
      from += part.length;
      index += 1;
    }
    return made;
  };
}

/** Return elements for a text; `paint` makes the nodes of a range of it. */
export function markdown(text, paint) {
  const lines = [];
  for (let at = 0; at <= text.length; ) {
    const found = text.indexOf("\n", at);
    const end = found < 0 ? text.length : found;
    lines.push({ start: at, end, text: text.slice(at, end) });
    at = end + 1;
  }
  const root = document.createDocumentFragment();
  const source = { text, lines, paint };
  for (let at = 0; at < lines.length; ) at = block(source, at, root);
  return root;
}

const isBlank = (line) => !line.text.trim();
const isTable = (lines, at) => lines[at].text.includes("|") && at + 1 < lines.length && lines[at + 1].text.includes("|") && DELIMITERS.test(lines[at + 1].text);
const begins = (lines, at) => [FENCE, HEADING, RULE, ITEM, QUOTE].some((kind) => kind.test(lines[at].text)) || isTable(lines, at);

/** Append the block that begins at a line, and return the line after it. */
function block(source, at, into) {
  const { lines } = source;
  const line = lines[at];
  if (isBlank(line)) return at + 1;
  if (FENCE.test(line.text)) return fenced(source, at, into);
  const heading = HEADING.exec(line.text);
  if (heading) {
    const made = element(`h${Math.min(6, heading[1].length + 2)}`);
    inline(source, line.start + heading[0].length, line.end - line.text.match(/(?:[ \t]+#*)?[ \t]*$/)[0].length, made);
    into.append(made);
    return at + 1;
  }
  if (RULE.test(line.text)) {
    into.append(element("hr"));
    return at + 1;
  }
  if (ITEM.test(line.text)) return list(source, at, into);
  if (QUOTE.test(line.text)) return quote(source, at, into);
  if (isTable(lines, at)) return table(source, at, into);
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !begins(lines, end)) end += 1;
  const made = element("p");
  inline(source, line.start, lines[end - 1].end, made);
  into.append(made);
  return end;
}

function fenced({ lines, paint }, at, into) {
  const [, indent, fence, language] = FENCE.exec(lines[at].text);
  const code = element("code");
  if (language) code.dataset.language = language;
  let end = at + 1;
  const closes = (line) => line.text.trim().startsWith(fence) && /^[`~]+$/.test(line.text.trim());
  while (end < lines.length && !closes(lines[end])) {
    const { start, end: until, text } = lines[end];
    const skipped = Math.min(indent.length, text.length - text.trimStart().length);
    code.append(...paint(start + skipped, until), end + 1 < lines.length ? "\n" : "");
    end += 1;
  }
  const box = element("pre", "code");
  box.append(code);
  into.append(box);
  return end + 1;
}

/** Append consecutive items, nested by their indents; indented lines belong to the item before. */
function list(source, at, into) {
  const { lines } = source;
  const open = []; // [indent, list] from the outermost on
  let item = null;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at].text);
    const indent = lines[at].text.length - lines[at].text.trimStart().length;
    if (isBlank(lines[at])) {
      const next = lines.slice(at, at + 3).find((line) => !isBlank(line));
      if (!next || !(ITEM.test(next.text) || /^\s{2,}/.test(next.text))) break;
      at += 1;
    } else if (found && !RULE.test(lines[at].text)) {
      while (open.length > 1 && open[open.length - 1][0] > indent) open.pop();
      const name = found[2] === undefined ? "ul" : "ol";
      const isInner = !open.length || indent > open[open.length - 1][0] + 1;
      if (isInner && open.length < MAX_DEPTH) {
        const made = element(name);
        if (found[2] !== undefined) made.start = Number(found[2]);
        (item ?? into).append(made);
        open.push([indent, made]);
      } else if (open[open.length - 1][1].localName !== name) {
        const made = element(name);
        open[open.length - 1][1].after(made);
        open[open.length - 1] = [indent, made];
      }
      item = element("li");
      open[open.length - 1][1].append(item);
      inline(source, lines[at].start + found[0].length, lines[at].end, item);
      at += 1;
    } else if (indent >= 2 && FENCE.test(lines[at].text)) {
      at = fenced(source, at, item);
    } else if (indent >= 2 || !begins(lines, at)) {
      item.append("\n");
      inline(source, lines[at].start + indent, lines[at].end, item);
      at += 1;
    } else {
      break;
    }
  }
  return at;
}

function quote(source, at, into) {
  const { lines } = source;
  const made = element("blockquote");
  while (at < lines.length && QUOTE.test(lines[at].text)) {
    if (made.childNodes.length) made.append("\n");
    inline(source, lines[at].start + QUOTE.exec(lines[at].text)[0].length, lines[at].end, made);
    at += 1;
  }
  into.append(made);
  return at;
}

function table(source, at, into) {
  const { lines } = source;
  const made = element("table");
  for (let row = at; row < lines.length && lines[row].text.includes("|"); at = row += 1) {
    if (made.childNodes.length === 1 && DELIMITERS.test(lines[row].text)) continue;
    const line = element("tr");
    for (const [start, end] of cells(lines[row])) {
      const cell = element(made.childNodes.length ? "td" : "th");
      inline(source, start, end, cell);
      line.append(cell);
    }
    made.append(line);
  }
  into.append(made);
  return at;
}

/** Return the ranges of a row's cells, without the spaces around them. */
function cells({ start, text }) {
  const found = [];
  let from = 0;
  for (const part of text.split("|")) {
    const before = part.length - part.trimStart().length;
    found.push([start + from + before, start + from + Math.max(before, part.trimEnd().length)]);
    from += part.length + 1;
  }
  if (text.trimStart().startsWith("|")) found.shift();
  if (text.trimEnd().endsWith("|")) found.pop();
  return found;
}

const ELEMENTS = { code: "code", bold: "strong", strong: "strong", slanted: "em", em: "em", label: "a", address: "a" };

/** Append a range with its code, emphasis and links as elements. */
function inline(source, start, end, into, depth = 0) {
  const { text, paint } = source;
  let from = start;
  for (const found of text.slice(start, end).matchAll(INLINE)) {
    const { ticks, target, ...kinds } = found.groups;
    const [kind, part] = Object.entries(kinds).find(([, each]) => each !== undefined) ?? [];
    if (!kind || (depth >= MAX_DEPTH && !["escaped", "code"].includes(kind))) continue;
    const at = start + found.index;
    const inner = at + ({ address: 0, code: ticks?.length, bold: 2, strong: 2 }[kind] ?? 1);
    const node = kind === "escaped" ? null : element(ELEMENTS[kind]);
    if (node?.localName === "a") {
      Object.assign(node, { href: target ?? part, rel: "noopener noreferrer nofollow", target: "_blank" });
      if (!["http:", "https:"].includes(node.protocol)) continue;
    }
    if (at > from) into.append(...paint(from, at));
    from = node ? at + found[0].length : inner; // what follows a backslash is text
    if (!node) continue;
    if (["code", "address"].includes(kind)) node.append(...paint(inner, inner + part.length));
    else inline(source, inner, inner + part.length, node, kind === "label" ? MAX_DEPTH : depth + 1);
    into.append(node);
  }
  if (end > from) into.append(...paint(from, end));
}
