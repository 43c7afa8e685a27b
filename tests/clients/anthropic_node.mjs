// @anthropic-ai/sdk: messages, the stream helper, tools with a nested type, count_tokens.
import { strict as assert } from "node:assert";
import Anthropic from "@anthropic-ai/sdk";
import { z } from "zod";
import { ASK, MODEL, QUESTIONS, SERVER, TOO_LONG, Trip, main, step, throws } from "./steps.mjs";

const client = new Anthropic({ baseURL: SERVER });
const book = { name: "book", description: "Book a trip.", input_schema: z.toJSONSchema(Trip) };
const textOf = (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join("");

step("messages", "chat", "a conversation with usage", async () => {
  const messages = [];
  for (const content of QUESTIONS) {
    messages.push({ role: "user", content });
    const answer = await client.messages.create({ model: MODEL, max_tokens: 100, system: "Answer in one word.", messages });
    assert(textOf(answer) && answer.usage.output_tokens > 0);
    messages.push({ role: "assistant", content: answer.content });
  }
  assert((await client.messages.countTokens({ model: MODEL, messages })).input_tokens > 0);
});

step("messages", "stream", "the stream helper", async () => {
  const stream = client.messages.stream({ model: MODEL, max_tokens: 100, messages: [{ role: "user", content: QUESTIONS[0] }] });
  let text = "";
  stream.on("text", (delta) => (text += delta));
  const final = await stream.finalMessage();
  assert(text && textOf(final) === text && final.usage.output_tokens > 0);
});

step("messages", "tools", "a tool loop", async () => {
  const messages = [{ role: "user", content: ASK }];
  for (const tool_choice of [{ type: "any" }, { type: "tool", name: "book" }]) {
    const stream = client.messages.stream({ model: MODEL, max_tokens: 200, messages, tools: [book], tool_choice });
    const answer = await stream.finalMessage();
    const call = answer.content.at(-1);
    Trip.parse(call.input);
    const result = { type: "tool_result", tool_use_id: call.id, content: "booked" };
    messages.push({ role: "assistant", content: answer.content }, { role: "user", content: [result] });
  }
  messages.at(-1).content.push({ type: "text", text: QUESTIONS[0] });
  const last = await client.messages.create({ model: MODEL, max_tokens: 100, messages, tools: [book], tool_choice: { type: "none" } });
  assert(textOf(last));
});

step("messages", "errors", "a wrong name and a long prompt", async () => {
  const ask = (model, content) => client.messages.create({ model, max_tokens: 10, messages: [{ role: "user", content }] });
  await throws("NotFoundError", () => ask("claude-9", "Hello"), "claude-9");
  await throws("BadRequestError", () => ask(MODEL, TOO_LONG), "tokens");
});

await main("anthropic-node", "@anthropic-ai/sdk");
