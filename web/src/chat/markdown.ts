// Markdown as elements. Everything is built from text nodes, so an answer cannot inject markup; links keep only http(s).

import { make } from "../dom";

/** The blocks of a text: paragraphs, headings, lists, tables, quotes, rules and fenced code, as their source. */
export function splitBlocks(text: string): string[] {
  const blocks: string[] = [];
  let lines: string[] = [], fence = "";
  const end = () => {
    if (lines.some((line) => line.trim())) blocks.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = /^\s{0,3}(`{3,}|~{3,})/.exec(line)?.[1];
    if (fence) {
      lines.push(line);
      if (mark && mark[0] === fence[0] && mark.length >= fence.length && line.trim() === mark) {
        fence = "";
        end();
      }
    } else if (mark) {
      end();
      fence = mark;
      lines.push(line);
    } else if (!line.trim()) {
      // A blank line does not end a list whose next item or continuation follows; that is decided when more arrives.
      if (lines.length && isListLine(lines[0]!)) lines.push(line);
      else end();
    } else {
      const previous = lines.at(-1);
      const leavesList = previous !== undefined && !previous.trim() && !isListLine(line) && !/^\s{2,}/.test(line);
      if (leavesList || isHeading(line) || isRule(line) || (previous !== undefined && isHeading(previous))) end();
      lines.push(line);
    }
  }
  end();
  return blocks;
}

const isHeading = (line: string) => /^#{1,6}\s/.test(line);
const isRule = (line: string) => /^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(line);
const isListLine = (line: string) => /^\s*([-*+]|\d{1,9}[.)])\s/.test(line) && !isRule(line);

export function renderBlock(source: string): HTMLElement {
  const lines = source.replace(/\n+$/, "").split("\n"), first = lines[0]!;
  if (/^\s{0,3}(```|~~~)/.test(first)) return renderCode(lines);
  if (isHeading(first)) {
    const [, marks, title] = /^(#+)\s+(.*?)\s*#*$/.exec(first)!;
    return make(`h${Math.min(6, marks!.length + 2)}` as "h3", {}, ...renderInline(title!));
  }
  if (isRule(first) && lines.length === 1) return make("hr");
  if (lines.every((line) => /^\s*>/.test(line)))
    return make("blockquote", {}, ...splitBlocks(lines.map((line) => line.replace(/^\s*> ?/, "")).join("\n")).map(renderBlock));
  if (lines.length >= 2 && first.includes("|") && /^[\s|:-]+$/.test(lines[1]!) && lines[1]!.includes("-"))
    return renderTable(lines);
  if (isListLine(first)) return renderList(lines);
  return make("p", {}, ...renderInline(lines.join("\n")));
}

function renderCode(lines: string[]): HTMLElement {
  const language = lines[0]!.replace(/^\s*[`~]+/, "").trim().split(/\s/)[0]!;
  const isClosed = lines.length > 1 && /^\s{0,3}(`{3,}|~{3,})\s*$/.test(lines.at(-1)!);
  const code = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const copy = make("button", { type: "button", class: "copy", onclick: async () => {
    await navigator.clipboard?.writeText(code);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  } }, "Copy");
  return make("div", { class: "code" }, make("div", { class: "code-head" }, make("span", {}, language), copy),
    make("pre", { tabindex: 0 }, make("code", {}, code)));
}

function renderTable(lines: string[]): HTMLElement {
  const cells = (line: string) =>
    line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const row = (line: string, tag: "td" | "th") => make("tr", {}, ...cells(line).map((cell) => make(tag, {}, ...renderInline(cell))));
  return make("div", { class: "table", tabindex: 0 }, make("table", {},
    make("thead", {}, row(lines[0]!, "th")), make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")))));
}

function renderList(lines: string[]): HTMLElement {
  const indent = (line: string) => /^\s*/.exec(line)![0].length;
  const base = indent(lines[0]!), number = /^\s*(\d+)[.)]/.exec(lines[0]!)?.[1];
  const list = number === undefined ? make("ul") : make("ol", { start: number });
  let item: string[] = [];
  const end = () => {
    if (!item.length) return;
    const body = item.join("\n").replace(/\n+$/, ""), [head = "", ...rest] = splitItem(body);
    list.append(make("li", {}, ...renderInline(head), ...rest.flatMap((part) => splitBlocks(part)).map(renderBlock)));
    item = [];
  };
  for (const line of lines) {
    if (line.trim() && indent(line) <= base && isListLine(line)) {
      end();
      item = [line.replace(/^\s*([-*+]|\d+[.)])\s+/, "")];
    } else item.push(line.slice(Math.min(indent(line), base + 2)));
  }
  end();
  return list;
}

/** The first paragraph of a list item, and what follows it: nested lists, code, further paragraphs. */
function splitItem(body: string): string[] {
  const lines = body.split("\n");
  const cut = lines.findIndex((line, index) => index > 0 && (!line.trim() || isListLine(line) || /^\s*(```|~~~)/.test(line)));
  return cut < 0 ? [body] : [lines.slice(0, cut).join("\n"), lines.slice(cut).join("\n")];
}

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]+?\S)\*\*|__(?=\S)([\s\S]+?\S)__(?!\w)|(?<![\w*])\*(?=[^\s*])([^*]*?[^\s*])\*|(?<!\w)_(?=[^\s_])([^_]*?[^\s_])_(?!\w)|~~(?=\S)([\s\S]+?\S)~~|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>()]*[^\s<>().,;:!?'"])|\\([\\`*_{}[\]()#+\-.!|~>])/;

/** Emphasis, code and links of one paragraph. */
export function renderInline(text: string): (Node | string)[] {
  const parts: (Node | string)[] = [];
  for (let rest = text; rest;) {
    const match = INLINE.exec(rest);
    if (!match) {
      parts.push(rest);
      break;
    }
    if (match.index) parts.push(rest.slice(0, match.index));
    rest = rest.slice(match.index + match[0].length);
    const [, , code, bold, alsoBold, italic, alsoItalic, struck, label, target, bare, escaped] = match;
    if (code !== undefined) parts.push(make("code", {}, code.replace(/^ (.*\S.*) $/, "$1")));
    else if (bold ?? alsoBold) parts.push(make("strong", {}, ...renderInline((bold ?? alsoBold)!)));
    else if (italic ?? alsoItalic) parts.push(make("em", {}, ...renderInline((italic ?? alsoItalic)!)));
    else if (struck) parts.push(make("s", {}, ...renderInline(struck)));
    else if (escaped) parts.push(escaped);
    else {
      const href = (target ?? bare)!;
      parts.push(make("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...(label ? renderInline(label) : [href])));
    }
  }
  return parts;
}

/** Shows a text that grows: only the blocks that changed are built again. */
export class MarkdownView {
  readonly root = make("div", { class: "content" });
  private text = "";
  private sources: string[] = [];
  private frame = 0;

  append(piece: string) {
    this.text += piece;
    this.frame ||= requestAnimationFrame(() => this.update());
  }

  update() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const sources = splitBlocks(this.text);
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same++;
    while (this.root.children.length > same) this.root.lastElementChild!.remove();
    this.root.append(...sources.slice(same).map(renderBlock));
    this.sources = sources;
  }
}
