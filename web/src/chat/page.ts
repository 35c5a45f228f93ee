// The chat: one question at a time, with as many rounds of tool calls as the model needs.

import { call, callJson, events, Failure, isAbort, KEY_ERRORS } from "../api";
import { make } from "../dom";
import type { Page } from "../page";
import { server } from "../server";
import { Answer, type ChatEvent, type Message } from "./answer";
import { described, resultOf, TOY_TOOLS } from "./toyTools";
import { AnswerView } from "./view";

const EXAMPLES = ["Why does it rain?", "Tell me a story about a fox.", "What is continuous batching?"];
const MAX_ROUNDS = 8;  // of tool calls per question
const TOOLS_NOTE = "They run in this page, and their results are sent to the model. The weather is made up.";

// Templates use one of these two names and ignore the other.
const thinking = (on: boolean) => ({ chat_template_kwargs: { enable_thinking: on, thinking: on } });

export class ChatPage implements Page {
  readonly title = "Chat";

  private readonly log = make("div", { id: "log", "aria-live": "polite" });
  private readonly scroll = make("div", { id: "scroll" }, this.log);
  private readonly queueList = make("ul", { id: "queue", "aria-label": "Queued messages" });
  private readonly text = make("textarea", { id: "text", rows: 1, placeholder: "Ask something", "aria-label": "Message" });
  private readonly stopButton = make("button", { id: "stop", type: "button", title: "Escape", hidden: true, onclick: () => this.running?.abort() }, "Stop");
  private readonly sendButton = make("button", { id: "send" }, "Send");
  private readonly form = make("form", { id: "form" }, this.text, this.stopButton, this.sendButton);
  private readonly think = make("input", { id: "think", type: "checkbox" });
  private readonly thinkSwitch = make("label", { id: "think-switch", hidden: true }, this.think, " Think");
  private readonly toolsOn = make("span", { id: "tools-on" });
  private readonly toolsNote = make("p", { id: "tools-note" });
  private readonly toolBoxes = TOY_TOOLS.map(({ name }) => make("input", { type: "checkbox", value: name, onchange: () => this.countTools() }));
  private readonly tools = make("details", { id: "tools" }, make("summary", {}, "Tools", this.toolsOn), this.toolsNote,
    make("div", { id: "tools-list" }, ...TOY_TOOLS.map(({ name, description }, index) =>
      make("label", { title: description }, this.toolBoxes[index], ` ${name}`))));
  private readonly system = make("textarea", { id: "system", rows: 2, placeholder: "none" });
  private readonly temperature = make("input", { id: "temperature", type: "number", min: 0, max: 2, step: 0.1, placeholder: "default" });
  private readonly maxTokens = make("input", { id: "max", type: "number", min: 1, placeholder: "no limit" });
  private readonly settings = make("details", { id: "more" }, make("summary", {}, "Settings"), make("div", {},
    make("label", { class: "wide" }, "System prompt ", this.system), make("label", {}, "Temperature ", this.temperature),
    make("label", {}, "Max tokens ", this.maxTokens)));
  private readonly fresh = make("button", { id: "fresh", type: "button", onclick: () => this.reset() }, "New chat");
  readonly root = make("section", { id: "chat" }, this.scroll, make("footer", {}, this.queueList, this.form,
    make("div", { id: "options" }, this.thinkSwitch, this.tools, this.settings, this.fresh)));

  private messages: Message[] = [];
  private queue: string[] = [];
  private running: AbortController | null = null;
  private isConnected = false;  // and the template has not been asked since

