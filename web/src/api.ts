// Calls to the server, and error messages for the reader.

const NO_ANSWER = "The server does not respond: it may have been stopped, or the network is down.";
const CUT_OFF = "The answer was cut off: the connection to the server was lost.";
export const KEY_ERRORS: Record<string, string> = {
  missing_api_key: "This server requires an API key: enter it above.",
  invalid_api_key: "The API key is not valid: check it above.",
};

/** An error with a message for the reader of the page. */
export class Failure extends Error {
  constructor(message: string, readonly code = "") {
    super(message);
  }
}

export const access = { key: "" };

function headers(): Record<string, string> {
  const key = access.key.trim();
  // A header cannot contain other characters.
  if (/[^ -~]/.test(key)) throw new Failure(KEY_ERRORS.invalid_api_key!, "invalid_api_key");
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

/** Return the response of a route. Throws Failure, or AbortError on the signal. */
export async function call(path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const options: RequestInit = { headers: headers(), signal: signal ?? null };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response: Response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw isAbort(error) ? error : new Failure(NO_ANSWER, "no_answer");
  }
  if (response.ok) return response;
  const { code, message } = (await response.json().catch(() => ({}))).error ?? {};
  throw new Failure(KEY_ERRORS[code] ?? message ?? `The server responded with status ${response.status}.`, code);
}

export async function callJson<T>(path: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  return (await call(path, body, signal)).json();
}

export const isAbort = (error: unknown) => error instanceof Error && error.name === "AbortError";

/** Yield the data of server-sent events, parsed. A chunk of bytes may end anywhere. Throws Failure if the stream breaks off. */
export async function* events<T>(response: Response): AsyncGenerator<T> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read().catch((error) => {
      throw isAbort(error) ? error : new Failure(CUT_OFF, "no_answer");
    });
    if (done) throw new Failure(CUT_OFF, "no_answer");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop()!;
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "))?.slice("data: ".length);
      if (data === "[DONE]") return;
      if (data === undefined) continue;
      const event = JSON.parse(data);
      if (event.error) throw new Failure(event.error.message, event.error.code);
      yield event;
    }
  }
}
