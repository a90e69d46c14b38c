// The latest requests as a table; a row opens to its text, coloured by the origin of every token.

import { age, byId, duration, element, figure, percent, setText } from "./format.js";

const ORIGINS = new Set(["prompt", "accepted", "recovered", "bonus", "plain"]);
const STATES = { reading: "reading", decoding: "running", stop: "finished", length: "at its limit", abort: "cancelled", deadline: "at its deadline" };
const WIDE = [3, 5, 6, 7, 8];
const NUM_COLUMNS = 9;
const shown = new Map();

/** Update the table in place, the newest request first; open rows stay open. */
export function showRequests(requests, showsTexts) {
  const rows = byId("request-rows");
  byId("no-requests").hidden = requests.length > 0;
  byId("request-table").hidden = requests.length === 0;
  const ids = new Set(requests.map((request) => request.request_id));
  for (const [id, entry] of shown) {
    if (!ids.has(id)) {
      entry.row.remove();
      entry.detail.remove();
      shown.delete(id);
    }
  }
  requests.forEach((request, index) => {
    const entry = shown.get(request.request_id) ?? create(request.request_id);
    if (rows.children[2 * index] !== entry.row) {
      rows.insertBefore(entry.row, rows.children[2 * index] ?? null);
      entry.row.after(entry.detail);
    }
    fill(entry, request, showsTexts);
  });
}

function create(id) {
  const row = element("tr", "request");
  const cells = [...Array(NUM_COLUMNS).keys()].map((index) => element("td", [index > 1 ? "number" : "", WIDE.includes(index) ? "wide-only" : ""].join(" ").trim()));
  const open = element("button", "head");
  open.type = "button";
  open.setAttribute("aria-expanded", "false");
  cells[0].append(open);
  row.append(...cells);
  const detail = element("tr", "detail");
  detail.hidden = true;
  const cell = element("td");
  cell.colSpan = NUM_COLUMNS;
  const text = element("pre");
  text.tabIndex = 0;
  cell.append(element("p", "note", id), text);
  detail.append(cell);
  const entry = { row, cells, open, detail, text, signature: "", request: null };
  open.addEventListener("click", () => {
    detail.hidden = !detail.hidden;
    open.setAttribute("aria-expanded", String(!detail.hidden));
    if (!detail.hidden) showText(entry);
  });
  shown.set(id, entry);
  return entry;
}

function fill(entry, request, showsTexts) {
  entry.request = request;
  entry.showsTexts = showsTexts;
  const head = request.head.replace(/\s+/g, " ").trim() || request.request_id;
  const facts = [
    STATES[request.state] ?? request.state,
    age(request.age_s),
    String(request.num_prompt_tokens),
    String(request.num_output_tokens),
    figure(request.tokens_per_s),
    figure(request.acceptance_length),
    request.num_drafted ? `${percent(request.draft_acceptance_rate)} of ${request.num_drafted}` : "–",
    duration(request.ttft_s),
  ];
  setText(entry.open, head);
  facts.forEach((fact, index) => setText(entry.cells[index + 1], fact));
  if (!entry.detail.hidden) showText(entry);
}

function showText(entry) {
  const { text, request } = entry;
  const signature = `${request.pieces.length}:${request.num_output_tokens}`;
  if (entry.signature === signature) return;
  entry.signature = signature;
  if (!entry.showsTexts) {
    text.textContent = "This server does not show texts.";
    return;
  }
  const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
  text.replaceChildren(...request.pieces.map((piece) => {
    const origin = ORIGINS.has(piece.origin) ? piece.origin : "plain";
    return element("span", `origin ${origin}`, piece.text);
  }));
  if (atEnd) text.scrollTop = text.scrollHeight;
}
