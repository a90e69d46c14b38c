// The latest requests, each with its text coloured by the origin of every token.

import { byId, duration, element, figure, percent } from "./format.js";

const ORIGINS = new Set(["prompt", "accepted", "recovered", "bonus", "plain"]);
const STATES = { reading: "reads its prompt", decoding: "running", stop: "finished", length: "finished at its limit", abort: "cancelled", deadline: "ended at its deadline" };
const shown = new Map();

/** Update the list in place: the newest request is open, and others as the reader left them. */
export function showRequests(requests, showsTexts) {
  const list = byId("requests");
  byId("no-requests").hidden = requests.length > 0;
  const ids = new Set(requests.map((request) => request.request_id));
  for (const [id, entry] of shown) {
    if (!ids.has(id)) {
      entry.node.remove();
      shown.delete(id);
    }
  }
  requests.forEach((request, index) => {
    let entry = shown.get(request.request_id);
    if (!entry) {
      entry = create();
      shown.set(request.request_id, entry);
    }
    if (!entry.chosen && entry.node.open !== (index === 0)) entry.node.open = index === 0;
    if (list.children[index] !== entry.node) list.insertBefore(entry.node, list.children[index] ?? null);
    fill(entry, request, showsTexts);
  });
}

function create() {
  const node = element("details", "request");
  const summary = element("summary");
  const text = element("pre");
  text.tabIndex = 0;
  node.append(summary, text);
  const entry = { node, summary, text, signature: "", words: "", chosen: false };
  summary.addEventListener("click", () => { entry.chosen = true; });
  return entry;
}

function fill(entry, request, showsTexts) {
  const facts = [
    STATES[request.state] ?? request.state,
    `${request.num_output_tokens} tokens after ${request.num_prompt_tokens}`,
    request.tokens_per_s === null ? "" : `${figure(request.tokens_per_s)} tokens/s`,
    request.acceptance_length === null ? "" : `${figure(request.acceptance_length)} tokens per step`,
    request.draft_acceptance_rate === null ? "" : `${percent(request.draft_acceptance_rate)} of ${request.num_drafted} drafted kept`,
    request.ttft_s === null ? "" : `first token after ${duration(request.ttft_s)}`,
  ].filter(Boolean);
  const words = facts.join("|");
  if (entry.words !== words) {
    entry.words = words;
    entry.summary.replaceChildren(element("b", "", request.request_id), ...facts.map((fact) => element("span", "", fact)));
  }
  const signature = `${request.pieces.length}:${request.num_output_tokens}`;
  if (entry.signature === signature && entry.text.hasChildNodes()) return;
  entry.signature = signature;
  if (!showsTexts) {
    entry.text.textContent = "This server does not show texts.";
    return;
  }
  const atEnd = entry.text.scrollTop + entry.text.clientHeight >= entry.text.scrollHeight - 4;
  entry.text.replaceChildren(...request.pieces.map((piece) => {
    const origin = ORIGINS.has(piece.origin) ? piece.origin : "plain";
    return element("span", `origin ${origin}`, piece.text);
  }));
  if (atEnd) entry.text.scrollTop = entry.text.scrollHeight;
}
