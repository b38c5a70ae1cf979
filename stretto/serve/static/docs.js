// The reference of the API, made from the server's own OpenAPI document; nothing is loaded from elsewhere.

import { ApiError, call, setKey } from "./api.js";

const $ = (id) => document.getElementById(id);
let schemas = {};

function make(kind, text = "", className = "") {
  const one = document.createElement(kind);
  one.textContent = text;
  one.className = className;
  return one;
}

const nameOf = (schema) => schema.$ref.split("/").at(-1);
const resolved = (schema) => (schema.$ref ? schemas[nameOf(schema)] : schema);

// In words: "string | null", "list of Message", one of a few values.
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema);
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return [...new Set(choices.map(typeOf))].join(" | ");
  if (schema.type === "array") return schema.items ? `list of ${typeOf(schema.items)}` : "list";
  return Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type || "anything";
}

// Names of the models that a schema speaks of, itself included.
function mentioned(schema, found = new Set()) {
  if (Array.isArray(schema)) schema.forEach((one) => mentioned(one, found));
  else if (schema && typeof schema === "object") {
    if (typeof schema.$ref === "string" && !found.has(nameOf(schema))) {
      found.add(nameOf(schema));
      mentioned(resolved(schema), found);
    } else Object.entries(schema).forEach(([key, inner]) => key !== "$ref" && mentioned(inner, found));
  }
  return found;
}

function fields(schema) {
  const table = make("table");
  const required = new Set(schema.required || []);
  for (const [name, inner] of Object.entries(schema.properties || {})) {
    const row = make("tr");
    const label = make("th", name);
    if (required.has(name)) label.append(make("span", " required", "faint"));
    row.append(label, make("td", typeOf(inner)), make("td", inner.description || ""));
    table.append(row);
  }
  if (!table.childElementCount) table.append(make("tr", typeOf(schema)));
  return table;
}

function models(title, schema) {
  const part = make("div");
  for (const name of mentioned(schema)) part.append(make("h3", part.childElementCount ? name : `${title}: ${name}`), fields(schemas[name]));
  return part;
}

function route(path, method, operation) {
  const one = make("details", "", "card");
  const title = make("summary");
  title.append(make("b", method.toUpperCase()), ` ${path} `, make("span", operation.summary || "", "faint"));
  one.append(title);
  if (operation.description) one.append(make("p", operation.description));
  one.addEventListener("toggle", () => {
    if (!one.open || one.dataset.shown) return;
    one.dataset.shown = "yes";
    const body = operation.requestBody?.content?.["application/json"]?.schema;
    for (const parameter of operation.parameters || []) {
      one.append(make("p", `${parameter.in}: ${parameter.name} (${typeOf(parameter.schema || {})})`));
    }
    if (body) one.append(models("body", body));
    for (const [status, answer] of Object.entries(operation.responses || {})) {
      one.append(make("h3", `${status}: ${answer.description || ""}`));
      for (const [media, { schema }] of Object.entries(answer.content || {})) {
        if (schema && mentioned(schema).size) one.append(models(media, schema));
      }
    }
  });
  one.dataset.words = `${method} ${path} ${operation.summary || ""} ${
    [...mentioned(operation.requestBody || {})].flatMap((name) => Object.keys(schemas[name].properties || {})).join(" ")}`.toLowerCase();
  return one;
}

async function show() {
  try {
    const spec = await (await call("openapi.json")).json();
    schemas = spec.components?.schemas || {};
    $("version").textContent = spec.info.version;
    $("routes").replaceChildren(...Object.entries(spec.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => route(path, method, operation))));
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) $("key").hidden = false;
    $("routes").replaceChildren(make("p", error.message, "faint"));
  }
}

$("key").addEventListener("change", () => {
  setKey($("key").value);
  show();
});
$("search").addEventListener("input", () => {
  const words = $("search").value.toLowerCase().split(/\s+/);
  for (const one of $("routes").children) one.hidden = !words.every((word) => (one.dataset.words || "").includes(word));
});
await show();
