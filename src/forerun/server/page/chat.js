// A chat whose tokens are coloured by origin as they come, also beside plain decoding of the same seed.

import { getJson, post, stream } from "./api.js";
import { byId, duration, element, figure } from "./format.js";

const NAMES = { auto: "With speculation", off: "Plain" };
const messages = [];
let setup = null;
let running = null;
let plainFirst = true;

export function prepareChat() {
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send(byId("message").value);
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    messages.length = 0;
    byId("turns").replaceChildren();
    byId("message").focus();
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("chat-form").requestSubmit();
    }
  });
  byId("mode").addEventListener("change", showMode);
}

/** Fit the form to the server: its context, and whether it has a chat template. */
export function setUpChat(found) {
  if (setup) return;
  setup = found;
  const size = byId("max-tokens");
  if (found.max_context) {
    size.max = found.max_context - 1;
    size.value = Math.min(256, found.max_context - 1);
  }
  if (found.has_chat === false) {
    byId("mode").value = "text";
    byId("mode").disabled = true;
    byId("chat-note").textContent = "This model has no chat template: it continues the text that you give. Each token is coloured by where it came from.";
  }
  byId("compare").parentElement.hidden = found.engine !== "forerun";
  showMode();
}

function showMode() {
  const isText = byId("mode").value === "text";
  byId("message-label").textContent = isText ? "Text to continue" : "Message";
  byId("system").disabled = isText;
}

async function send(text) {
  running = new AbortController();
  byId("send").disabled = byId("clear").disabled = true;
  byId("stop").hidden = false;
  const isText = byId("mode").value === "text";
  const sides = byId("compare").checked ? (plainFirst ? ["off", "auto"] : ["auto", "off"]) : ["auto"];
  if (sides.length > 1) plainFirst = !plainFirst;
  const turn = element("article", "turn");
  const panes = sides.map((side, order) => pane(side, sides.length > 1 ? order : null));
  const note = element("p", "agreement");
  note.setAttribute("role", "status");
  // The pane with speculation stays on the left, whichever runs first.
  const places = [...panes].sort((one, other) => (one.side < other.side ? -1 : 1));
  const row = element("div", sides.length > 1 ? "sides" : "");
  row.append(...places.map((one) => one.node));
  turn.append(element("pre", "asked", text), row, note);
  byId("turns").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  try {
    const [path, body] = await request(text, isText);
    for (const one of panes) await fill(one, path, body, isText);
    if (panes.length > 1) compare(note, ...places);
    remember(text, places[0].text, isText);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    const unfinished = panes.filter((one) => !one.isOver);
    for (const one of unfinished) one.figures.textContent = one.isBegun ? (isStopped ? "stopped" : "ended by an error") : "not run";
    note.textContent = isStopped ? "Stopped." : `Not answered: ${error.message}`;
    note.classList.toggle("differ", !isStopped);
    if (isStopped) remember(text, places[0].text, isText);
  } finally {
    running = null;
    byId("send").disabled = byId("clear").disabled = false;
    byId("stop").hidden = true;
  }
}

/** Continue the conversation with a message and its answer, and empty the form for the next one. */
function remember(text, answer, isText) {
  if (!isText) messages.push({ role: "user", content: text }, { role: "assistant", content: answer });
  byId("message").value = "";
}

function pane(side, order) {
  const node = element("div", "side");
  if (order !== null) node.append(element("h3", "", `${NAMES[side]}, ran ${order ? "second" : "first"}`));
  const output = element("pre", "answer");
  output.tabIndex = 0;
  output.setAttribute("aria-label", `Answer, ${NAMES[side].toLowerCase()}`);
  const figures = element("p", "note", "waits");
  node.append(output, figures);
  return { side, node, output, figures, text: "", isBegun: false, isOver: false };
}

