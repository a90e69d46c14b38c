// Reads /live once a second while the page is visible, and shows it.

import { getJson, Refused, saveKey } from "./api.js";
import { positions, shares, stepTimes, timeline } from "./charts.js";
import { byId, duration, element, figure, percent, setText } from "./format.js";
import { preparePlayground } from "./playground.js";
import { showRequests } from "./requests.js";

const PERIOD_MS = 1000;
const STYLES = ["m0", "m1", "m2", "m3"];
const NAMES = { auto: "Auto", light: "Light", dark: "Dark" };
let latest = null;
let timer = null;
let failures = 0;

async function poll() {
  clearTimeout(timer);
  if (!document.hidden) {
    try {
      latest = await getJson("live");
      failures = 0;
      byId("key-form").hidden = true;
      show(latest);
    } catch (error) {
      failures += 1;
      const asksKey = error instanceof Refused && (error.status === 401 || error.status === 403);
      byId("key-form").hidden = !asksKey;
      state("lost", asksKey ? "key needed" : "no answer from the server");
    }
  }
  clearTimeout(timer);
  timer = setTimeout(poll, Math.min(PERIOD_MS * 2 ** failures, 15000));
}

function state(kind, text) {
  byId("state").dataset.state = kind;
  setText("state-text", text);
}

function show(live) {
  const { setup, load } = live;
  const drafts = setup.methods.length ? `drafted by ${setup.methods.join(", ")}` : "without a draft";
  setText("setup", `${setup.target}, ${drafts}`);
  state(load.num_running ? "busy" : "idle", load.num_running ? "decoding" : "idle");
  for (const id of ["playground-panel", "requests-panel"]) byId(id).hidden = setup.engine !== "forerun";
  showFigures(live);
  showCharts(live);
  showDiagnosis(live.diagnosis);
  showRequests(live.requests, live.shows_texts);
  const { totals } = live;
  setText("counts", `${setup.engine} ${setup.version}, up ${duration(live.uptime_s)}: ${totals.num_emitted.toLocaleString("en")} tokens in ${totals.num_steps.toLocaleString("en")} steps, ${totals.num_accepted.toLocaleString("en")} of ${totals.num_drafted.toLocaleString("en")} drafted tokens accepted.`);
}

function showFigures(live) {
  const { speedup, load } = live;
  setText("speedup", speedup ? figure(speedup.value) : "–");
  setText("speedup-note", speedup
    ? `against plain decoding, measured here with ${live.num_plain_steps.toLocaleString("en")} plain steps; 95 % between ${figure(speedup.low)} and ${figure(speedup.high)}`
    : "against plain decoding; not measured before some steps were plain");
  setText("rate", figure(live.tokens_per_s));
  setText("tau", live.positions.length ? figure(live.acceptance_length) : "–");
  setText("running", String(load.num_running));
  const limit = load.max_running === null ? "" : ` of ${load.max_running}`;
  const kv = load.kv_share === null ? "" : `; KV ${percent(load.kv_share)} full`;
  setText("load-note", `sequences${limit} at once, ${load.num_waiting} waiting${kv}`);
  const meter = byId("kv");
  meter.hidden = load.kv_share === null;
  if (load.kv_share !== null) {
    meter.setAttribute("aria-valuenow", Math.round(load.kv_share * 100));
    meter.firstElementChild.style.width = `${load.kv_share * 100}%`;
  }
}

function showCharts(live) {
  const span = live.history.some((point) => point.age_s > 60 && point.age_s <= 120) ? 120 : 60;
  const over = (key) => live.history.map((point) => [point.age_s, point[key]]);
  timeline(byId("chart-rate"), over("tokens_per_s"), { span, height: 130, unit: "per second", name: "Tokens" });
  timeline(byId("chart-k"), over("num_speculative_tokens"), { span, height: 70, unit: "mean over requests", name: "K", kind: "k" });
  const names = new Set([...live.setup.methods, ...live.history.flatMap((point) => Object.keys(point.methods))]);
  names.delete("plain");
  const kinds = [...names].map((name, index) => ({ name, style: STYLES[index % STYLES.length] }));
  kinds.push({ name: "plain", style: "m-plain" });
  shares(byId("chart-methods"), over("methods"), kinds, { span, height: 38 });
  const legend = byId("legend-methods");
  if (legend.dataset.names !== kinds.map((kind) => kind.name).join()) {
    legend.dataset.names = kinds.map((kind) => kind.name).join();
    legend.replaceChildren(...kinds.map((kind) => element("span", `key ${kind.style}`, kind.name === "plain" ? "plain step" : kind.name)));
  }
  positions(byId("chart-positions"), live.positions);
  showStep(live);
}

function showStep({ plain_step: plain, drafting_step: drafting }) {
  const rows = [["Plain", plain], ["With a draft", drafting]].filter(([, times]) => times).map(([name, times]) => ({
    name,
    parts: [["draft", times.draft_s], ["verify", times.verify_s], ["other", times.other_s]].map(([kind, s]) => [kind, s / times.num_emitted]),
    total: (times.draft_s + times.verify_s + times.other_s) / times.num_emitted,
  }));
  stepTimes(byId("chart-step"), rows);
  setText("step-note", drafting
    ? `One step with a draft: ${duration(drafting.draft_s)} drafting, ${duration(drafting.verify_s)} target pass, ${duration(drafting.other_s)} else, for ${figure(drafting.num_emitted)} tokens of ${figure(drafting.num_sequences, 2)} requests.`
    : "");
}

function showDiagnosis(diagnosis) {
  if (!diagnosis) return;
  const signature = JSON.stringify(diagnosis);
  const panel = byId("headline");
  if (panel.dataset.signature === signature) return;
  panel.dataset.signature = signature;
  const tag = byId("verdict-tag");
  tag.hidden = false;
  tag.className = `tag ${diagnosis.verdict === "healthy" || diagnosis.verdict === "problem" ? diagnosis.verdict : ""}`;
  tag.textContent = diagnosis.verdict === "insufficient evidence" ? "open" : diagnosis.verdict;
  panel.textContent = diagnosis.headline;
  setText("diagnosis-note", `What forerun diagnose concludes from the latest ${diagnosis.num_steps.toLocaleString("en")} steps.`);
  const causes = diagnosis.verdict === "problem" ? diagnosis.causes : [];
  byId("causes").replaceChildren(...causes.map((cause) => {
    const item = element("li");
    item.append(element("strong", "", cause.label.replaceAll("_", " ")), ` (score ${figure(cause.score)}): ${cause.what}`);
    return item;
  }));
  byId("changes").replaceChildren(...(causes.length ? diagnosis.changes : []).map((change) => element("li", "", change)));
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
preparePlayground();
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
