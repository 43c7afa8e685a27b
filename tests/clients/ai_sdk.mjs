// AI SDK: generateText, streamText, Output.object and tools, with the providers openai (responses by default),
// openai-compatible (chat) and anthropic (messages).
import { strict as assert } from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ASK, BASE_URL, KEY, MODEL, QUESTIONS, TOO_LONG, Trip, main, step, throws } from "./steps.mjs";

const address = { baseURL: BASE_URL, apiKey: KEY };
const openai = createOpenAI(address);
const compatible = createOpenAICompatible({ name: "gpt-faster", supportsStructuredOutputs: true, ...address });
const apis = { responses: openai, chat: compatible, "chat (openai.chat)": openai.chat, messages: createAnthropic(address) };
const booked = [];
const book = tool({
  description: "Book a trip.",
  inputSchema: z.object({ trip: Trip, urgent: z.boolean().optional() }),
  execute: async ({ trip }) => booked.push(trip) && "booked",
});

for (const [label, provider] of Object.entries(apis)) {
  const api = label.split(" ")[0];
  const name = (text) => (label === api ? text : `${text} ${label.slice(api.length + 1)}`);
  const model = provider(MODEL);

  step(api, "chat", name("a conversation with usage"), async () => {
    const messages = [];
    for (const content of QUESTIONS) {
      messages.push({ role: "user", content });
      const answer = await generateText({ model, instructions: "Answer in one word.", messages, maxRetries: 0 });
      assert(answer.text && answer.usage.outputTokens > 0);
      messages.push(...answer.response.messages);
    }
  });

  step(api, "stream", name("a stream"), async () => {
    const result = streamText({ model, prompt: QUESTIONS[0], maxRetries: 0 });
    let text = "";
    for await (const delta of result.textStream) text += delta;
    // openai-compatible asks for no token counts in a stream, unless includeUsage is set
    assert(text && (api === "chat" || (await result.usage).outputTokens > 0));
  });

  step(api, "tools", name("a tool loop of two steps"), async () => {
    booked.length = 0;
    const answer = await generateText({
      model, prompt: ASK, tools: { book }, maxRetries: 0, stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : { type: "tool", toolName: "book" } }),
    });
    assert.equal(booked.length, 2, JSON.stringify(answer.content));
    booked.forEach((trip) => Trip.parse(trip));
    const messages = [{ role: "user", content: ASK }, ...answer.response.messages, { role: "user", content: QUESTIONS[0] }];
    assert((await generateText({ model, messages, tools: { book }, toolChoice: "none", maxRetries: 0 })).text);
  });

  step(api, "structured", name("a nested and recursive type"), async () => {
    Trip.parse((await generateText({ model, prompt: ASK, output: Output.object({ schema: Trip }), maxRetries: 0 })).output);
    Trip.parse((await generateObject({ model, prompt: ASK, schema: Trip, maxRetries: 0 })).object);
  });

  step(api, "errors", name("a wrong name and a long prompt"), async () => {
    const ask = (other, prompt) => generateText({ model: other, prompt, maxRetries: 0 });
    await throws("AI_APICallError", () => ask(provider("gpt-9"), "Hello"), "gpt-9");
    await throws("AI_APICallError", () => ask(model, TOO_LONG), "tokens");
  });
}

await main("AI SDK", "ai");
