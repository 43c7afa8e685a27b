// openai-node: chat completions and responses; parse with zod, tools, streams.
import { strict as assert } from "node:assert";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { ASK, MODEL, QUESTIONS, TOO_LONG, Trip, main, step, throws } from "./steps.mjs";

const client = new OpenAI();
const question = { role: "user", content: ASK };
const book = zodFunction({ name: "book", description: "Book a trip.", parameters: Trip });
const bookResponse = { type: "function", ...book.function };

step("chat", "chat", "a conversation with usage", async () => {
  const messages = [{ role: "developer", content: "Answer in one word." }];
  for (const content of QUESTIONS) {
    messages.push({ role: "user", content });
    const answer = await client.chat.completions.create({ model: MODEL, messages });
    assert(answer.choices[0].message.content && answer.usage.total_tokens > 0);
    messages.push(answer.choices[0].message);
  }
});

step("chat", "stream", "a stream, and the stream helper", async () => {
  const fields = { model: MODEL, messages: [{ role: "user", content: QUESTIONS[0] }] };
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...fields, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  const stream = client.chat.completions.stream({ ...fields, stream_options: { include_usage: true } });
  assert.equal(await stream.finalContent(), text);
  assert((await stream.totalUsage()).total_tokens > 0);
});

step("chat", "tools", "a tool loop", async () => {
  const messages = [question];
  for (const tool_choice of ["required", { type: "function", function: { name: "book" } }]) {
    const answer = await client.chat.completions.parse({ model: MODEL, messages, tools: [book], tool_choice });
    const { message } = answer.choices[0];
    Trip.parse(message.tool_calls[0].function.parsed_arguments);
    messages.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "booked" });
  }
  messages.push({ role: "user", content: QUESTIONS[0] });
  const answer = await client.chat.completions.create({ model: MODEL, messages, tools: [book], tool_choice: "none" });
  assert(answer.choices[0].message.content);
});

step("chat", "structured", "parse a nested and recursive type", async () => {
  const answer = await client.chat.completions.parse({
    model: MODEL, messages: [question], response_format: zodResponseFormat(Trip, "trip"),
  });
  Trip.parse(answer.choices[0].message.parsed);
});

step("chat", "errors", "a wrong name and a long prompt", async () => {
  const ask = (model, content) => client.chat.completions.create({ model, messages: [{ role: "user", content }] });
  await throws("NotFoundError", () => ask("gpt-9", "Hello"), "gpt-9");
  await throws("BadRequestError", () => ask(MODEL, TOO_LONG), "tokens");
});

step("responses", "chat", "a conversation by previous_response_id", async () => {
  let previous_response_id;
  for (const input of QUESTIONS) {
    const answer = await client.responses.create({ model: MODEL, input, instructions: "Answer in one word.", previous_response_id });
    assert(answer.output_text && answer.usage.total_tokens > 0);
    previous_response_id = answer.id;
  }
});

step("responses", "stream", "a stream, and the stream helper", async () => {
  const stream = client.responses.stream({ model: MODEL, input: QUESTIONS[0] });
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  assert.equal((await stream.finalResponse()).output_text, text);
});

step("responses", "tools", "a tool loop", async () => {
  const input = [question];
  for (const tool_choice of ["required", { type: "function", name: "book" }]) {
    const answer = await client.responses.create({ model: MODEL, input, tools: [bookResponse], tool_choice });
    const call = answer.output.at(-1);
    Trip.parse(JSON.parse(call.arguments));
    input.push(...answer.output, { type: "function_call_output", call_id: call.call_id, output: "booked" });
  }
  input.push({ role: "user", content: QUESTIONS[0] });
  assert((await client.responses.create({ model: MODEL, input, tools: [bookResponse], tool_choice: "none" })).output_text);
});

step("responses", "structured", "parse a nested and recursive type", async () => {
  const answer = await client.responses.parse({ model: MODEL, input: [question], text: { format: zodTextFormat(Trip, "trip") } });
  Trip.parse(answer.output_parsed);
});

step("responses", "errors", "a wrong name and a long prompt", async () => {
  await throws("NotFoundError", () => client.responses.create({ model: "gpt-9", input: "Hello" }), "gpt-9");
  await throws("BadRequestError", () => client.responses.create({ model: MODEL, input: TOO_LONG }), "tokens");
});

await main("openai-node", "openai");
