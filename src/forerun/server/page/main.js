// Reads /live once a second while the page is visible, and shows it in four tabs.

import { getJson, Refused, saveKey } from "./api.js";
import { interval, positions, shares, timeline, tokenTimes } from "./charts.js";
import { prepareChat, setUpChat } from "./chat.js";
import { age, byId, count, duration, element, figure, percent, setText } from "./format.js";
import { prepareQuestions } from "./questions.js";
import { showRequests } from "./requests.js";

const PERIOD_MS = 1000;
const TABS = ["live", "chat", "requests", "diagnosis"];
const STYLES = ["m0", "m1", "m2", "m3"];
const NAMES = { auto: "Auto", light: "Light", dark: "Dark" };
let latest = null;
let answeredAt = null;
let timer = null;
let failures = 0;

async function poll() {
  clearTimeout(timer);
  if (!document.hidden) {
    try {
      latest = await getJson("live");
      answeredAt = performance.now();
      failures = 0;
      byId("key-form").hidden = true;
      document.body.classList.remove("stale");
      show(latest);
    } catch (error) {
      failures += 1;
      const asksKey = error instanceof Refused && (error.status === 401 || error.status === 403);
      byId("key-form").hidden = !asksKey;
      document.body.classList.add("stale");
      const since = answeredAt === null ? "" : `: figures are ${age((performance.now() - answeredAt) / 1000)} old`;
      state("lost", asksKey ? "key needed" : `no answer from the server${since}`);
    }
  }
  clearTimeout(timer);
  timer = setTimeout(poll, Math.min(PERIOD_MS * 2 ** failures, 8000));
}

function state(kind, text) {
  byId("state").dataset.state = kind;
  setText("state-text", text);
}

function show(live) {
  const { setup, load, totals } = live;
  const drafts = setup.methods.length ? `drafted by ${setup.methods.join(", ")}` : "without a draft";
  setText("setup", `${setup.target}, ${drafts}`);
  state(load.num_running ? "busy" : "idle", load.num_running ? "decoding" : "idle");
  byId("tab-chat").hidden = setup.has_chat === null;
  setUpChat(setup);
  showSpeedup(live);
  showFigures(live);
  showCharts(live);
  showDiagnosis(live);
  showRequests(live.requests, live.shows_texts);
  setText("counts", `forerun ${setup.version}, up ${duration(live.uptime_s)}: ${count(totals.num_emitted)} tokens in ${count(totals.num_steps)} steps, ${count(totals.num_accepted)} of ${count(totals.num_drafted)} drafted tokens accepted.`);
}

/** What an interval shows: faster and slower only where it clears 1. */
function kindOf(speedup) {
  if (!speedup) return "none";
  return speedup.low > 1 ? "faster" : speedup.high < 1 ? "slower" : "open";
}

const VERDICTS = { faster: "Faster than plain decoding", slower: "Slower than plain decoding", open: "No difference from plain decoding is shown" };

function showSpeedup({ speedup, window_s: seconds }) {
  const kind = kindOf(speedup);
  byId("speedup-tile").dataset.kind = kind;
  setText("speedup", figure(speedup?.estimate));
  setText("speedup-unit", speedup ? "×" : "");
  if (!speedup) {
    setText("speedup-note", "Not measured: it takes some plain steps and some seconds of decoding.");
    setText("diagnosis-speedup", "");
    return;
  }
  const share = speedup.share_compared < 0.995 ? ` These steps yield ${percent(speedup.share_compared)} of the tokens; at other batch sizes no plain steps were measured.` : "";
  const words = `${VERDICTS[kind]}: 95 % between ${figure(speedup.low)} and ${figure(speedup.high)}.`;
  setText("speedup-note", `${words} Over the decode steps of the latest ${figure(seconds, 2)} s with activity, against the plain steps measured on this server. Reading prompts is not included.${share}`);
  setText("diagnosis-speedup", `Speedup, as on Live: ${figure(speedup.estimate)} ×. ${words}`);
}

function showFigures({ setup, load, latency, positions: drafted, ...live }) {
  setText("rate", live.totals.num_emitted ? figure(live.tokens_per_s) : "–");
  setText("tau", drafted.length ? figure(live.acceptance_length) : "–");
  setText("running", String(load.num_running));
  setText("running-unit", `of ${load.max_running} running`);
  setText("load-note", `KV ${percent(load.kv_share)} full`);
  byId("kv").setAttribute("aria-valuenow", Math.round(load.kv_share * 100));
  byId("kv").firstElementChild.style.width = `${load.kv_share * 100}%`;
  for (const name of ["ttft", "gap"]) {
    setText(`${name}-p50`, duration(latency[name]?.p50));
    setText(`${name}-p95`, duration(latency[name]?.p95));
  }
  setText("prefill", live.totals.num_emitted ? figure(latency.prompt_tokens_per_s) : "–");
  setText("prefix", percent(latency.prefix_hit_share));
  setText("waiting", load.max_waiting === null ? String(load.num_waiting) : `${load.num_waiting} of ${load.max_waiting}`);
  setText("refused", load.refused === null ? "–" : Object.entries(load.refused).map(([status, times]) => `${times} (${status})`).join(", ") || "0");
}

