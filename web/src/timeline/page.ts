// The timeline: what every slot did in every step, live, with controls to look back.

import { make } from "../dom";
import { count, duration, timeOfDay } from "../format";
import type { Page } from "../page";
import { access } from "../api";
import { layOut, Painter, type Focus, type Lanes, type Theme, type View } from "./draw";
import { Feed } from "./feed";
import type { Recording } from "./recording";
import { draftedAt, Kind, Replica, Store, tokenAt, type Run } from "./store";

const DEFAULT_SECONDS = 10, MAX_SECONDS = 600, MIN_SECONDS = 20e-6;
const LIVE_DELAY = 0.15;  // seconds that the live view lags behind, so that it moves smoothly
const SLOW_UPDATE_MS = 250;
const AXIS_HEIGHT = 22, OVERVIEW_HEIGHT = 30;
const COMPARED_HEIGHT = 230;  // of each strategy in a comparison
const LEGEND: [kind: string, text: string][] = [["decode", "decode (one colour per request)"], ["prefill", "prompt chunk"], ["held", "held idle"],
  ["cached", "cached prefix skipped"], ["preempted", "preempted"],
  ["others", "others’ requests"]];
const KINDS = { [Kind.Decode]: "decode", [Kind.Prefill]: "prompt", [Kind.Held]: "held idle" };

export class TimelinePage implements Page {
  readonly title = "Timeline";
  readonly store = new Store();
  private readonly feed = new Feed(this.store);

  private readonly pauseButton = make("button", { type: "button", id: "pause", onclick: () => this.setLive(!this.isLive) }, "Pause");
  private readonly keyFilter = make("select", { id: "key-filter", "aria-label": "Show requests of",
    onchange: () => { this.focus.key = this.keyFilter.value || null; } }, make("option", { value: "" }, "All keys"));
  private readonly unfollow = make("button", { type: "button", id: "unfollow", hidden: true, onclick: () => this.follow(null, null) }, "Stop following");
  private readonly span = make("span", { id: "span", class: "figure" });
  private readonly canvas = make("canvas", { id: "lanes", tabindex: 0, role: "application",
    "aria-label": "Slots over time. Arrow keys move by one step and one slot, plus and minus zoom, space pauses, Enter follows the request." });
  private readonly overview = make("canvas", { id: "overview", role: "slider", tabindex: 0, "aria-label": "Moment shown", "aria-valuemin": 0, "aria-valuemax": 100 });
  private readonly empty = make("p", { id: "timeline-empty" }, "No steps yet: send a request, and they appear here.");
  private readonly detail = make("div", { id: "detail", role: "status" });
  private readonly scroller = make("div", { id: "lanes-scroll" }, this.canvas);
  readonly root = make("section", { id: "timeline" },
    make("div", { class: "toolbar", role: "toolbar", "aria-label": "Timeline" },
      this.pauseButton,
      make("button", { type: "button", id: "zoom-in", title: "Zoom in (+)", "aria-label": "Zoom in", onclick: () => this.zoom(0.5) }, "+"),
      make("button", { type: "button", id: "zoom-out", title: "Zoom out (-)", "aria-label": "Zoom out", onclick: () => this.zoom(2) }, "−"),
      this.span,
      make("button", { type: "button", id: "slowest-step", onclick: () => this.jumpToSlowestStep() }, "Slowest step"),
      make("button", { type: "button", id: "slowest-request", onclick: () => this.jumpToSlowestRequest() }, "Slowest request"),
      this.keyFilter, this.unfollow,
      make("button", { type: "button", id: "save-trace", onclick: () => void this.saveTrace() }, "Save trace")),
    this.empty, this.scroller, this.overview, this.detail);

  private view: View = { from: 0, seconds: DEFAULT_SECONDS };
  private isLive = true;
  private isShown = false;
  private focus: Focus = { request: null, replica: null, key: null, slot: null, step: null };
  private only: string | null = null;  // the one replica to show
  private wanted: { replica: string; request: number } | null = null;  // to follow once its runs are known
  private lanes = new Map<string, Lanes>();
  private theme: Theme | null = null;
  private readonly painter: Painter;
  private detailKey = "";
  private slowUpdateAt = 0;

