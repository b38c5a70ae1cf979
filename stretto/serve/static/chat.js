// The conversation: asks, shows the answer as it comes, says how fast it was and what drafts did.

import { AnswerText } from "./answer.js";
import { call, events } from "./api.js";
import { TokenPainter } from "./tokens.js";

const $ = (id) => document.getElementById(id);
let history = [];
let running = null; // the AbortController of the answer under way

export function startChat(modelName) {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(modelName());
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("ask").requestSubmit();
    }
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    history = [];
    $("messages").replaceChildren();
  });
}

function show(role) {
  const message = document.createElement("article");
  message.className = `message ${role}`;
  const body = document.createElement("div");
  body.className = "body";
  const about = document.createElement("div");
  about.className = "about";
  message.append(body, about);
  $("messages").append(message);
  return { message, body, about };
}

async function ask(model) {
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  const asked = { role: "user", content: text };
  const conversation = history;
  show("user").body.textContent = text;
  const shown = show("assistant");
  window.scrollTo(0, document.body.offsetHeight);
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  try {
    const answer = await stream(model, [...conversation, asked], shown, running.signal);
    if (history === conversation) history = [...conversation, asked, answer];
  } catch (error) {
    const stopped = error.name === "AbortError";
    shown.message.classList.toggle("failed", !stopped);
    shown.about.textContent = stopped ? "stopped" : error.message;
    const said = shown.body.textContent;
    if (said && history === conversation) history = [...conversation, asked, { role: "assistant", content: said }];
  } finally {
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

function request(model, messages) {
  const body = { model, messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if ($("tokens").checked) body.logprobs = true;
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("limit").value !== "") body.max_completion_tokens = Number($("limit").value);
  return JSON.stringify(body);
}

async function stream(model, messages, shown, signal) {
  const started = performance.now();
  const answer = await call("v1/chat/completions", { method: "POST", body: request(model, messages), signal });
  const painter = new TokenPainter();
  const text = new AnswerText(shown.body);
  let first = 0, usage = null, reason = "", content = "";
  for await (const chunk of events(answer)) {
    const delta = chunk.choices[0]?.delta;
    if (!first && (delta?.content || delta?.reasoning_content)) first = performance.now();
    usage = chunk.usage || usage;
    reason = chunk.choices[0]?.finish_reason || reason;
    content += delta?.content || "";
    const { thought, said } = painter.paint(chunk);
    for (const piece of thought) text.think(piece);
    for (const piece of said) text.say(piece);
    if (usage?.speculation?.drafted_tokens) $("legend").hidden = false;
    shown.about.textContent = summary(usage, first - started, performance.now() - started, reason);
    follow();
  }
  text.end();
  follow();
  return { role: "assistant", content };
}

// Stays at the end, unless the reader has gone up.
function follow() {
  if (window.innerHeight + window.scrollY > document.body.offsetHeight - 120) window.scrollTo(0, document.body.offsetHeight);
}

function perSecond(tokens, all) {
  return all > 0 ? (1000 * tokens / all).toFixed(0) : "-";
}

function summary(usage, first, all, reason) {
  if (!usage) return "";
  const drafts = usage.speculation;
  const parts = [`${usage.prompt_tokens} prompt tokens (${usage.prompt_tokens_details.cached_tokens} cached)`,
    `${usage.completion_tokens} tokens in ${(all / 1000).toFixed(2)} s (${perSecond(usage.completion_tokens, all)} a second)`, `first after ${Math.max(0, first / 1000).toFixed(2)} s`];
  if (drafts?.drafted_tokens) {
    parts.push(`${drafts.accepted_tokens} of ${drafts.drafted_tokens} drafts accepted, ${
      drafts.drafted_tokens - drafts.accepted_tokens} rejected`);
  }
  return parts.concat(reason || []).join(" · ");
}