function showCharts(live) {
  if (byId("live").hidden) return;
  interval(byId("chart-speedup"), live.speedup);
  const span = live.history.some((point) => point.age_s > 60 && point.age_s <= 120) ? 120 : 60;
  const over = (key) => live.history.map((point) => [point.age_s, point[key]]);
  timeline(byId("chart-rate"), over("tokens_per_s"), { span, height: 150, unit: "per second", name: "Tokens" });
  timeline(byId("chart-k"), over("num_speculative_tokens"), { span, height: 84, unit: "mean over requests", name: "K", kind: "k" });
  const names = new Set([...live.setup.methods, ...live.history.flatMap((point) => Object.keys(point.methods))]);
  names.delete("plain");
  const kinds = [...names].map((name, index) => ({ name, style: STYLES[index % STYLES.length] }));
  kinds.push({ name: "plain", style: "m-plain" });
  shares(byId("chart-methods"), over("methods"), kinds, { span, height: 42 });
  const legend = byId("legend-methods");
  if (legend.dataset.names !== kinds.map((kind) => kind.name).join()) {
    legend.dataset.names = kinds.map((kind) => kind.name).join();
    legend.replaceChildren(...kinds.map((kind) => element("span", `key ${kind.style}`, kind.name === "plain" ? "plain step" : kind.name)));
  }
  positions(byId("chart-positions"), live.positions);
  showTimes(live);
}

function showTimes({ token_times: times, speedup }) {
  const rows = [];
  if (times) {
    const parts = [["draft", "drafting", times.draft_s], ["verify", "target pass", times.verify_s], ["other", "everything else", times.other_s]];
    rows.push({ name: "Now, plain steps included", parts, total: times.draft_s + times.verify_s + times.other_s });
  }
  if (times && speedup) rows.push({ name: "Plain decoding", parts: [["plain", "plain steps", speedup.plain_token_s]], total: speedup.plain_token_s });
  tokenTimes(byId("chart-step"), rows);
  setText("step-note", speedup
    ? "The time of a step, divided by the tokens that it yields for all requests. The ratio of the two bars is the speedup above."
    : "The time of a step, divided by the tokens that it yields for all requests. The time of plain decoding is not known yet.");
}

function showDiagnosis({ diagnosis, diagnosis_age_s: since, last_change: change, last_change_age_s: age }) {
  if (change) setText("last-change", `Change noticed ${count(Math.round(age / 60))} min ago: ${change}.`);
  if (!diagnosis) return;
  const when = since < 60 ? "" : `, ${count(Math.round(since / 60))} min ago`;
  setText("diagnosis-note", `What forerun diagnose concludes from the latest ${count(diagnosis.num_request_steps)} steps of requests${when}.`);
  const signature = JSON.stringify(diagnosis);
  const panel = byId("headline");
  if (panel.dataset.signature === signature) return;
  panel.dataset.signature = signature;
  const tag = byId("verdict-tag");
  tag.hidden = false;
  tag.className = `tag ${diagnosis.verdict === "healthy" || diagnosis.verdict === "problem" ? diagnosis.verdict : ""}`;
  tag.textContent = diagnosis.verdict === "inconclusive" ? "open" : diagnosis.verdict;
  panel.textContent = diagnosis.headline;
  const isProblem = diagnosis.verdict === "problem";
  const causes = isProblem ? diagnosis.causes : [];
  byId("causes-title").hidden = !causes.length;
  byId("causes").replaceChildren(...causes.map((cause) => {
    const item = element("li");
    item.append(element("strong", "", cause.label.replaceAll("_", " ")), ` (score ${figure(cause.score)}): ${cause.what}`);
    return item;
  }));
  const changes = isProblem ? diagnosis.changes : [];
  byId("changes-title").hidden = !changes.length;
  byId("changes").replaceChildren(...changes.map((change) => element("li", "", change)));
}

function prepareTabs() {
  const tabs = TABS.map((name) => byId(`tab-${name}`));
  const choose = (name) => {
    for (const each of TABS) {
      const isChosen = each === name;
      byId(each).hidden = !isChosen;
      byId(`tab-${each}`).setAttribute("aria-selected", String(isChosen));
      byId(`tab-${each}`).tabIndex = isChosen ? 0 : -1;
    }
    if (latest) showCharts(latest);
  };
  const fromAddress = () => choose(TABS.find((name) => location.hash === `#${name}`) ?? "live");
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => {
      history.replaceState(null, "", `#${TABS[index]}`);
      choose(TABS[index]);
    });
    tab.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const next = tabs[(index + move + tabs.length) % tabs.length];
      next.click();
      next.focus();
    });
  });
  addEventListener("hashchange", fromAddress);
  fromAddress();
}

function prepareTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let choice = localStorage.getItem("forerun-theme") ?? "auto";
  const apply = () => {
    document.documentElement.dataset.theme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
    byId("theme").textContent = NAMES[choice];
    byId("theme").setAttribute("aria-label", `Colours: ${choice === "auto" ? "as the system" : choice}`);
  };
  byId("theme").addEventListener("click", () => {
    choice = { auto: "light", light: "dark", dark: "auto" }[choice] ?? "auto";
    localStorage.setItem("forerun-theme", choice);
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

prepareTheme();
prepareTabs();
prepareChat();
prepareQuestions();
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(byId("key").value);
  byId("key").value = "";
  failures = 0;
  poll();
});
document.addEventListener("visibilitychange", () => !document.hidden && poll());
let width = 0;
new ResizeObserver(([entry]) => {
  if (latest && Math.abs(entry.contentRect.width - width) > 1) showCharts(latest);
  width = entry.contentRect.width;
}).observe(byId("content"));
poll();
