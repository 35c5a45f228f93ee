// The server's side of the page: what is sent, and what comes back in words.

const $ = (id) => document.getElementById(id);

const NO_ANSWER = "The server does not answer: it may have been stopped, or the network is down.";
const BROKEN_OFF = "The answer broke off: the connection to the server is gone.";
const IN_WORDS = {
  missing_api_key: "This server asks for an API key: enter it below.",
  invalid_api_key: "The server does not know this API key: check it below.",
};

// Something that went wrong, in words for whoever reads the page.
class Failure extends Error {
  constructor(message, code = "") {
    super(message);
    this.code = code;
  }
}

function headers() {
  const found = { "Content-Type": "application/json" };
  const key = $("key").value.trim();
  if (/[^ -~]/.test(key)) throw new Failure(IN_WORDS.invalid_api_key, "invalid_api_key");  // no header could hold it
  if (key) found.Authorization = "Bearer " + key;
  return found;
}

// The response of a route. Raises Failure, or AbortError when the signal says so.
async function call(path, body, signal) {
  const sent = { headers: headers(), signal };
  if (body) Object.assign(sent, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, sent);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure(NO_ANSWER, "no_answer");
  }
  if (response.ok) return response;
  const { code, message } = (await response.json().catch(() => ({}))).error ?? {};
  throw new Failure(IN_WORDS[code] ?? message ?? `The server answers with status ${response.status}.`, code);
}

// Events of a streamed answer as they come; a chunk of bytes may end anywhere.
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
