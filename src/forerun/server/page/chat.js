// A chat whose tokens are coloured by origin as they come, also beside plain decoding of the same seed.

import { getJson, post, stream } from "./api.js";
import { age, byId, duration, element, figure } from "./format.js";
import { clearChats, readChats, saveChat } from "./history.js";
import { markdown, painter } from "./markdown.js";

const NAMES = { auto: "With speculation", off: "Plain" };
const ORIGINS = new Set(["accepted", "recovered", "bonus", "plain"]);
const END_PX = 40;
let chat = newChat();
let shown = []; // {turn, node, answers} of every turn on the page, unanswered ones included
let setup = null;
let running = null;
let plainFirst = true;

function newChat() {
  return { id: `${Date.now()}-${Math.random()}`, at: Date.now(), turns: [] };
}

export function prepareChat() {
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send(byId("message").value);
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => open(newChat()));
  byId("forget").addEventListener("click", () => {
    clearChats();
    listChats();
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("chat-form").requestSubmit();
    }
  });
  byId("mode").addEventListener("change", showMode);
  for (const name of ["formatted", "coloured"]) byId(name).addEventListener("change", redraw);
  listChats();
}

/** Fit the form to the server: its context, and whether it has a chat template. */
export function setUpChat(found) {
  if (setup) return;
  setup = found;
  const size = byId("max-tokens");
  size.max = found.max_context - 1;
  size.value = Math.min(256, found.max_context - 1);
  if (!found.has_chat) {
    byId("mode").value = "text";
    byId("mode").disabled = true;
    byId("formatted").checked = false;
    byId("chat-note").hidden = false;
  }
  showMode();
  redraw();
}

function showMode() {
  const isText = byId("mode").value === "text";
  byId("message-label").textContent = isText ? "Text to continue" : "Message";
  byId("system").disabled = isText;
}

function redraw() {
  byId("legend-origins").hidden = !byId("coloured").checked;
  follow(() => shown.forEach(({ answers }) => answers.forEach((answer) => answer.draw())));
}

