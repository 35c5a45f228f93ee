// The state of the server: whether it responds, its model, and what its chat template supports.

const AGAIN_MS = 1500;
const GONE = "The server does not respond. This page continues when it is back.";
const SHORT = {
  no_answer: "not reachable", loading: "loading", missing_api_key: "API key required", invalid_api_key: "invalid API key",
};
let loading = false, attempt = 0;

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// Retries while the server is loading or unreachable.
async function connect() {
  const mine = ++attempt;  // a later attempt takes over
  while (mine === attempt) {
    try {
      const model = (await (await call("v1/models")).json()).data[0];
      if (mine === attempt) await connected(model);
      return;
    } catch (error) {
      if (mine !== attempt || !(await waitsFor(error))) return;
      await sleep(AGAIN_MS);
    }
  }
}

async function connected(model) {
  loading = false;
  $("notice").textContent = "";
  $("model").textContent = model.id + " · context length " + model.max_model_len.toLocaleString();
  await askTemplate().catch(() => {});  // without a template, the error comes with the first question
  sendNext();
}

// Shows what is wrong, and returns whether retrying makes sense.
async function waitsFor(error) {
  loading = error.code === "loading";
  const gone = error.code === "no_answer";
  $("model").textContent = SHORT[error.code] ?? "";
  $("notice").textContent = loading ? await loadingWords() : gone ? GONE : error.message;
  if (error.code in KEY_ERRORS) needsKey();
  return loading || gone;
}

async function loadingWords() {
  let share = null;
  try { share = (await (await fetch("health")).json()).progress; } catch { /* the next attempt shows it */ }
  const percent = share === null ? "" : ` (${Math.round(share * 100)} %)`;
  return `The model is loading${percent}. This page continues when it is ready.`;
}

function needsKey() {
  $("more").open = true;
  $("key").focus();
}

// A template that supports thinking or tools renders a different prompt with them.
async function askTemplate() {
  allowTools();
  const prompt = async (extra) => {
    const messages = [{ role: "user", content: "Hello" }];
    return String((await (await call("tokenize", { messages, ...extra })).json()).tokens);
  };
  const plain = await prompt(), thinks = await prompt(thinking(true));
  const known = thinks !== plain || (await prompt(thinking(false))) !== plain;
  $("think-switch").hidden = !known;
  $("think").checked = known && thinks === plain;
  if ((await prompt({ tools: TOY_TOOLS.map(described) })) === plain)
    allowTools("its chat template does not support tools.");
}

// Templates use one of these two names and ignore the other.
function thinking(on) {
  return { chat_template_kwargs: { enable_thinking: on, thinking: on } };
}
