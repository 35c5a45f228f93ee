// The page with the KV blocks of an engine.

import { callJson, Failure, KEY_ERRORS } from "./api";
import { make } from "./dom";
import { count, percent } from "./format";
import { Polling, type Page } from "./page";
import { server } from "./server";

const REFRESH_MS = 1000;

interface Memory {
  replica: string; block_size: number; num_blocks: number; map: [state: number, count: number][];
  hit_rate: number; queries: number; hits: number; preemptions: number; evict_next: number[];
  groups: Record<string, number>;
}

export class MemoryPage implements Page {
  readonly title = "Memory";
  private readonly figures = make("dl", { class: "figures-grid" });
  private readonly canvas = make("canvas", { id: "blocks", role: "img" });
  private readonly notice = make("p", { id: "memory-notice", role: "status" });
  private readonly next = make("p", { id: "evict-next" });
  private readonly choice = make("select", { id: "memory-replica", "aria-label": "Replica", hidden: true, onchange: () => this.polling.start() });
  private readonly legend = make("ul", { class: "legend", "aria-label": "Legend" },
    ...["free", "cached", "used", "shared", "next"].map((kind) => make("li", {}, make("span", { class: `swatch block-${kind}` }),
      { free: "free", cached: "cached, not in use", used: "in use", shared: "in use by several requests", next: "evicted next" }[kind]!)));
  readonly root = make("section", { class: "text-page wide" }, this.notice, this.choice, this.figures, this.canvas, this.legend, this.next);
  private readonly polling = new Polling(() => this.refresh(), REFRESH_MS);
  private replica = "";
  private last: Memory | null = null;

  constructor() {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.last && this.update(this.last));
  }

  show(query: URLSearchParams) {
    this.replica = query.get("replica") ?? this.replica;
    void this.listReplicas();
    this.polling.start();
  }

  hide() {
    this.polling.stop();
  }

  private async listReplicas() {
    const { data } = await callJson<{ data: { id: string }[] }>("v1/replicas").catch(() => ({ data: [] }));
    this.choice.hidden = data.length < 2;
    this.choice.replaceChildren(...data.map(({ id }) => make("option", { value: id, selected: id === this.replica }, `Replica ${id}`)));
  }

  private async refresh() {
    const replica = this.choice.hidden ? this.replica : this.choice.value;
    try {
      this.update(await callJson<Memory>(`v1/memory${replica ? `?replica=${encodeURIComponent(replica)}` : ""}`));
      this.notice.textContent = "";
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      this.notice.textContent = error.message;
      if (error.code in KEY_ERRORS) server.requireKey();
    }
  }

  private update(memory: Memory) {
    this.last = memory;
    const states = expand(memory.map, memory.num_blocks), next = new Set(memory.evict_next);
    const total = (test: (state: number) => boolean) => states.reduce((sum, state) => sum + Number(test(state)), 0);
    const free = total((state) => state < 0), cached = total((state) => state === 0), shared = total((state) => state > 1);
    const rows: [string, string][] = [
      ["Blocks", `${count(memory.num_blocks)} of ${memory.block_size} tokens`], ["In use", count(memory.num_blocks - free - cached)],
      ["Shared", count(shared)], ["Cached", count(cached)], ["Free", count(free)],
      ["Prefix cache hit rate", memory.queries ? `${percent(memory.hit_rate)} of ${count(memory.queries)} tokens` : "–"],
      ["Preemptions", count(memory.preemptions)],
      ...Object.entries(memory.groups).map(([name, number]): [string, string] => [groupTitle(name), count(number)]),
    ];
    this.figures.replaceChildren(...rows.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, value))));
    this.next.textContent = memory.evict_next.length ? `Next to be evicted: blocks ${memory.evict_next.slice(0, 16).join(", ")}${memory.evict_next.length > 16 ? ", …" : ""}` : "";
    this.canvas.setAttribute("aria-label", rows.map(([term, value]) => `${term}: ${value}`).join("; "));
    this.draw(states, next);
  }

  private draw(states: Int32Array, next: Set<number>) {
    const width = this.canvas.parentElement!.clientWidth - 2, ratio = devicePixelRatio || 1;
    const size = Math.max(2, Math.min(16, Math.floor(Math.sqrt((width * 420) / Math.max(1, states.length)))));
    const columns = Math.max(1, Math.floor(width / size)), height = Math.ceil(states.length / columns) * size;
    [this.canvas.width, this.canvas.height] = [width * ratio, height * ratio];
    [this.canvas.style.width, this.canvas.style.height] = [`${width}px`, `${height}px`];
    const context = this.canvas.getContext("2d")!, style = getComputedStyle(this.root), gap = size > 4 ? 1 : 0;
    const color = (name: string) => style.getPropertyValue(`--block-${name}`).trim();
    const colors = { free: color("free"), cached: color("cached"), used: color("used"), shared: color("shared"), next: color("next") };
    context.scale(ratio, ratio);
    for (let block = 0; block < states.length; block++) {
      const state = states[block]!, x = (block % columns) * size, y = Math.floor(block / columns) * size;
      context.fillStyle = state < 0 ? colors.free : state === 0 ? colors.cached : state === 1 ? colors.used : colors.shared;
      context.fillRect(x, y, size - gap, size - gap);
      if (next.has(block)) {
        context.fillStyle = colors.next;
        context.fillRect(x + size / 4, y + size / 4, size / 2 - gap, size / 2 - gap);
      }
      if (state > 1 && size >= 12) {
        context.fillStyle = "#fff";
        context.font = `${size - 6}px ui-monospace, monospace`;
        context.fillText(String(Math.min(99, state)), x + 2, y + size - 5);
      }
    }
  }
}

/** The title of a KV group, by what its layers keep: "all tokens", "window 1024" or "snapshots", which nobody holds. */
export function groupTitle(name: string): string {
  return name === "snapshots" ? "Cached, snapshots" : `In use, ${name}`;
}

/** The state of every block: -1 free, 0 cached, n in use by n requests. */
export function expand(map: [number, number][], numBlocks: number): Int32Array {
  const states = new Int32Array(numBlocks).fill(-1);
  let at = 0;
  for (const [state, number] of map) states.fill(state, at, (at += number));
  return states;
}
