// Shows the conversation.

function element(tag, kind, text = "") {
  const node = document.createElement(tag);
  node.className = kind;
  node.textContent = text;
  return node;
}

function showUser(text) {
  $("empty")?.remove();
  const shown = element("div", "message user", text);
  $("log").append(shown);
  scrollDown();
  return shown;
}

function scrollDown() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

// Follows the end of the log unless the reader has scrolled up.
function following(change) {
  const { scrollHeight, scrollTop, clientHeight } = $("scroll");
  change();
  if (scrollHeight - scrollTop - clientHeight < 80) scrollDown();
}

// One streaming answer: its reasoning, content and tool calls, each shown from its first piece.
class AnswerView {
  constructor() {
    this.root = element("div", "message assistant waiting");
    this.calls = [];
    $("log").append(this.root);
    scrollDown();
  }

  think(piece) {
    following(() => {
      if (!this.thoughts) this.openThoughts();
      this.thoughts.append(piece);
    });
  }

  openThoughts() {
    this.thinking = element("details", "thinking");
    this.thinking.open = true;
    this.summary = element("summary", "", "Thinking");
    this.summary.onclick = () => { this.touched = true; };
    this.thoughts = element("div", "");
    this.thinking.append(this.summary, this.thoughts);
    this.root.append(this.thinking);
    this.began = performance.now();
  }

  // Folds the reasoning once something else follows, unless the reader has opened or closed it.
  endThoughts() {
    if (!this.began) return;
    this.summary.textContent = `Thought for ${((performance.now() - this.began) / 1000).toFixed(1)} s`;
    if (!this.touched) this.thinking.open = false;
    this.began = 0;
  }

  say(piece) {
    following(() => {
      this.endThoughts();
      if (!this.content) this.root.append(this.content = element("div", "content"));
      this.content.append(piece);
    });
  }

  beginCall(name) {
    following(() => {
      this.endThoughts();
      const call = element("div", "call"), args = element("span", "arguments");
      call.append(element("span", "name", name), " ", args);
      this.root.append(call);
      this.calls.push({ call, args });
    });
  }

  addArguments(index, piece) {
    following(() => this.calls[index].args.append(piece));
  }

  showResult(index, text) {
    following(() => this.calls[index].call.append(element("div", "result", text)));
  }

  end(note, isError = false) {
    this.endThoughts();
    this.root.classList.remove("waiting");
    this.root.append(element("div", isError ? "figures error" : "figures", note));
    scrollDown();
  }
}