/** Return the path and body of a request, with the room that the context leaves for its output. */
async function request(text, isText) {
  const system = byId("system").value;
  const model = (await getJson("v1/models")).data[0].id;
  const conversation = [...(system ? [{ role: "system", content: system }] : []), ...messages, { role: "user", content: text }];
  const prompt = isText ? { prompt: text } : { messages: conversation };
  const { count, max_model_len: most } = await (await post("tokenize", { model, ...prompt }, running.signal)).json();
  const seed = byId("seed").valueAsNumber;
  const body = {
    model,
    ...prompt,
    max_tokens: Math.max(1, Math.min(byId("max-tokens").valueAsNumber, most - count)),
    temperature: byId("temperature").valueAsNumber,
    top_p: byId("top-p").valueAsNumber,
    seed: Number.isFinite(seed) ? seed : Math.floor(Math.random() * 2 ** 31),
    stream: true,
    stream_options: { include_usage: true },
  };
  return [isText ? "v1/completions" : "v1/chat/completions", body];
}

async function fill(one, path, body, isText) {
  const own = setup?.engine === "forerun" ? { speculation: one.side, return_token_sources: true } : {};
  const colours = new Colours(one.output);
  const started = performance.now();
  let first = null;
  let usage = null;
  one.isBegun = true;
  one.figures.textContent = "running";
  for await (const event of stream(path, { ...body, ...own }, running.signal)) {
    const choice = event.choices?.[0];
    const piece = (isText ? choice?.text : choice?.delta?.content) ?? "";
    if (piece && first === null) first = performance.now();
    one.text += piece;
    colours.add(piece, choice?.token_texts ?? [], choice?.token_sources ?? []);
    usage = event.usage ?? usage;
  }
  const seconds = (performance.now() - started) / 1000;
  one.isOver = true;
  one.figures.textContent = words(seconds, usage, first === null ? null : (first - started) / 1000);
}

/** Appends text to an element in pieces of one origin each. */
class Colours {
  constructor(output) {
    this.output = output;
    this.tokens = []; // [text, origin] of tokens whose text has not come yet
    this.decoder = new TextDecoder();
  }

  add(text, tokens, sources) {
    // One output is one step: a single token that closes it without a rejection had no draft.
    const isPlain = sources.length === 1 && sources[0] === "bonus";
    tokens.forEach((token, index) => {
      const part = token.startsWith("bytes:") ? this.partial(token) : token;
      if (part) this.tokens.push([part, isPlain ? "plain" : sources[index]]);
    });
    while (text) {
      const [part, origin] = this.tokens.shift() ?? [text, "plain"];
      const size = text.startsWith(part) ? part.length : text.length;
      this.append(text.slice(0, size), origin);
      if (part.startsWith(text) && part.length > size) this.tokens.unshift([part.slice(size), origin]);
      text = text.slice(size);
    }
  }

  /** Return the characters that end with a token which is a part of one. */
  partial(token) {
    const bytes = [...token.matchAll(/\\x([0-9a-f]{2})/g)].map((found) => parseInt(found[1], 16));
    return this.decoder.decode(new Uint8Array(bytes), { stream: true });
  }

  append(text, origin) {
    const last = this.output.lastElementChild;
    if (last?.dataset.origin === origin) {
      last.append(text);
    } else {
      const made = element("span", `origin ${origin}`, text);
      made.dataset.origin = origin;
      this.output.append(made);
    }
  }
}

function words(seconds, usage, ttft) {
  const tokens = usage?.completion_tokens ?? null;
  const tau = usage?.speculative_decoding?.num_steps ? usage.speculative_decoding.acceptance_length : null;
  return [
    tokens === null ? "" : `${tokens} tokens in ${duration(seconds)}`,
    tokens && seconds > 0 ? `${figure(tokens / seconds)} tokens/s` : "",
    ttft === null ? "" : `first after ${duration(ttft)}`,
    tau ? `${figure(tau)} tokens per step with a draft` : "",
  ].filter(Boolean).join(" · ");
}

function compare(note, { text: one }, { text: other }) {
  if (one === other) {
    note.textContent = `The texts agree in all ${one.length} characters. One pair of runs says little of speed: the speedup is on Live.`;
    return;
  }
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  note.textContent = `The texts differ from character ${at + 1} on.`;
  note.classList.add("differ");
}
