// Accumulates the events of a streamed answer.
class Answer {
  constructor(view) {
    this.view = view;
    this.content = this.reasoning = this.reason = "";
    this.calls = [];
    this.started = performance.now();
    this.first = 0;
    this.usage = null;
  }

  add(event) {
    this.usage = event.usage ?? this.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { reasoning_content: thought, content, tool_calls: calls } = choice.delta;
    this.reason = choice.finish_reason ?? this.reason;
    if (thought || content || calls) this.first ||= performance.now();
    if (thought) { this.reasoning += thought; this.view.think(thought); }
    if (content) { this.content += content; this.view.say(content); }
    for (const piece of calls ?? []) this.addCall(piece);
  }

  addCall({ index, id, function: { name, arguments: piece } }) {
    if (id) {
      this.calls.push({ id, type: "function", function: { name, arguments: "" } });
      this.view.beginCall(name);
    }
    this.calls[index].function.arguments += piece;
    this.view.addArguments(index, piece);
  }

  // The message to send back with the next question.
  message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) message.tool_calls = this.calls;
    return message;
  }

  figures() {
    const parts = [], { usage, first } = this, seconds = (performance.now() - first) / 1000;
    if (first) parts.push("first token " + Math.round(first - this.started) + " ms");
    if (usage) {
      const number = usage.completion_tokens, cached = usage.prompt_tokens_details.cached_tokens;
      parts.push(number + " tokens");
      if (first && number > 1 && seconds > 0)
        parts.push(Math.round((number - 1) / seconds).toLocaleString() + " tokens/s");
      if (cached) parts.push(cached + " of " + usage.prompt_tokens + " prompt tokens cached");
    }
    if (this.reason === "length") parts.push("maximum length reached");
    if (this.reason === "abort") parts.push("stopped by the server");
    return parts.join(" · ");
  }
}
