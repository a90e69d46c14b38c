// Vercel's AI SDK: text, a stream, an object by a schema, a tool call.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({ name: "forerun", baseURL: process.env.CLIENTS_URL, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true });
const model = provider(process.env.CLIENTS_MODEL);
const City = z.object({ name: z.enum(["Paris", "Rome"]), is_capital: z.boolean() });
const asked = { model, prompt: "def add(a, b):", temperature: 0, maxOutputTokens: 60, maxRetries: 0 };

const whole = await generateText(asked);
assert.equal(whole.usage.outputTokens, 60);
const stream = streamText(asked);
let text = "";
for await (const part of stream.textStream) text += part;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, 60);
const { output } = await generateText({ ...asked, output: Output.object({ schema: City }) });
City.parse(output);
const called = await generateText({ ...asked, tools: { look_up: tool({ inputSchema: City }) }, toolChoice: "required" });
City.parse(called.toolCalls[0].input);
const lookUp = tool({ inputSchema: City, execute: async () => "found" });
const twice = await generateText({
  ...asked,
  tools: { look_up: lookUp },
  stopWhen: isStepCount(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
});
assert.equal(twice.steps.length, 2);
assert.equal(twice.steps[0].toolResults[0].output, "found");
assert.ok(twice.text);