  constructor(private readonly recording: Recording | null = null) {
    this.painter = new Painter(this.canvas.getContext("2d")!);
    this.root.append(legend(this.comparison?.legend ?? LEGEND));
    for (const chunk of recording?.chunks ?? []) this.store.add(chunk);
    if (recording) {
      for (const id of ["#save-trace", "#pause"]) this.root.querySelector(id)?.remove();
      this.span.after(make("button", { type: "button", id: "show-all", onclick: () => this.showAll() }, "Show all"));
    }
    for (const id of this.comparison?.padded ?? []) this.store.replicas.get(id)!.isPadded = true;
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.onPointerDown(event));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.overview.addEventListener("pointerdown", (event) => this.onScrub(event));
    this.overview.addEventListener("keydown", (event) => this.onOverviewKey(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.theme = null; });
  }

  show(query: URLSearchParams) {
    this.only = query.get("replica");
    const request = query.get("request");
    if (request !== null) this.wanted = { replica: this.only ?? "", request: Number(request) };
    if (!this.recording) this.feed.start();
    else this.showAll(this.comparison?.seconds);
    if (this.isShown) return;
    this.isShown = true;
    requestAnimationFrame(() => this.frame());
  }

  hide() {
    this.isShown = false;
    this.feed.stop();  // the server stops sending when no page watches; the past is fetched when the page is opened again
  }

  // ---- frames ----

  private frame() {
    if (!this.isShown) return;
    const range = this.store.range();
    if (this.wanted) this.followWanted();
    if (range && this.isLive) {
      const target = range[1] - this.view.seconds * 0.97;
      const now = Date.now() / 1000 - LIVE_DELAY - this.view.seconds * 0.97;
      // Between messages the view moves on with the clock, but never far beyond what is known.
      this.view.from = Math.min(Math.max(target, Math.min(now, target + 0.3)), target + 0.3);
    }
    this.paint(range);
    requestAnimationFrame(() => this.frame());
  }

  private get comparison() {
    return this.recording?.comparison;
  }

  private replicas(): Replica[] {
    const all = [...this.store.replicas.values()];
    if (!this.comparison) all.sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
    return this.only !== null && all.some((replica) => replica.id === this.only) ? all.filter((replica) => replica.id === this.only) : all;
  }

  private paint(range: [number, number] | null) {
    const theme = (this.theme ??= readTheme(this.root)), replicas = this.replicas();
    this.empty.hidden = range !== null;
    this.scroller.hidden = this.overview.hidden = range === null;
    this.empty.textContent = this.feed.problem || "No steps yet: send a request, and they appear here.";
    this.span.textContent = `${duration(this.view.seconds)} wide`;
    this.pauseButton.textContent = this.isLive ? "Pause" : "Live";
    if (!range) return;
    const isDue = performance.now() - this.slowUpdateAt > SLOW_UPDATE_MS;  // what changes little is drawn less often
    if (isDue) this.slowUpdateAt = performance.now();
    if (isDue) this.updateKeys(replicas);
    const width = this.scroller.clientWidth, slotsOnly = this.comparison !== undefined;
    const available = slotsOnly ? COMPARED_HEIGHT : Math.max(240, this.scroller.clientHeight - AXIS_HEIGHT);
    let top = 0;
    this.lanes.clear();
    for (const replica of replicas) {
      const lanes = layOut(replica, top, replicas.length === 1 || slotsOnly ? available : available / Math.min(2, replicas.length), slotsOnly);
      this.lanes.set(replica.id, lanes);
      top += lanes.height;
    }
    const context = fit(this.canvas, width, top + AXIS_HEIGHT);
    context.fillStyle = theme.back;
    context.fillRect(0, 0, width, top + AXIS_HEIGHT);
    for (const replica of replicas) {
      const title = this.comparison?.titles[replica.id] ?? (this.store.replicas.size > 1 ? `Replica ${replica.id}` : "Engine");
      this.painter.paint(replica, this.lanes.get(replica.id)!, this.view, width, theme, this.focus, title);
    }
    this.paintAxis(context, width, top, theme);
    if (isDue || !this.isLive) this.paintOverview(replicas, range, width, theme);
    this.updateDetail();
  }

  private paintAxis(context: CanvasRenderingContext2D, width: number, top: number, theme: Theme) {
    const tick = niceTick((this.view.seconds / width) * 110);
    context.fillStyle = theme.soft;
    context.font = "11px system-ui, sans-serif";
    for (let moment = Math.ceil(this.view.from / tick) * tick; moment < this.view.from + this.view.seconds; moment += tick) {
      const x = ((moment - this.view.from) / this.view.seconds) * width;
      context.fillRect(x, top, 1, 4);
      if (x < width - 80) context.fillText(this.moment(moment, tick), x + 3, top + 14);
    }
  }

  /** A moment as text, as precise as the distance of ticks needs: the time of day or, in a comparison, seconds after the start. */
  private moment(at: number, tick = 0.001): string {
    if (this.comparison) return `${at.toFixed(Math.max(0, -Math.floor(Math.log10(tick))))} s`;
    if (tick >= 1) return timeOfDay(at).slice(0, 8);
    return tick < 0.001 ? `${timeOfDay(at)} +${Math.round((at % 0.001) * 1e6)} µs` : timeOfDay(at);
  }

  /** All that is known, in one strip: the share of slots in use, and the part that is shown. */
  private paintOverview(replicas: Replica[], range: [number, number], width: number, theme: Theme) {
    const context = fit(this.overview, width, OVERVIEW_HEIGHT), seconds = Math.max(range[1] - range[0], 1e-6);
    context.fillStyle = theme.back;
    context.fillRect(0, 0, width, OVERVIEW_HEIGHT);
    context.fillStyle = theme.soft;
    for (let pixel = 0; pixel < width; pixel += 2) {
      let share = 0;
      for (const replica of replicas) {
        const row = replica.rowAt(range[0] + (pixel / width) * seconds);
        const isBusy = row < replica.end && replica.beganAt(row) <= range[0] + ((pixel + 2) / width) * seconds;
        if (isBusy) share = Math.max(share, replica.get("running", row) / Math.max(1, replica.slots));
      }
      if (share) context.fillRect(pixel, OVERVIEW_HEIGHT - Math.max(1, share * (OVERVIEW_HEIGHT - 4)), 2, OVERVIEW_HEIGHT);
    }
    const left = ((this.view.from - range[0]) / seconds) * width, wide = Math.max(3, (this.view.seconds / seconds) * width);
    context.strokeStyle = theme.accent;
    context.lineWidth = 2;
    context.strokeRect(Math.max(1, left), 1, Math.min(wide, width - 2 - Math.max(0, left)), OVERVIEW_HEIGHT - 2);
    this.overview.setAttribute("aria-valuenow", String(Math.round(Math.min(1, Math.max(0, left / width)) * 100)));
    this.overview.setAttribute("aria-valuetext", this.moment(this.view.from));
  }

  // ---- the view ----

  private setLive(isLive: boolean) {
    this.isLive = isLive && !this.recording;
  }

  private showAll(seconds?: number) {
    const range = this.store.range();
    this.isLive = false;
    if (!range) return;
    const from = this.comparison ? 0 : range[0];
    this.view = { from, seconds: Math.min(MAX_SECONDS, (seconds ?? range[1] - from) * 1.02) };
  }

  private zoom(factor: number, at = this.isLive ? 1 : 0.5) {
    const seconds = Math.min(MAX_SECONDS, Math.max(MIN_SECONDS, this.view.seconds * factor));
    this.view = { from: this.view.from + at * (this.view.seconds - seconds), seconds };
  }

  private pan(seconds: number) {
    const range = this.store.range();
    this.setLive(false);
    this.view.from += seconds;
    if (range) this.view.from = Math.min(Math.max(this.view.from, range[0] - this.view.seconds / 2), range[1] - this.view.seconds / 2);
  }

  /** Show rows [first, end) of a replica, with a little room around them. */
  private showRows(replica: Replica, first: number, end: number) {
    this.setLive(false);
    const from = replica.beganAt(first), to = replica.endedAt(Math.max(first, end - 1));
    const seconds = Math.min(MAX_SECONDS, Math.max(MIN_SECONDS, (to - from) * 1.3));
    this.view = { from: (from + to - seconds) / 2, seconds };
  }

  private jumpToSlowestStep() {
    let best: [Replica, number] | null = null, longest = -1;
    for (const replica of this.replicas()) {
      const row = replica.slowestRow();
      if (row !== null && replica.get("device", row) > longest) [best, longest] = [[replica, row], replica.get("device", row)];
    }
    if (!best) return;
    const [replica, row] = best;
    this.showRows(replica, Math.max(replica.begin, row - 2), Math.min(replica.end, row + 3));
    this.select(replica, this.busiestSlot(replica, replica.get("step", row)), replica.get("step", row));
  }

  /** The slot that computed most tokens in a step. */
  private busiestSlot(replica: Replica, step: number): number {
    let busiest = 0, most = -1;
    for (let slot = 0; slot < replica.slots; slot++) {
      const tokens = replica.runAt(slot, step)?.tokens ?? -1;
      if (tokens > most) [busiest, most] = [slot, tokens];
    }
    return busiest;
  }

  private jumpToSlowestRequest() {
    for (const replica of this.replicas()) {
      const request = replica.slowestRequest();
      if (request !== null) return this.follow(replica, request);
    }
  }

  private followWanted() {
    const { replica: id, request } = this.wanted!;
    const replica = id ? this.store.replicas.get(id) : this.replicas()[0];
    if (!replica?.runsOf(request).length) return;
    this.wanted = null;
    this.follow(replica, request);
  }

  private follow(replica: Replica | null, request: number | null) {
    this.focus.request = request;
    this.unfollow.hidden = request === null;
    if (!replica || request === null) return;
    this.focus.replica = replica.id;
    const runs = replica.runsOf(request);
    if (!runs.length) return;
    this.showRows(replica, replica.rowOf(runs[0]!.first), replica.rowOf(runs.at(-1)!.end - 1) + 1);
    this.select(replica, runs[0]!.slot, runs[0]!.first);
  }

  private select(replica: Replica, slot: number, step: number) {
    Object.assign(this.focus, { replica: replica.id, slot, step });
  }

  // ---- input ----

  private onWheel(event: WheelEvent) {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      this.pan(((event.deltaX || event.deltaY) / this.canvas.clientWidth) * this.view.seconds);
    } else if (event.ctrlKey || this.scroller.scrollHeight <= this.scroller.clientHeight + 1) {
      this.zoom(Math.exp(event.deltaY / 300), this.isLive ? 1 : event.offsetX / this.canvas.clientWidth);
    } else return;  // the lanes scroll
    event.preventDefault();
  }

  private onPointerDown(event: PointerEvent) {
    const start = { x: event.offsetX, from: this.view.from };
    let isDrag = false;
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.onpointermove = (move) => {
      isDrag ||= Math.abs(move.offsetX - start.x) > 4;
      if (isDrag) this.pan(start.from - ((move.offsetX - start.x) / this.canvas.clientWidth) * this.view.seconds - this.view.from);
    };
    this.canvas.onpointerup = this.canvas.onpointercancel = (up) => {
      this.canvas.onpointermove = this.canvas.onpointerup = null;
      if (!isDrag) this.onClick(up.offsetX, up.offsetY);
    };
  }

  private onClick(x: number, y: number) {
    for (const replica of this.replicas()) {
      const lanes = this.lanes.get(replica.id), slot = lanes ? Math.floor((y - lanes.top) / lanes.slotHeight) : -1;
      if (!lanes || slot < 0 || slot >= lanes.slots) continue;
      const row = replica.rowAt(this.view.from + (x / this.canvas.clientWidth) * this.view.seconds);
      if (row >= replica.end) return;
      this.setLive(false);
      return this.select(replica, slot, replica.get("step", row));
    }
  }

  private onKey(event: KeyboardEvent) {
    const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key], slots = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (steps || slots) this.moveCursor(steps ?? 0, slots ?? 0);
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === " ") this.setLive(!this.isLive);
    else if (event.key === "End") this.setLive(true);
    else if (event.key === "Home") this.pan(-Infinity);
    else if (event.key === "PageUp" || event.key === "PageDown") this.pan(this.view.seconds * (event.key === "PageUp" ? -0.8 : 0.8));
    else if (event.key === "Enter") this.followSelected();
    else if (event.key === "Escape") this.follow(null, null);
    else return;
    event.preventDefault();
  }

  private moveCursor(steps: number, slots: number) {
    this.setLive(false);
    const replica = this.store.replicas.get(this.focus.replica ?? "") ?? this.replicas()[0];
    if (!replica || replica.end === replica.begin) return;
    const middle = replica.rowAt(this.view.from + this.view.seconds / 2);
    const row = this.focus.step === null ? Math.min(middle, replica.end - 1) : replica.rowOf(this.focus.step) + steps;
    const known = Math.min(Math.max(row, replica.begin), replica.end - 1);
    this.select(replica, Math.min(Math.max((this.focus.slot ?? 0) + slots, 0), (this.lanes.get(replica.id)?.slots ?? replica.slots) - 1), replica.get("step", known));
    const at = replica.beganAt(known), { from, seconds } = this.view;
    if (at < from || at > from + seconds) this.view.from = at - seconds / 2;
  }

  private onScrub(event: PointerEvent) {
    const move = (to: PointerEvent) => {
      const range = this.store.range();
      if (!range) return;
      this.setLive(false);
      this.view.from = range[0] + (to.offsetX / this.overview.clientWidth) * (range[1] - range[0]) - this.view.seconds / 2;
    };
    this.overview.setPointerCapture(event.pointerId);
    move(event);
    this.overview.onpointermove = move;
    this.overview.onpointerup = () => { this.overview.onpointermove = null; };
  }

  private onOverviewKey(event: KeyboardEvent) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction) return;
    this.pan(direction * this.view.seconds * 0.5);
    event.preventDefault();
  }

  // ---- what is selected ----

  private followSelected() {
    const replica = this.store.replicas.get(this.focus.replica ?? "");
    const run = replica && this.focus.slot !== null && this.focus.step !== null ? replica.runAt(this.focus.slot, this.focus.step) : null;
    if (replica && run) this.follow(replica, run.request);
  }

  private updateDetail() {
    const { replica: id, slot, step, request } = this.focus;
    const key = `${id} ${slot} ${step} ${request}`;
    if (key === this.detailKey) return;
    this.detailKey = key;
    const replica = this.store.replicas.get(id ?? "");
    if (!replica || slot === null || step === null) return this.detail.replaceChildren();
    const row = replica.rowOf(step);
    if (row >= replica.end) return this.detail.replaceChildren(make("p", {}, `Step ${count(step)} is no longer known.`));
    const run = replica.runAt(slot, step);
    this.detail.replaceChildren(
      make("p", { class: "what" }, run ? this.describe(replica, run, step)
        : replica.isOthers(slot, row) ? "In use by a request of another key." : "This slot was free.",
        run && make("button", { type: "button", onclick: () => this.followSelected() }, "Follow"),
        run && this.requestLink(replica, run.request)),
      make("p", { class: "figure" }, describeStep(replica, row, slot, this.moment(replica.get("at", row)))));
  }

  private describe(replica: Replica, run: Run, step: number): string {
    const { request: number, kind } = run, token = tokenAt(run, step), next = tokenAt(run, step + 1);
    const info = replica.requests.get(number), name = info?.id ? `${info.id}${info.answer ? ` (answer ${info.answer + 1})` : ""}` : `request ${number}`;
    const cached = replica.eventsOf(number).find((event) => event.type === "admit")?.cached;
    const what = kind === Kind.Prefill ? `prompt tokens ${count(token)} to ${count(next - 1)}`
      : kind === Kind.Decode ? `decode, token ${count(token)}${describeDrafts(...draftedAt(run, step))}` : KINDS[kind];
    const prompt = info?.prompt_tokens === undefined ? "" : `; its prompt has ${count(info.prompt_tokens)} tokens${cached ? `, ${count(cached)} of them from the prefix cache` : ""}`;
    return `${name}: ${what}${prompt}${info?.text ? ` — “${info.text}”` : ""} `;
  }

  private requestLink(replica: Replica, number: number): HTMLElement | null {
    const id = replica.requests.get(number)?.id;
    return id && !this.recording ? make("a", { href: `requests?id=${encodeURIComponent(id)}`, "data-page": true }, "Why this long?") : null;
  }

  private updateKeys(replicas: Replica[]) {
    const keys = new Set<string>();
    for (const replica of replicas) for (const info of replica.requests.values()) if (info.key) keys.add(info.key);
    this.keyFilter.hidden = keys.size < 2;
    const known = new Set([...this.keyFilter.options].map((option) => option.value));
    for (const key of keys) if (!known.has(key)) this.keyFilter.append(make("option", { value: key }, key));
  }

  private async saveTrace() {
    const seconds = Math.max(1, Math.ceil(Date.now() / 1000 - this.view.from));
    const response = await fetch(`v1/trace?seconds=${seconds}`, { headers: access.key ? { Authorization: `Bearer ${access.key.trim()}` } : {} });
    if (!response.ok) return this.detail.replaceChildren(make("p", { class: "error" }, `The trace could not be saved: status ${response.status}.`));
    const link = make("a", { href: URL.createObjectURL(await response.blob()), download: "inflight-trace.json.gz" });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

function describeDrafts(accepted: number, refused: number): string {
  return accepted > 0 || refused > 0 ? `; of ${accepted + refused} drafted tokens ${accepted} ${accepted === 1 ? "was" : "were"} accepted` : "";
}

function describeStep(replica: Replica, row: number, slot: number, moment: string): string {
  const get = (column: Parameters<Replica["get"]>[0]) => replica.get(column, row), time = (column: "schedule" | "launch" | "device" | "update") => duration(get(column) / 1e6);
  const failed = replica.failed.get(get("step"));
  return `Step ${count(get("step"))}, slot ${slot}, ${moment}: schedule ${time("schedule")}, launch ${time("launch")}, device ${time("device")}, update ${time("update")}; ` +
    `${count(get("tokens"))} tokens of ${count(replica.budget)}, ${count(get("running"))} running, ${count(get("waiting"))} waiting, ` +
    `${count(get("used"))} of ${count(replica.kv.blocks)} KV blocks in use${failed ? `; it failed: ${failed}` : ""}.`;
}

function legend(entries: [kind: string, text: string][]): HTMLElement {
  const items = entries.map(([kind, text]) => make("li", {}, make("span", { class: `swatch ${kind}` }), text));
  return make("ul", { class: "legend", "aria-label": "Legend" }, ...items);
}

/** Set a canvas to a size in CSS pixels, and return its context scaled to them. */
function fit(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = Math.min(2, devicePixelRatio || 1), context = canvas.getContext("2d")!;
  if (canvas.width !== Math.floor(width * ratio) || canvas.height !== Math.floor(height * ratio)) {
    [canvas.width, canvas.height] = [Math.floor(width * ratio), Math.floor(height * ratio)];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function readTheme(node: Element): Theme {
  const style = getComputedStyle(node), color = (name: string) => style.getPropertyValue(`--${name}`).trim();
  return { back: color("back"), ink: color("ink"), soft: color("soft"), line: color("line"), bad: color("bad"), accent: color("accent"),
    isDark: matchMedia("(prefers-color-scheme: dark)").matches };
}

/** The smallest of 1, 2 and 5 times a power of ten that is at least as large. */
export function niceTick(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((tick) => tick >= least * 0.999)!;
}
