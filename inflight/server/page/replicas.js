// Polls the state of the engines.

const REFRESH_MS = 2000;
const STATES = {
  starting: "is starting", draining: "takes no new requests", stalled: "makes no progress", restarting: "is restarting",
  dead: "is dead", closing: "is shutting down", closed: "has shut down",
};
const number = (value) => value.toLocaleString("en");
const percent = (value) => `${Math.round(value * 100)} %`;

async function refresh() {
  try {
    show(await (await call("v1/replicas")).json());
    $("notice").textContent = "";
  } catch (failure) {
    $("notice").textContent = failure.code === "loading" ? "The model is loading." : failure.message;
    if (failure.code in KEY_ERRORS) $("key-field").hidden = false;
    if (failure.code !== "no_answer") show({ data: [], routing: null });
  }
  $("replicas").classList.toggle("old", $("notice").textContent !== "");
}

async function keepFresh() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((done) => setTimeout(done, REFRESH_MS));
  }
}

function show({ data, routing }) {
  $("summary").textContent = data.length ? words(data, routing) : "";
  $("replicas").replaceChildren(...data.map((replica) => card(replica, routing)));
}

function words(data, routing) {
  const unhealthy = data.filter((replica) => replica.state !== "running");
  const trouble = unhealthy.map((replica) => `${name(replica, routing)} ${STATES[replica.state]}`).join(", ");
  if (routing === null)
    return `This server has one engine and no router${trouble ? `: ${trouble}.` : "; it is running."}`;
  const count = data.length === 1 ? "one replica" : `${data.length} replicas`;
  return `${count} behind a router (${routing.replace("_", " ")}): ${trouble || "all are running"}.`.replace(/^o/, "O");
}

const name = (replica, routing) => (routing === null ? "the engine" : `replica ${replica.id}`);

function card(replica, routing) {
  const item = element("li", "", replica.state);
  const title = element("h2", routing === null ? "Engine" : `Replica ${replica.id}`);
  title.append(element("span", replica.state, "state"));
  item.append(title, figures(replica));
  return item;
}

function figures(replica) {
  const list = document.createElement("dl");
  const row = (term, value) => list.append(element("dt", term), element("dd", value));
  row("Running requests", number(replica.num_running));
  row("Waiting requests", number(replica.num_waiting));
  row("Queued prompt tokens", number(replica.num_queued_tokens));
  row("KV cache usage", percent(replica.kv_usage));
  const bar = element("div", "", "bar"), filled = document.createElement("div");
  filled.style.width = percent(replica.kv_usage).replace(" ", "");
  bar.append(filled);
  list.append(bar);
  row("Prefix cache hit rate", percent(replica.prefix_hit_rate));
  row("Output tokens", number(replica.num_output_tokens));
  row("Restarts", number(replica.num_restarts));
  return list;
}

function element(tag, text, kind = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = kind;
  return node;
}

$("key").addEventListener("change", refresh);
keepFresh();
