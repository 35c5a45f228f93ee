// The elements of one answer while it streams: its reasoning, content and tool calls, each shown from its first piece.

import { make } from "../dom";
import { MarkdownView } from "./markdown";

export class AnswerView {
  readonly root = make("div", { class: "message assistant waiting" });
  private calls: { call: HTMLElement; args: HTMLElement }[] = [];
  private content: MarkdownView | null = null;
  private thinking: { details: HTMLDetailsElement; summary: HTMLElement; text: HTMLElement; isTouched: boolean } | null = null;
  private thinkingSince = 0;

  think(piece: string) {
    if (!this.thinking) {
      const summary = make("summary", { onclick: () => { this.thinking!.isTouched = true; } }, "Thinking");
      const text = make("div"), details = make("details", { class: "thinking", open: true }, summary, text);
      this.thinking = { details, summary, text, isTouched: false };
      this.root.append(details);
      this.thinkingSince = performance.now();
    }
    this.thinking.text.append(piece);
  }

  /** Fold the reasoning once something else follows, unless the reader has opened or closed it. */
  private endThinking() {
    if (!this.thinking || !this.thinkingSince) return;
    this.thinking.summary.textContent = `Thought for ${((performance.now() - this.thinkingSince) / 1000).toFixed(1)} s`;
    if (!this.thinking.isTouched) this.thinking.details.open = false;
    this.thinkingSince = 0;
  }

  say(piece: string) {
    this.endThinking();
    if (!this.content) this.root.append((this.content = new MarkdownView()).root);
    this.content.append(piece);
  }

  beginCall(name: string) {
    this.endThinking();
    const args = make("span", { class: "arguments" });
    const call = make("div", { class: "call" }, make("span", { class: "name" }, name), " ", args);
    this.root.append(call);
    this.calls.push({ call, args });
    this.content = null;
  }

  addArguments(index: number, piece: string) {
    this.calls[index]?.args.append(piece);
  }

  showResult(index: number, text: string) {
    this.calls[index]?.call.append(make("div", { class: "result" }, text));
  }

  /** Show the end: figures or an error, a link to the request's timeline, and what can be done. */
  end(note: string, options: { isError?: boolean; requestId?: string; actions?: HTMLElement[] } = {}) {
    this.endThinking();
    this.content?.update();
    this.root.classList.remove("waiting");
    const link = options.requestId &&
      make("a", { href: `requests?id=${encodeURIComponent(options.requestId)}`, "data-page": true }, "Why this long?");
    this.root.append(make("div", { class: options.isError ? "figures error" : "figures", ...(options.isError && { role: "alert" }) }, note));
    if (link || options.actions?.length) this.root.append(make("div", { class: "actions" }, link, ...(options.actions ?? [])));
  }
}
