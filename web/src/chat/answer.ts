// Accumulates the events of a streamed answer.

import type { AnswerView } from "./view";

export interface ToolCall { id: string; type: "function"; function: { name: string; arguments: string } }
export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  content: string;
  reasoning_content?: string;
  tool_calls?: ToolCall[];
  tool_call_id?: string;
}

interface CallDelta { index: number; id?: string; function: { name?: string; arguments?: string } }
interface Usage { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens: number } }
export interface ChatEvent {
  id?: string;
  usage?: Usage | null;
  choices: { delta: { reasoning_content?: string; content?: string; tool_calls?: CallDelta[] }; finish_reason?: string | null }[];
}

export class Answer {
  content = "";
  reasoning = "";
  readonly calls: ToolCall[] = [];
  requestId = "";
  private finishReason = "";
  private readonly startedAt = performance.now();
  private firstAt = 0;
  private usage: Usage | null = null;

  constructor(private readonly view: AnswerView) {}

  add(event: ChatEvent) {
    this.requestId ||= event.id ?? "";
    this.usage = event.usage ?? this.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { reasoning_content: thought, content, tool_calls: calls } = choice.delta;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    if (thought || content || calls) this.firstAt ||= performance.now();
    if (thought) { this.reasoning += thought; this.view.think(thought); }
    if (content) { this.content += content; this.view.say(content); }
    for (const piece of calls ?? []) this.addCall(piece);
  }

  private addCall({ index, id, function: { name = "", arguments: piece = "" } }: CallDelta) {
    if (id) {
      this.calls.push({ id, type: "function", function: { name, arguments: "" } });
      this.view.beginCall(name);
    }
    this.calls[index]!.function.arguments += piece;
    this.view.addArguments(index, piece);
  }

  /** The message to send back with the next question. */
  message(): Message {
    return {
      role: "assistant", content: this.content,
      ...(this.reasoning && { reasoning_content: this.reasoning }),
      ...(this.calls.length && { tool_calls: this.calls }),
    };
  }

  figures(): string {
    const parts: string[] = [], seconds = (performance.now() - this.firstAt) / 1000;
    if (this.firstAt) parts.push(`first token ${Math.round(this.firstAt - this.startedAt)} ms`);
    if (this.usage) {
      const number = this.usage.completion_tokens, cached = this.usage.prompt_tokens_details?.cached_tokens;
      parts.push(`${number} tokens`);
      if (this.firstAt && number > 1 && seconds > 0) parts.push(`${Math.round((number - 1) / seconds).toLocaleString("en")} tokens/s`);
      if (cached) parts.push(`${cached} of ${this.usage.prompt_tokens} prompt tokens cached`);
    }
    if (this.finishReason === "length") parts.push("maximum length reached");
    if (this.finishReason === "abort") parts.push("stopped by the server");
    return parts.join(" · ");
  }
}
