// The same prompt with and without speculation, one after the other so that neither slows the other.

import { completion, getJson } from "./api.js";
import { byId, duration, figure, setText } from "./format.js";

const SIDES = [["auto", "with speculation"], ["off", "without"]];
let running = null;

export function preparePlayground() {
  byId("playground").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) runBoth();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("playground").requestSubmit();
  });
}

async function runBoth() {
  running = new AbortController();
  byId("run").disabled = true;
  byId("stop").hidden = false;
  agree("", "");
  for (const [side] of SIDES) {
    byId(`text-${side}`).replaceChildren();
    setText(`figures-${side}`, "waits");
  }
  try {
    const model = (await getJson("v1/models")).data[0].id;
    const answers = [];
    for (const [side] of SIDES) answers.push(await runSide(side, model));
    compare(...answers);
  } catch (error) {
    agree(error.name === "AbortError" ? "Stopped." : `Not answered: ${error.message}`, error.name === "AbortError" ? "" : "differ");
  } finally {
    running = null;
    byId("run").disabled = false;
    byId("stop").hidden = true;
  }
}

async function runSide(side, model) {
  const body = {
    model,
    prompt: byId("prompt").value,
    max_tokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    seed: byId("seed").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true },
    speculation: side,
  };
  const output = byId(`text-${side}`);
  const started = performance.now();
  let first = null;
  let usage = null;
  let text = "";
  setText(`figures-${side}`, "running");
  for await (const event of completion(body, running.signal)) {
    if (event.error) throw new Error(event.error.message);
    const piece = event.choices?.[0]?.text ?? "";
    if (piece && first === null) first = performance.now();
    text += piece;
    output.append(piece);
    usage = event.usage ?? usage;
  }
  const ended = performance.now();
  const answer = { side, text, seconds: (ended - started) / 1000, usage };
  setText(`figures-${side}`, words(answer, first === null ? null : (first - started) / 1000));
  return answer;
}

function words(answer, ttft) {
  const tokens = answer.usage?.completion_tokens ?? null;
  const speculative = answer.usage?.speculative_decoding;
  return [
    tokens === null ? "" : `${tokens} tokens in ${duration(answer.seconds)}`,
    tokens && answer.seconds > 0 ? `${figure(tokens / answer.seconds)} tokens/s` : "",
    ttft === null ? "" : `first after ${duration(ttft)}`,
    speculative?.acceptance_length && answer.side !== "off" ? `${figure(speculative.acceptance_length)} tokens per step` : "",
  ].filter(Boolean).join(" · ");
}

function compare(one, other) {
  if (one.text === other.text) {
    agree(`The texts agree in all ${one.text.length} characters. With speculation: ${figure(other.seconds / one.seconds)} × the plain rate.`, "same");
    return;
  }
  let at = 0;
  while (at < one.text.length && one.text[at] === other.text[at]) at += 1;
  agree(`The texts differ from character ${at + 1} on.`, "differ");
}

function agree(text, kind) {
  byId("agreement").className = `agreement ${kind}`;
  setText("agreement", text);
}