/** Change the conversation's elements, and stay at its end where the reader is there. */
function follow(change) {
  const box = byId("turns");
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < END_PX;
  change();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

/** Show a conversation in place of the present one. */
function open(found) {
  if (running) return;
  chat = found;
  shown = [];
  byId("turns").replaceChildren();
  for (const turn of chat.turns) {
    const made = append(turn.asked, turn.answers.map(({ side, order }) => new Answer(side, order)));
    made.turn = turn;
    turn.answers.forEach((kept, index) => made.answers[index].restore(kept));
    show(made, turn.note, turn.differs);
  }
  showLast();
  byId("turns").scrollTop = byId("turns").scrollHeight;
  byId("message").focus();
}

function listChats() {
  const chats = readChats();
  byId("past").hidden = !chats.length;
  byId("history").replaceChildren(...chats.map((each) => {
    const item = element("li");
    const title = element("button", "past-chat", String(each.turns[0].asked).slice(0, 120));
    title.type = "button";
    title.addEventListener("click", () => open(each));
    item.append(title, element("span", "note", `${each.turns.length} ${each.turns.length === 1 ? "turn" : "turns"}, ${age(Math.max(0, Date.now() - each.at) / 1000)} ago`));
    return item;
  }));
}

/** Append a turn to the page; answers with speculation stay on the left, whichever runs first. */
function append(asked, answers) {
  const node = element("article", "turn");
  const note = element("p", "agreement");
  note.setAttribute("role", "status");
  const places = [...answers].sort((one, other) => (one.side < other.side ? -1 : 1));
  const row = element("div", answers.length > 1 ? "sides" : "");
  row.append(...places.map((one) => one.node));
  node.append(element("pre", "asked", asked), row, note);
  const made = { turn: null, node, note, answers: places };
  shown.push(made);
  byId("turns").append(node);
  showLast();
  return made;
}

/** Offer to answer once more at the last turn alone. */
function showLast() {
  byId("turns").tabIndex = shown.length ? 0 : -1;
  shown.forEach(({ turn, node }, index) => {
    node.querySelector(".again")?.remove();
    if (!turn || running || index < shown.length - 1) return;
    const again = element("button", "quiet small again", "Regenerate");
    again.type = "button";
    again.title = "With a fixed seed or at temperature 0 the text is the same again";
    again.addEventListener("click", regenerate);
    node.querySelector(".actions").append(again);
  });
}

function regenerate() {
  if (running) return;
  const { turn, node } = shown.pop();
  node.remove();
  chat.turns.splice(chat.turns.indexOf(turn), 1);
  send(turn.asked, byId("message").value);
}

function show({ note }, text, differs = false) {
  note.textContent = text;
  note.classList.toggle("differ", Boolean(differs));
}

/** Ask for an answer; `draft` stays in the form if there is one. */
async function send(text, draft = "") {
  running = new AbortController();
  byId("send").disabled = byId("clear").disabled = true;
  byId("stop").hidden = false;
  const isText = byId("mode").value === "text";
  const sides = byId("compare").checked ? (plainFirst ? ["off", "auto"] : ["auto", "off"]) : ["auto"];
  if (sides.length > 1) plainFirst = !plainFirst;
  const answers = sides.map((side, order) => new Answer(side, sides.length > 1 ? order : null));
  const made = append(text, answers);
  byId("turns").scrollTop = byId("turns").scrollHeight;
  made.node.scrollIntoView({ block: "nearest" });
  try {
    const [path, body] = await request(text, isText);
    for (const one of answers) await fill(one, path, body, isText);
    if (answers.length > 1) compare(made);
    remember(made, text, isText, draft);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    const unfinished = answers.filter((one) => !one.isOver);
    for (const one of unfinished) one.figures.textContent = one.isBegun ? (isStopped ? "stopped" : "ended by an error") : "not run";
    show(made, isStopped ? "Stopped." : `Not answered: ${error.message}`, !isStopped);
    if (isStopped) remember(made, text, isText, draft);
    else byId("message").value ||= text;
  } finally {
    running = null;
    answers.forEach((one) => follow(() => one.draw()));
    byId("send").disabled = byId("clear").disabled = false;
    byId("stop").hidden = true;
    showLast();
  }
}

/** Continue the conversation with a message and its answer, and empty the form for the next one. */
function remember(made, asked, isText, draft) {
  const answers = made.answers.map((one) => one.kept());
  made.turn = { asked, isText, answers, note: made.note.textContent, differs: made.note.classList.contains("differ") };
  chat.turns.push(made.turn);
  chat.at = Date.now();
  saveChat(chat);
  listChats();
  byId("message").value = draft;
}

/** Return the path and body of a request, with the room that the context leaves for its output. */
async function request(text, isText) {
  const system = byId("system").value;
  const model = (await getJson("v1/models")).data[0].id;
  const before = chat.turns.filter((turn) => !turn.isText).flatMap(({ asked, answers }) => [
    { role: "user", content: asked },
    { role: "assistant", content: textOf(answers[0].pieces) },
  ]);
  const conversation = [...(system ? [{ role: "system", content: system }] : []), ...before, { role: "user", content: text }];
  const prompt = isText ? { prompt: text } : { messages: conversation };
  const { count, max_model_len: most } = await (await post("tokenize", { model, ...prompt }, running.signal)).json();
  const seed = byId("seed").valueAsNumber;
  const body = {
    model,
    ...prompt,
    max_tokens: Math.max(1, Math.min(byId("max-tokens").valueAsNumber, most - count)),
    temperature: numberIn("temperature"),
    top_p: numberIn("top-p"),
    seed: Number.isFinite(seed) ? seed : Math.floor(Math.random() * 2 ** 31),
    stream: true,
    stream_options: { include_usage: true },
  };
  return [isText ? "v1/completions" : "v1/chat/completions", body];
}

/** Return the number in a field; an empty one is left out of requests, so that the server's default applies. */
function numberIn(id) {
  const value = byId(id).valueAsNumber;
  return Number.isFinite(value) ? value : undefined;
}

async function fill(one, path, body, isText) {
  const own = { speculation: one.side, return_token_sources: true };
  const started = performance.now();
  let first = null;
  let usage = null;
  one.isBegun = true;
  one.figures.textContent = "running";
  for await (const event of stream(path, { ...body, ...own }, running.signal)) {
    const choice = event.choices?.[0];
    const piece = (isText ? choice?.text : choice?.delta?.content) ?? "";
    if (piece && first === null) first = performance.now();
    one.add(piece, choice?.token_texts ?? [], choice?.token_sources ?? []);
    usage = event.usage ?? usage;
  }
  const seconds = (performance.now() - started) / 1000;
  one.isOver = true;
  one.figures.textContent = words(seconds, usage, first === null ? null : (first - started) / 1000);
}

const textOf = (pieces) => pieces.map(([text]) => text).join("");

/** An answer on the page, as pieces of text with one origin each. */
class Answer {
  constructor(side, order) {
    Object.assign(this, { side, order, pieces: [], isBegun: false, isOver: false });
    this.tokens = []; // [text, origin] of tokens whose text has not come yet
    this.decoder = new TextDecoder();
    this.took = 0;
    this.node = element("div", "side");
    if (order !== null) this.node.append(element("h3", "", `${NAMES[side]}, ran ${order ? "second" : "first"}`));
    this.output = element("div", "answer");
    this.output.setAttribute("role", "group");
    this.output.setAttribute("aria-label", `Answer, ${NAMES[side].toLowerCase()}`);
    this.figures = element("p", "note", "waits");
    const copy = element("button", "quiet small", "Copy");
    copy.type = "button";
    copy.addEventListener("click", () => copyText(textOf(this.pieces), copy));
    const actions = element("div", "actions");
    actions.append(this.figures, copy);
    this.node.append(this.output, actions);
  }

  kept() {
    const { side, order, pieces, figures } = this;
    return { side, order, pieces, figures: figures.textContent };
  }

  restore({ pieces, figures }) {
    this.pieces = pieces;
    this.figures.textContent = figures;
    this.draw();
  }

  /** Add text with the texts and origins of its tokens, whose last characters may come later. */
  add(text, tokens, sources) {
    tokens.forEach((token, index) => {
      const part = token.startsWith("bytes:") ? this.partial(token) : token;
      if (part) this.tokens.push([part, sources[index]]);
    });
    while (text) {
      const [part, origin] = this.tokens.shift() ?? [text, "plain"];
      const size = text.startsWith(part) ? part.length : text.length;
      this.append(text.slice(0, size), ORIGINS.has(origin) ? origin : "plain");
      if (part.startsWith(text) && part.length > size) this.tokens.unshift([part.slice(size), origin]);
      text = text.slice(size);
    }
    this.timer ??= setTimeout(() => follow(() => this.draw()), Math.max(16, 4 * this.took));
  }

  /** Return the characters that end with a token which is a part of one. */
  partial(token) {
    const bytes = [...token.matchAll(/\\x([0-9a-f]{2})/g)].map((found) => parseInt(found[1], 16));
    return this.decoder.decode(new Uint8Array(bytes), { stream: true });
  }

  append(text, origin) {
    const last = this.pieces[this.pieces.length - 1];
    if (last?.[1] === origin) last[0] += text;
    else this.pieces.push([text, origin]);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = undefined;
    const started = performance.now();
    const text = textOf(this.pieces);
    const paint = painter(this.pieces, byId("coloured").checked);
    const isFormatted = byId("formatted").checked;
    this.output.classList.toggle("raw", !isFormatted);
    this.output.replaceChildren(...(isFormatted ? [markdown(text, paint)] : paint(0, text.length)));
    this.took = performance.now() - started;
  }
}

/** Copy a text; pages that are neither local nor encrypted have no clipboard of their own. */
async function copyText(text, button) {
  let isCopied = true;
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text).catch(() => (isCopied = false));
  } else {
    const area = element("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    isCopied = document.execCommand("copy");
    area.remove();
  }
  button.textContent = isCopied ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), 2000);
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

function compare(made) {
  const [one, other] = made.answers.map((answer) => textOf(answer.pieces));
  if (one === other) {
    show(made, `The texts agree in all ${one.length} characters. One pair of runs says little of speed: the speedup is on Live.`);
    return;
  }
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  show(made, `The texts differ from character ${at + 1} on.`, true);
}
