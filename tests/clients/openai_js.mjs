// OpenAI's JavaScript library: completions, chats, streams, structured output, a tool, errors.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.CLIENTS_MODEL;
const client = new OpenAI({ baseURL: process.env.CLIENTS_URL, apiKey: "none", maxRetries: 0 });
const City = z.object({ name: z.enum(["Paris", "Rome"]), is_capital: z.boolean() });
const prompt = "def add(a, b):";
const messages = [{ role: "user", content: prompt }];
const asked = { model, temperature: 0, max_tokens: 60 };

assert.equal((await client.models.list()).data[0].id, model);
const text = (await client.completions.create({ ...asked, prompt })).choices[0].text;
let streamed = "";
for await (const chunk of await client.completions.create({ ...asked, prompt, stream: true })) streamed += chunk.choices[0]?.text ?? "";
assert.equal(streamed, text);
const answer = (await client.chat.completions.create({ ...asked, messages })).choices[0].message.content;
const events = client.chat.completions.stream({ ...asked, messages });
assert.equal(await events.finalContent(), answer);
const parsed = await client.chat.completions.parse({ ...asked, messages, response_format: zodResponseFormat(City, "city") });
City.parse(parsed.choices[0].message.parsed);
const tools = [{ type: "function", function: { name: "look_up", parameters: z.toJSONSchema(City) } }];
const called = await client.chat.completions.create({ ...asked, messages, tools, tool_choice: "required" });
City.parse(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments));
const message = called.choices[0].message;
assert.equal(message.content, null);
const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "found" };
const second = await client.chat.completions.create({ ...asked, messages: [...messages, message, result], tools, tool_choice: "none" });
assert.ok(second.choices[0].message.content);
await assert.rejects(client.completions.create({ model: "other", prompt }), OpenAI.NotFoundError);
