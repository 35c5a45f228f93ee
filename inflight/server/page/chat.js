// The conversation: one question at a time, with as many rounds of tool calls as the model needs.

const EXAMPLES = ["Why does it rain?", "Tell me a story about a fox.", "What is continuous batching?"];
const MAX_ROUNDS = 8;  // of tool calls per question
let messages = [], queue = [], running = null;

function fresh() {
  running?.abort();
  setRunning(null);
  messages = [];
  queue = [];
  showQueue();
  const empty = element("div", "", "What you send goes only to this server.");
  empty.id = "empty";
  for (const example of EXAMPLES) {
    const button = element("button", "", example);
    button.onclick = () => send(example);
    empty.append(button);
  }
  $("log").replaceChildren(empty);
  $("text").focus();
}

// Sends a question now, or once the current answer is complete.
function send(text) {
  queue.push(text);
  showQueue();
  sendNext();
}

function sendNext() {
  if (running || loading || !queue.length) return;
  const text = queue.shift();
  showQueue();
  ask(text);
}

function showQueue() {
  $("queue").replaceChildren(...queue.map((text, index) => {
    const item = element("li", ""), back = element("button", "", "Take back");
    back.onclick = () => { restore(queue.splice(index, 1)); showQueue(); };
    item.append("Next:", element("span", "", text), back);
    return item;
  }));
}

// Puts questions that were not sent or not answered back into the text box.
function restore(texts) {
  $("text").value = [...texts, $("text").value].filter(Boolean).join("\n");
  fit();
  if (texts.length) $("text").focus();
}

function setRunning(controller) {
  running = controller;
  $("log").setAttribute("aria-busy", Boolean(running));  // screen readers read an answer once it is complete
  showButtons();
}

function showButtons() {
  $("stop").hidden = !running;
  $("send").hidden = Boolean(running) && !$("text").value.trim();
}

async function ask(text) {
  const mine = new AbortController(), conversation = messages;
  conversation.push({ role: "user", content: text });
  showUser(text);
  setRunning(mine);
  const failed = await answerAll(conversation, mine.signal);
  if (running !== mine) return;
  setRunning(null);
  if (failed) giveUp(conversation, failed.code, failed.message);
  sendNext();
}

function giveUp(conversation, code, message) {
  const unanswered = conversation.at(-1).role === "user" ? [conversation.pop().content] : [];
  restore([...unanswered, ...queue.splice(0)]);
  showQueue();
  if (code === "tools_unavailable") {
    $("tools").open = true;
    allowTools(message.replace("tools are given, but ", ""));
  }
  if (code in KEY_ERRORS) needsKey();
  if (code === "no_answer" || code === "loading") connect();
  if (code === "shutting_down") setTimeout(connect, AGAIN_MS);
  scrollDown();
}

// Requests answers and runs their tool calls until an answer has none. Returns the error, if any.
async function answerAll(conversation, signal) {
  for (let round = 0; round <= MAX_ROUNDS; round++) {
    const view = new AnswerView(), answer = new Answer(view);
    try {
      const response = await call("v1/chat/completions", requestBody(conversation), signal);
      for await (const event of events(response)) answer.add(event);
    } catch (failed) {
      const stopped = failed.name === "AbortError";
      if (answer.content) conversation.push({ role: "assistant", content: answer.content });
      view.end(stopped ? "stopped" : failed.message, !stopped);
      return failed;
    }
    conversation.push(answer.message());
    for (const [index, { id, function: { name, arguments: text } }] of answer.calls.entries()) {
      const content = resultOf(name, text);
      view.showResult(index, content);
      conversation.push({ role: "tool", tool_call_id: id, content });
    }
    const isLast = answer.calls.length && round === MAX_ROUNDS;
    view.end(answer.figures() + (isLast ? ` · stopped after ${MAX_ROUNDS} rounds of tool calls` : ""));
    if (!answer.calls.length) return null;
  }
  return null;
}

function requestBody(conversation) {
  const body = { messages: conversation, stream: true, stream_options: { include_usage: true } };
  const tools = chosenTools();
  if (tools.length) body.tools = tools;
  if (!$("think-switch").hidden) Object.assign(body, thinking($("think").checked));
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("max").value !== "") body.max_completion_tokens = Number($("max").value);
  return body;
}

function fit() {
  $("text").style.height = "auto";
  $("text").style.height = $("text").scrollHeight + "px";
  showButtons();
}

$("form").onsubmit = (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text) return;
  $("text").value = "";
  fit();
  send(text);
};
$("text").oninput = window.onresize = fit;
$("text").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && !event.isComposing) running?.abort();
};
$("stop").onclick = () => running?.abort();
$("key").onchange = connect;
$("fresh").onclick = fresh;
showTools();
allowTools();
fresh();
connect();
