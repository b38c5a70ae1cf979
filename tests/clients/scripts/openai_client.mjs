// OpenAI's client for JavaScript. Arguments: the server's address, its key. Run in the folder that holds the package.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(path.join(process.cwd(), "x.js"));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")).href);
const [url, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const model = "fake/tiny";
const messages = [{ role: "user", content: "say:hello 🙂" }];

const answer = await client.chat.completions.create({ model, messages });
assert.equal(answer.choices[0].message.content, "hello 🙂");
assert.ok(answer.usage.completion_tokens > 0);

let text = "", usage, pieces = 0;
const stream = await client.chat.completions.create({ model, messages, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  pieces += 1;
  usage = chunk.usage ?? usage;
}
assert.equal(text, "hello 🙂");
assert.ok(usage.completion_tokens > 0 && pieces > 3);

const helped = client.chat.completions.stream({ model, messages });
assert.equal(await helped.finalContent(), "hello 🙂");

const completion = await client.completions.create({ model, prompt: ["say:a", "say:b"] });
assert.deepEqual(completion.choices.map((choice) => choice.text), ["a", "b"]);

const response = await client.responses.create({ model, input: "say:stored" });
assert.equal(response.output_text, "stored");
const next = await client.responses.create({ model, input: "say:next", previous_response_id: response.id });
assert.equal(next.output_text, "next");
let events = [];
for await (const event of await client.responses.create({ model, input: "say:typed", stream: true })) events.push(event);
assert.equal(events[0].type, "response.created");
assert.equal(events.at(-1).type, "response.completed");
assert.equal(events.filter((e) => e.type === "response.output_text.delta").map((e) => e.delta).join(""), "typed");

const models = await client.models.list();
assert.equal(models.data[0].id, model);
await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }),
  (e) => e instanceof OpenAI.BadRequestError && e.param === "temperature");
await assert.rejects(client.chat.completions.create({ model: "gpt-4", messages }), OpenAI.NotFoundError);
await assert.rejects(new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 }).models.list(), OpenAI.AuthenticationError);

const abort = new AbortController();
const endless = await client.chat.completions.create({ model, messages: [{ role: "user", content: "x" }], stream: true,
  max_tokens: 3000 }, { signal: abort.signal });
for await (const _ of endless) { abort.abort(); break; }
console.log("ok");
