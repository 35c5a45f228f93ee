// What is known of the server: whether it is there, which model it has, what its template can do.

const AGAIN_MS = 1500;
const GONE = "The server does not answer. This page goes on when it is back.";
const SHORT = {
  no_answer: "not reachable", loading: "loading", missing_api_key: "needs an API key", invalid_api_key: "wrong API key",
};
let loading = false, attempt = 0;

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// Waits while the server loads or is not there, and then goes on.
async function connect() {
  const mine = ++attempt;  // a later one takes over
  while (mine === attempt) {
    try {
      const found = (await (await call("v1/models")).json()).data[0];
      if (mine === attempt) await connected(found);
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
  $("model").textContent = model.id + " · context " + model.max_model_len.toLocaleString();
  await askTemplate().catch(() => {});  // a model without a template tells so when it is asked something
  sendNext();
}

// Says what is wrong, and whether it may pass by itself.
async function waitsFor(error) {
  loading = error.code === "loading";
  const gone = error.code === "no_answer";
  $("model").textContent = SHORT[error.code] ?? "";
  $("notice").textContent = loading ? await loadingWords() : gone ? GONE : error.message;
  if (error.code in IN_WORDS) needsKey();
  return loading || gone;
}

async function loadingWords() {
  let share = null;
  try { share = (await (await fetch("health")).json()).progress; } catch { /* the next attempt tells */ }
  const far = share === null ? "" : ` (${Math.round(share * 100)} %)`;
  return `The model is being loaded${far}. This page goes on when it is there.`;
}

function needsKey() {
  $("more").open = true;
  $("key").focus();
}

// A template that knows a switch for thinking, or tools, writes another prompt with them.
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
    allowTools("its chat template does not show tools to it.");
}

// Templates call the switch by one of two names, and do not mind the other.
function thinking(on) {
  return { chat_template_kwargs: { enable_thinking: on, thinking: on } };
}
