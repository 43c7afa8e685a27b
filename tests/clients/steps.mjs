// steps.py's counterpart for node: the server's address, how a step is reported, and the nested type in zod.
// Modules are looked up beside a script: test_clients.py copies the scripts into .venv-clients/node.
import { strict as assert } from "node:assert";
import { readFileSync } from "node:fs";
import { z } from "zod";

export const SERVER = process.argv[2].replace(/\/$/, "");
export const BASE_URL = SERVER + "/v1";
export const KEY = process.env.GPT_FASTER_API_KEY ?? "none";
Object.assign(process.env, { OPENAI_BASE_URL: BASE_URL, OPENAI_API_KEY: KEY, ANTHROPIC_API_KEY: KEY });

const models = await fetch(BASE_URL + "/models", { headers: { Authorization: "Bearer " + KEY } });
export const MODEL = (await models.json()).data[0].id;
export const TOO_LONG = "The boats turned slowly on their ropes. ".repeat(600);
export const QUESTIONS = ["What is the capital of France?", "And of Italy?", "And of Spain?"];
export const ASK = 'Repeat: {"places": [{"city": "Oslo", "unit": "celsius"}], "days": 2, "then": null}';

const Place = z.object({ city: z.string().max(12), unit: z.enum(["celsius", "fahrenheit"]) });
export const Trip = z.object({
  places: z.array(Place).min(1).max(2),
  days: z.int().min(1).max(9).nullable(),
  get then() { return Trip.nullable(); },
});

const steps = [];

export function step(api, column, name, run) {
  steps.push({ api, column, step: name, run });
}

/** The call throws an error whose constructor or name is one of kinds, with the text in its message. */
export async function throws(kind, call, text) {
  let error;
  try {
    await call();
  } catch (e) {
    error = e;
  }
  assert(error, `no ${kind}`);
  assert(error.constructor.name === kind || error.name === kind, `${error.constructor.name}: ${error.message}`);
  assert(`${error.message}`.includes(text), error.message);
}

export async function main(client, name) {
  const file = new URL(`node_modules/${name}/package.json`, import.meta.url);
  console.log(JSON.stringify({ client, version: JSON.parse(readFileSync(file, "utf8")).version }));
  const wanted = process.argv.slice(3);
  for (const { run, ...line } of steps) {
    if (wanted.length && !wanted.some((part) => `${line.api} ${line.column} ${line.step}`.includes(part))) continue;
    const start = Date.now();
    try {
      await run();
      line.ok = true;
    } catch (e) {
      line.ok = false;
      line.error = `${e.constructor.name}: ${e.message} ${e.responseBody ?? ""} ${e.cause?.message ?? ""}`.slice(0, 1500);
      line.line = e.stack?.match(/(?!steps)\w+\.mjs:(\d+)/)?.[0];
    }
    console.log(JSON.stringify({ ...line, seconds: Math.round((Date.now() - start) / 100) / 10 }));
  }
}