  constructor() {
    this.form.onsubmit = (event) => { event.preventDefault(); this.submit(); };
    this.text.oninput = () => this.fit();
    addEventListener("resize", () => this.fit());
    this.text.onkeydown = (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.submit();
    };
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) this.running?.abort();
    });
    server.onConnected.push(() => {
      this.isConnected = true;
      if (this.root.isConnected) void this.connected();
    });
    this.allowTools();
    this.reset();
  }

  show() {
    if (this.isConnected) void this.connected();
    this.scrollDown();
    if (!(document.activeElement instanceof HTMLInputElement)) this.text.focus();
  }

  hide() {}  // an answer that streams goes on

  private reset() {
    this.running?.abort();
    this.setRunning(null);
    this.messages = [];
    this.queue = [];
    this.showQueue();
    this.log.replaceChildren(make("div", { id: "empty" }, "What you send goes only to this server.",
      ...EXAMPLES.map((example) => make("button", { type: "button", onclick: () => this.send(example) }, example))));
    this.text.focus();
  }

  // ---- questions ----

  private submit() {
    const text = this.text.value.trim();
    if (!text) return;
    this.text.value = "";
    this.fit();
    this.send(text);
  }

  /** Send a question now, or once the current answer is complete. */
  private send(text: string) {
    this.queue.push(text);
    this.showQueue();
    this.sendNext();
  }

  private sendNext() {
    if (this.running || server.isLoading || !this.queue.length) return;
    const text = this.queue.shift()!;
    this.showQueue();
    this.log.querySelector("#empty")?.remove();
    this.log.append(make("div", { class: "message user" }, text));
    this.scrollDown();
    this.messages.push({ role: "user", content: text });
    void this.answer();
  }

  private showQueue() {
    this.queueList.replaceChildren(...this.queue.map((text, index) => make("li", {}, "Next:", make("span", {}, text),
      make("button", { type: "button", onclick: () => { this.restore(this.queue.splice(index, 1)); this.showQueue(); } }, "Take back"))));
  }

  /** Put questions that were not sent or not answered back into the text box. */
  private restore(texts: string[]) {
    this.text.value = [...texts, this.text.value].filter(Boolean).join("\n");
    this.fit();
    if (texts.length) this.text.focus();
  }

  private setRunning(controller: AbortController | null) {
    this.running = controller;
    this.log.setAttribute("aria-busy", String(Boolean(controller)));  // screen readers read an answer once it is complete
    if (controller) for (const node of this.log.querySelectorAll(".regenerate")) node.remove();
    this.showButtons();
  }

  private showButtons() {
    this.stopButton.hidden = !this.running;
    this.sendButton.hidden = Boolean(this.running) && !this.text.value.trim();
  }

  // ---- answers ----

  private async answer() {
    const mine = new AbortController(), conversation = this.messages;
    this.setRunning(mine);
    const failure = await this.answerAll(conversation, mine.signal);
    if (this.running !== mine) return;
    this.setRunning(null);
    if (failure) this.giveUp(conversation, failure);
    this.sendNext();
  }

  /** Request answers and run their tool calls until an answer has none. Return the error, if any. */
  private async answerAll(conversation: Message[], signal: AbortSignal): Promise<Error | null> {
    const numBefore = conversation.length;
    for (let round = 0; round <= MAX_ROUNDS; round++) {
      const view = new AnswerView(), answer = new Answer(view);
      this.log.append(view.root);
      this.scrollDown();
      try {
        const response = await call("v1/chat/completions", this.body(conversation), signal);
        for await (const event of events<ChatEvent>(response)) this.following(() => answer.add(event));
      } catch (error) {
        if (!(error instanceof Failure) && !isAbort(error)) throw error;
        const isStopped = isAbort(error);
        if (answer.content) conversation.push({ role: "assistant", content: answer.content });
        this.following(() => view.end(isStopped ? "stopped" : (error as Error).message, {
          isError: !isStopped, requestId: answer.requestId, actions: isStopped && answer.content ? [this.regenerateButton(numBefore)] : [] }));
        return error as Error;
      }
      conversation.push(answer.message());
      for (const [index, { id, function: { name, arguments: text } }] of answer.calls.entries()) {
        const content = resultOf(name, text);
        view.showResult(index, content);
        conversation.push({ role: "tool", tool_call_id: id, content });
      }
      const isLast = !answer.calls.length || round === MAX_ROUNDS;
      const note = answer.calls.length && isLast ? ` · stopped after ${MAX_ROUNDS} rounds of tool calls` : "";
      this.following(() => view.end(answer.figures() + note, {
        requestId: answer.requestId, actions: isLast ? [this.regenerateButton(numBefore)] : [] }));
      if (isLast) return null;
    }
    return null;
  }

  /** A button that answers the last question again. */
  private regenerateButton(numBefore: number): HTMLElement {
    const conversation = this.messages;
    return make("button", { type: "button", class: "regenerate", onclick: () => {
      if (this.running || this.messages !== conversation) return;
      conversation.length = numBefore;
      while (this.log.lastElementChild?.matches(".assistant")) this.log.lastElementChild.remove();
      void this.answer();
    } }, "Regenerate");
  }

  private giveUp(conversation: Message[], error: Error) {
    const unanswered = conversation.at(-1)!.role === "user" ? [conversation.pop()!.content] : [];
    this.restore([...unanswered, ...this.queue.splice(0)]);
    this.showQueue();
    const code = error instanceof Failure ? error.code : "";
    if (code === "tools_unavailable") {
      this.tools.open = true;
      this.allowTools(error.message.replace("tools are given, but ", ""));
    }
    if (code in KEY_ERRORS) server.requireKey();
    if (code === "no_answer" || code === "loading") void server.connect();
    if (code === "shutting_down") server.reconnectLater();
    this.scrollDown();
  }

  private body(conversation: Message[]) {
    const system = this.system.value.trim(), tools = this.chosenTools();
    return {
      messages: system ? [{ role: "system", content: system }, ...conversation] : conversation,
      stream: true, stream_options: { include_usage: true },
      ...(tools.length && { tools }),
      ...(!this.thinkSwitch.hidden && thinking(this.think.checked)),
      ...(this.temperature.value !== "" && { temperature: Number(this.temperature.value) }),
      ...(this.maxTokens.value !== "" && { max_completion_tokens: Number(this.maxTokens.value) }),
    };
  }

  // ---- what the model supports ----

  private async connected() {
    this.isConnected = false;
    await this.askTemplate().catch(() => {});  // without a template, the error comes with the first question
    this.sendNext();
  }

  /** A template that supports thinking or tools renders a different prompt with them. */
  private async askTemplate() {
    this.allowTools();
    const prompt = async (extra: object) =>
      String((await callJson<{ tokens: number[] }>("tokenize", { messages: [{ role: "user", content: "Hello" }], ...extra })).tokens);
    const plain = await prompt({}), thinks = await prompt(thinking(true));
    const isKnown = thinks !== plain || (await prompt(thinking(false))) !== plain;
    this.thinkSwitch.hidden = !isKnown;
    this.think.checked = isKnown && thinks === plain;
    if ((await prompt({ tools: TOY_TOOLS.map(described) })) === plain) this.allowTools("its chat template does not support tools.");
  }

  private chosenTools() {
    const names = this.toolBoxes.filter((box) => box.checked && !box.disabled).map((box) => box.value);
    return TOY_TOOLS.filter((tool) => names.includes(tool.name)).map(described);
  }

  private countTools() {
    const number = this.chosenTools().length;
    this.toolsOn.textContent = number ? ` · ${number} on` : "";
  }

  /** Enable the switches, or disable them and show the reason. */
  private allowTools(reason = "") {
    this.toolsNote.textContent = reason ? `This model cannot call tools: ${reason}` : TOOLS_NOTE;
    this.toolsNote.classList.toggle("error", Boolean(reason));
    for (const box of this.toolBoxes) box.disabled = Boolean(reason);
    this.countTools();
  }

  // ---- layout ----

  private fit() {
    this.text.style.height = "auto";
    this.text.style.height = `${this.text.scrollHeight}px`;
    this.showButtons();
  }

  private scrollDown() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  /** Make a change, and follow the end of the log unless the reader has scrolled up. */
  private following(change: () => void) {
    const { scrollHeight, scrollTop, clientHeight } = this.scroll;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < 80;
    change();
    if (isAtEnd) requestAnimationFrame(() => this.scrollDown());
  }
}
