// The page: its views, the server's state, live charts from /metrics, the resolved configuration.

import { ApiError, call, setKey } from "./api.js";
import { Chart } from "./chart.js";
import { startChat } from "./chat.js";
import { delta, quantile, rate, Reading } from "./metrics.js";

const $ = (id) => document.getElementById(id);
const KINDS = ["prefill", "decode", "verify"];
let info = null;
let before = null;

// ------------------------------------------------------------------------------------------------------------ views
for (const tab of document.querySelectorAll("[role=tab]")) {
  tab.addEventListener("click", () => {
    for (const other of document.querySelectorAll("[role=tab]")) other.setAttribute("aria-selected", String(other === tab));
    for (const view of document.querySelectorAll("main")) view.hidden = view.id !== tab.dataset.view;
    charts.forEach(([chart]) => chart.draw());
    if (tab.dataset.view === "config") loadInfo();
  });
}
$("key").addEventListener("change", () => {
  setKey($("key").value);
  loadInfo();
});

function state(up, text) {
  $("state").className = `state ${up ? "up" : "down"}`;
  $("state").textContent = text;
}

async function loadInfo() {
  try {
    info = await (await call("server_info")).json();
    $("model").textContent = info.served_model_names[0];
    $("settings").replaceChildren(...sections(info));
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) $("key").hidden = false;
    state(false, error.message);
  }
}

// ---------------------------------------------------------------------------------------------------- configuration
function sections(value) {
  const plain = {}, lists = [], objects = [];
  for (const [name, inner] of Object.entries(value)) {
    if (inner !== null && typeof inner === "object" && Object.keys(inner).length && !scalars(inner)) {
      if (Array.isArray(inner)) lists.push(card(name, rows(inner), "wide"));
      else objects.push(card(name, fields(inner)));
    } else plain[name] = inner;
  }
  return [...lists, card("server", fields(plain)), ...objects];
}

function card(name, table, kind = "") {
  const one = document.createElement("section");
  one.className = `card ${kind}`;
  const title = document.createElement("h2");
  title.textContent = name;
  one.append(title, table);
  return one;
}

function scalars(list) {
  return Array.isArray(list) && list.every((item) => item === null || typeof item !== "object");
}

function cell(kind, value) {
  const one = document.createElement(kind);
  one.textContent = value === null || value === undefined ? "-" : typeof value === "object" ? scalars(value)
    ? value.join(", ") : JSON.stringify(value) : String(value);
  return one;
}

function line(cells) {
  const row = document.createElement("tr");
  row.append(...cells);
  return row;
}

function fields(value) {
  const table = document.createElement("table");
  table.append(...Object.entries(value).map(([name, inner]) => line([cell("th", name), cell("td", inner)])));
  return table;
}

function rows(list) {
  const table = document.createElement("table");
  const names = [...new Set(list.flatMap((item) => Object.keys(item)))].filter((name) => name !== "changed");
  table.append(line(names.map((name) => cell("th", name))));
  for (const item of list) {
    const row = line(names.map((name) => cell("td", item[name])));
    if (item.changed) row.className = "changed"; // a feature that was fitted to the machine
    table.append(row);
  }
  return table;
}

// ------------------------------------------------------------------------------------------------------------- live
const milliseconds = (value) => (value === null ? null : value * 1000);
const charts = [
  [new Chart($("charts"), "Tokens a second", ["generated", "prompt"]), (now, old) => [
    rate(now, old, "stretto_generated_tokens_total"), rate(now, old, "stretto_prompt_tokens_total")]],
  [new Chart($("charts"), "Tokens a step, by kind", KINDS, { kind: "area" }), (now, old) => {
    const steps = delta(now, old, "stretto_steps_total");
    return KINDS.map((kind) => (steps ? delta(now, old, "stretto_step_tokens_total", "kind", kind) / steps : 0));
  }],
  [new Chart($("charts"), "Requests", ["running", "waiting"]), (now) => [now.get("stretto_running"), now.get("stretto_waiting")]],
  [new Chart($("charts"), "KV cache in use", ["share"], { unit: " %", top: 100 }), (now) => [100 * now.get("stretto_kv_usage")]],
  [new Chart($("charts"), "Time to first token", ["p50", "p95"], { unit: " ms" }), (now, old) => [0.5, 0.95].map((share) =>
    milliseconds(quantile(now, old, "stretto_time_to_first_token_seconds", share)))],
  [new Chart($("charts"), "Between tokens", ["p50", "p95"], { unit: " ms" }), (now, old) => [0.5, 0.95].map((share) =>
    milliseconds(quantile(now, old, "stretto_inter_token_latency_seconds", share)))],
  [new Chart($("charts"), "Drafts", ["accepted"], { unit: " %", top: 100 }), (now, old) => {
    const drafted = delta(now, old, "stretto_drafted_total");
    return [drafted ? 100 * delta(now, old, "stretto_accepted_total") / drafted : null];
  }],
  [new Chart($("charts"), "Accepted by place in the draft", [], { kind: "bars", unit: " %", top: 100 }), (now) =>
    now.all("stretto_drafted_per_position_total").map(({ labels, value }) =>
      100 * now.get("stretto_accepted_per_position_total", "position", labels.position) / (value || 1))],
];

async function poll() {
  try {
    const now = new Reading(await (await call("metrics")).text(), performance.now() / 1000);
    if (before) for (const [chart, values] of charts) chart.add(values(now, before));
    before = now;
    await call("readyz"); // says what is the matter where it is not ready
    if (!info && ($("key").hidden || $("key").value)) await loadInfo();
    if (info) state(true, `ready, ${now.get("stretto_running")} running, ${now.get("stretto_waiting")} waiting`);
    if (info && !$("live").hidden) await listSessions();
  } catch (error) {
    before = null;
    info = null; // another engine may run otherwise
    state(false, error.message);
  } finally {
    setTimeout(poll, document.hidden ? 5000 : 1000);
  }
}

async function listSessions() {
  const answer = await call("v1/sessions").catch(() => null); // a server without them
  const list = answer ? (await answer.json()).data || [] : [];
  const shown = list.map((one) => ({
    session: one.id, state: one.state, "tokens of its history": one.tokens, "in the cache": one.cached_tokens, turns: one.turns,
    waiting: one.waiting, "last turn": one.last_turn, "idle for": `${one.idle_seconds.toFixed(0)} s`,
  }));
  if (shown.length) $("sessions").replaceChildren(...rows(shown).children);
  else $("sessions").replaceChildren(line([cell("td", "none is open")]));
}

startChat(() => info?.served_model_names[0]);
await loadInfo();
poll();
