// Agents of the AI SDK. They read what to do from the environment, and print what they found as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { BASE_URL, API_KEY, MODEL, QUESTION } = process.env;
const provider = createOpenAICompatible({
  name: "inflight",
  baseURL: BASE_URL,
  apiKey: API_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const noted = (calls, name, run) => (input) => {
  calls.push([name, input]);
  return run(input);
};
const toolsOf = (calls) => ({
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: noted(calls, "get_weather", () => "sunny"),
  }),
  multiply: tool({
    description: "The product of two numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: noted(calls, "multiply", ({ a, b }) => String(a * b)),
  }),
});
const asked = { model: provider(MODEL), prompt: QUESTION, maxRetries: 0 };
const loopOf = (calls) => ({ ...asked, tools: toolsOf(calls), stopWhen: stepCountIs(5) });

const whole = async () => {
  const calls = [];
  const { text, steps, totalUsage } = await generateText(loopOf(calls));
  return { calls, text, reasoning: steps[0].reasoningText, usage: totalUsage };
};
const streamed = async () => {
  const calls = [];
  let text = "";
  const result = streamText(loopOf(calls)); // it tells errors on stderr
  for await (const piece of result.textStream) text += piece;
  return { calls, text, reasoning: (await result.steps)[0].reasoningText, usage: await result.totalUsage };
};
const object = async () => {
  const text = z.string().max(20);
  const schema = z.object({ city: text, weather: text, product: z.number().int().min(0).max(999) });
  return (await generateText({ ...asked, output: Output.object({ schema }) })).output;
};
console.log(JSON.stringify({ whole: await whole(), streamed: await streamed(), object: await object() }));
