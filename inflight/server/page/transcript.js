// The conversation as it is seen.

function element(tag, kind, text = "") {
  const found = document.createElement(tag);
  found.className = kind;
  found.textContent = text;
  return found;
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

// Whoever has scrolled up to read stays there.
function following(change) {
  const { scrollHeight, scrollTop, clientHeight } = $("scroll");
  change();
  if (scrollHeight - scrollTop - clientHeight < 80) scrollDown();
}

// One answer while it comes: thoughts, content and calls, each from its first piece on.
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

  // Thoughts are put away once there is something else, unless the reader has opened or closed them.
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
      const call = element("div", "call"), given = element("span", "arguments");
      call.append(element("span", "name", name), " ", given);
      this.root.append(call);
      this.calls.push({ call, given });
    });
  }

  addArguments(index, piece) {
    following(() => this.calls[index].given.append(piece));
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
