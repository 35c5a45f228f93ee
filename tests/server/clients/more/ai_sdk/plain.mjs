// Plain calls of three clients: a chat, a stream, and errors. What to ask comes from the environment; what they found is printed as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { ChatOpenAI } from "@langchain/openai";
import { generateText, streamText } from "ai";
import OpenAI from "openai";

const { BASE_URL, API_KEY, MODEL, QUESTION } = process.env;
const MAX_TOKENS = Number(process.env.MAX_TOKENS);

// What went wrong, as each client tells it.
const failed = async (call) => {
  try {
    await call();
  } catch (error) {
    return { name: error.constructor.name, status: error.status ?? error.statusCode, message: error.message };
  }
  return null;
};

const openai = async () => {
  const client = (key) => new OpenAI({ baseURL: BASE_URL, apiKey: key, maxRetries: 0 });
  const messages = [{ role: "user", content: QUESTION }];
  const asked = { model: MODEL, messages, temperature: 0, max_tokens: MAX_TOKENS };
  const { completions } = client(API_KEY).chat;
  const answer = await completions.create(asked);
  const stream = await completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  const pieces = [];
  let usage;
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta.content) pieces.push(chunk.choices[0].delta.content);
    usage = chunk.usage ?? usage;
  }
  return {
    whole: { text: answer.choices[0].message.content, tokens: answer.usage.completion_tokens },
    streamed: { pieces, tokens: usage.completion_tokens },
    refused: await failed(() => completions.create({ ...asked, top_p: 7 })),
    refusedStream: await failed(() => completions.create({ ...asked, top_p: 7, stream: true })),
    wrongKey: await failed(() => client("wrong").chat.completions.create(asked)),
  };
};

const langchain = async () => {
  const model = (key, others = {}) =>
    new ChatOpenAI({
      model: MODEL,
      apiKey: key,
      temperature: 0,
      maxTokens: MAX_TOKENS,
      maxRetries: 0,
      configuration: { baseURL: BASE_URL },
      ...others,
    });
  const answer = await model(API_KEY).invoke(QUESTION);
  const pieces = [];
  let tokens;
  for await (const chunk of await model(API_KEY).stream(QUESTION)) {
    if (chunk.content) pieces.push(chunk.content);
    tokens = chunk.usage_metadata?.output_tokens ?? tokens;
  }
  const refusing = model(API_KEY, { topP: 7 });
  return {
    whole: { text: answer.content, tokens: answer.usage_metadata.output_tokens },
    streamed: { pieces, tokens },
    refused: await failed(() => refusing.invoke(QUESTION)),
    refusedStream: await failed(() => refusing.stream(QUESTION)),
    wrongKey: await failed(() => model("wrong").invoke(QUESTION)),
  };
};

const aiSdk = async () => {
  const model = (key) =>
    createOpenAICompatible({ name: "inflight", baseURL: BASE_URL, apiKey: key, includeUsage: true })(MODEL);
  const asked = (key) => ({
    model: model(key),
    prompt: QUESTION,
    temperature: 0,
    maxOutputTokens: MAX_TOKENS,
    maxRetries: 0,
  });
  const answer = await generateText(asked(API_KEY));
  const stream = streamText(asked(API_KEY));
  const pieces = [];
  for await (const piece of stream.textStream) pieces.push(piece);
  const refusing = { ...asked(API_KEY), topP: 7 };
  const refusedStream = async () => {
    let told;
    for await (const _ of streamText({ ...refusing, onError: ({ error }) => (told = error) }).textStream);
    throw told;
  };
  return {
    whole: { text: answer.text, tokens: answer.usage.outputTokens },
    streamed: { pieces, tokens: (await stream.usage).outputTokens },
    refused: await failed(() => generateText(refusing)),
    refusedStream: await failed(refusedStream),
    wrongKey: await failed(() => generateText(asked("wrong"))),
  };
};

console.log(JSON.stringify({ openai: await openai(), langchain: await langchain(), ai: await aiSdk() }));
