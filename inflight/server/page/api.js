// Calls to the server, and error messages for the reader.

const $ = (id) => document.getElementById(id);

const NO_ANSWER = "The server does not respond: it may have been stopped, or the network is down.";
const BROKEN_OFF = "The answer was cut off: the connection to the server was lost.";
const KEY_ERRORS = {
  missing_api_key: "This server requires an API key: enter it below.",
  invalid_api_key: "The API key is not valid: check it below.",
};

// An error with a message for the reader of the page.
class Failure extends Error {
  constructor(message, code = "") {
    super(message);
    this.code = code;
  }
}

function headers() {
  const headers = { "Content-Type": "application/json" };
  const key = $("key").value.trim();
  if (/[^ -~]/.test(key)) throw new Failure(KEY_ERRORS.invalid_api_key, "invalid_api_key");  // a header cannot contain it
  if (key) headers.Authorization = "Bearer " + key;
  return headers;
}

// Returns the response of a route. Throws Failure, or AbortError on the signal.
async function call(path, body, signal) {
  const options = { headers: headers(), signal };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure(NO_ANSWER, "no_answer");
  }
  if (response.ok) return response;
  const { code, message } = (await response.json().catch(() => ({}))).error ?? {};
  throw new Failure(KEY_ERRORS[code] ?? message ?? `The server responded with status ${response.status}.`, code);
}

// Yields the events of a streamed answer; a chunk of bytes may end anywhere.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Failure(BROKEN_OFF, "no_answer");
    });
    if (done) throw new Failure(BROKEN_OFF, "no_answer");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue;
      const event = JSON.parse(part.slice("data: ".length));
      if (event.error) throw new Failure(event.error.message, event.error.code);
      yield event;
    }
  }
}
