// Draws the lanes of one replica: slots down, steps across, at their real times.
//
// Slots are painted into an image with one row of pixels per slot, which is then stretched to the lanes' height: the cost
// of a frame depends on the pixels and the runs in view, not on the number of steps.

import { short } from "../format";
import { draftedAt, firstEndingAfter, Kind, tokenAt, type Replica, type Run } from "./store";

export interface View { from: number; seconds: number }
export interface Focus { request: number | null; replica: string | null; key: string | null; slot: number | null; step: number | null }
export interface Theme { back: string; ink: string; soft: string; line: string; bad: string; accent: string; isDark: boolean }

export interface Lanes { slots: number; top: number; slotHeight: number; chartsTop: number; queueTop: number; hasCharts: boolean; height: number }

// Told apart also by people who confuse red and green (after Okabe and Ito), and as light or dark as the theme needs.
const LIGHT = ["#0072b2", "#d98a00", "#009e73", "#b8578c", "#3d9bd6", "#c44e00", "#7a6fbe"];
const DARK = ["#4ba3e3", "#f0b43c", "#3cc79b", "#e08fbd", "#8fd0f5", "#f2824a", "#a99df0"];
const PARTS = [["schedule", "#e69f00"], ["launch", "#cc79a7"], ["device", "#0072b2"], ["update", "#009e73"]] as const;
export const CHARTS = ["Step time", "Tokens/s", "Slots in use", "Batch tokens"] as const;
const CHART_HEIGHT = 40, CHART_GAP = 6, QUEUE_HEIGHT = 26, TITLE_HEIGHT = 22, GAP = 8;
const LABEL_WIDTH = 34;  // pixels from which a cell has room for a label

const MIN_SLOTS = 8;

/** Divide the height of a replica among charts, queue and the slots that have been used; with `slotsOnly`, there are all slots and nothing else. */
export function layOut(replica: Replica, top: number, available: number, slotsOnly = false): Lanes {
  const chartsTop = top + TITLE_HEIGHT, queueTop = chartsTop + CHARTS.length * (CHART_HEIGHT + CHART_GAP);
  const slotsTop = slotsOnly ? chartsTop : queueTop + QUEUE_HEIGHT + GAP;
  const slots = slotsOnly ? replica.slots : Math.min(replica.slots, Math.max(MIN_SLOTS, replica.runs.length, replica.mostShared));
  const slotHeight = Math.max(2, Math.min(20, Math.floor((available - (slotsTop - top)) / slots)));
  return { slots, top: slotsTop, slotHeight, chartsTop, queueTop, hasCharts: !slotsOnly, height: slotsTop - top + slots * slotHeight + GAP };
}

export class Painter {
  private image: ImageData | null = null;
  private readonly buffer = document.createElement("canvas");
  private colors: Uint32Array = new Uint32Array();
  private colorsOf: Theme | null = null;

  constructor(private readonly context: CanvasRenderingContext2D) {}

  paint(replica: Replica, lanes: Lanes, view: View, width: number, theme: Theme, focus: Focus, title: string) {
    this.prepareColors(theme);
    const first = replica.rowAt(view.from), last = Math.min(replica.end, replica.rowAt(view.from + view.seconds) + 1);
    const x = (moment: number) => ((moment - view.from) / view.seconds) * width;
    const context = this.context;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
    context.fillStyle = theme.soft;
    context.fillText(title, 4, lanes.chartsTop - 7);
    if (last > first && lanes.hasCharts) {
      const bars = aggregate(replica, first, last, x, width);
      this.paintCharts(replica, lanes, bars, last, width, theme);
      this.paintQueue(replica, lanes, bars, last, x, width, theme, view);
    }
    this.paintSlots(replica, lanes, first, last, x, width, theme, focus);
    this.paintDetails(replica, lanes, first, last, x, width, theme, focus, view);
  }

  private prepareColors(theme: Theme) {
    if (this.colorsOf === theme) return;
    this.colorsOf = theme;
    const palette = theme.isDark ? DARK : LIGHT;
    const faint: [number, number, number] = theme.isDark ? [58, 61, 66] : [222, 220, 213];
    // For each colour: decode, stripe of a prompt, faint (not in focus), faint stripe.
    this.colors = new Uint32Array(palette.length * 4 + 2);
    for (const [index, text] of palette.entries()) {
      const [r, g, b] = rgb(text), strong = theme.isDark ? 255 : 0;
      this.colors[index * 4] = pack(r, g, b);
      this.colors[index * 4 + 1] = pack(mix(r, strong, 0.5), mix(g, strong, 0.5), mix(b, strong, 0.5));
      this.colors[index * 4 + 2] = pack(...faint);
      this.colors[index * 4 + 3] = pack(mix(faint[0], 128, 0.35), mix(faint[1], 128, 0.35), mix(faint[2], 128, 0.35));
    }
    this.colors[palette.length * 4] = theme.isDark ? pack(80, 80, 84) : pack(190, 188, 182);
    this.colors[palette.length * 4 + 1] = theme.isDark ? pack(44, 46, 50) : pack(232, 230, 224);
  }

  private paintSlots(replica: Replica, lanes: Lanes, first: number, last: number, x: (moment: number) => number,
    width: number, theme: Theme, focus: Focus) {
    const slots = Math.max(1, lanes.slots), pixels = Math.max(1, Math.floor(width));
    if (this.image?.width !== pixels || this.image.height !== slots) {
      this.image = this.context.createImageData(pixels, slots);
      [this.buffer.width, this.buffer.height] = [pixels, slots];
    }
    const data = new Uint32Array(this.image.data.buffer);
    const back = theme.isDark ? pack(31, 33, 35) : pack(255, 255, 255);
    data.fill(back);
    if (last > first) {
      const firstStep = replica.get("step", first), lastStep = replica.get("step", last - 1);
      for (let slot = 0; slot < slots; slot++) {
        const runs = replica.runs[slot] ?? [];
        for (let index = firstEndingAfter(runs, firstStep); index < runs.length; index++) {
          const run = runs[index]!;
          if (run.first > lastStep) break;
          const left = x(replica.beganAt(Math.max(first, replica.rowOf(run.first))));
          const right = x(replica.endedAt(Math.min(last - 1, replica.rowOf(run.end - 1))));
          const faint = isFaint(replica, run.request, focus), share = replica.filledShare(run);
          if (share < 1) this.paintRun(data, slot * pixels, pixels, left, right, { ...run, kind: Kind.Held }, faint);
          this.paintRun(data, slot * pixels, pixels, left, left + share * (right - left), run, faint);
          if (run.counts.length && last - first <= pixels / 5) this.paintRefused(data, slot * pixels, pixels, replica, first, last, x, run, faint);
        }
      }
      if (replica.mostShared) this.paintOthers(data, replica, first, last, x, pixels, slots, back);
    }
    this.buffer.getContext("2d")!.putImageData(this.image, 0, 0);
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(this.buffer, 0, lanes.top, pixels, slots * lanes.slotHeight);
    if (lanes.slotHeight >= 4) {
      this.context.fillStyle = theme.back;
      for (let slot = 0; slot <= slots; slot++) this.context.fillRect(0, lanes.top + slot * lanes.slotHeight - 0.5, width, 1);
    }
  }

  /** Fill as many free slots as others' requests have, from the lowest one up: which ones they have is not known. */
  private paintOthers(data: Uint32Array, replica: Replica, first: number, last: number, x: (moment: number) => number, pixels: number, slots: number, back: number) {
    const color = this.colors[2]!;
    eachPixel(replica, first, last, x, pixels, (pixel, wide, from, to) => {
      const { others } = replica.summary(from, to);
      for (let column = pixel; column < Math.min(pixels, pixel + wide); column++) {
        for (let slot = 0, rest = others; rest > 0 && slot < slots; slot++) {
          if (data[slot * pixels + column] !== back) continue;
          data[slot * pixels + column] = color;
          rest--;
        }
      }
    });
  }

  /** At the end of each cell, the share of its tokens that was drafted and refused. */
  private paintRefused(data: Uint32Array, offset: number, pixels: number, replica: Replica, first: number, last: number, x: (moment: number) => number, run: Run, faint: boolean) {
    for (let row = Math.max(first, replica.rowOf(run.first)); row < last; row++) {
      const step = replica.get("step", row);
      if (step >= run.end) break;
      const [accepted, refused] = draftedAt(run, step), left = x(replica.beganAt(row)), right = x(replica.endedAt(row));
      if (!refused) continue;
      const share = refused / (1 + accepted + refused);
      this.paintRun(data, offset, pixels, right - share * (right - left), right, { ...run, kind: Kind.Held }, faint);
    }
  }

  private paintRun(data: Uint32Array, offset: number, pixels: number, left: number, right: number, run: Run, faint: boolean) {
    const begin = Math.max(0, Math.floor(left)), end = Math.min(pixels, Math.max(begin + 1, Math.ceil(right)));
    if (begin >= pixels || end <= 0) return;
    const numColors = (this.colors.length - 2) / 4, base = (run.request % numColors) * 4;
    const isHeld = run.kind === Kind.Held;
    const color = isHeld ? this.colors[numColors * 4]! : this.colors[base + (faint ? 2 : 0)]!;
    for (let pixel = offset + begin; pixel < offset + end; pixel++) data[pixel] = color;  // faster than `fill` for a few
    if (run.kind === Kind.Decode) return;
    const stripe = isHeld ? this.colors[numColors * 4 + 1]! : this.colors[base + (faint ? 3 : 1)]!;
    for (let pixel = begin + ((4 - (begin % 4)) % 4); pixel < end; pixel += 4) data.fill(stripe, offset + pixel, offset + Math.min(end, pixel + 2));
  }

  /** What shows only when there is room: borders of steps, sizes of chunks, cached prefixes, preemptions, the cursor. */
  private paintDetails(replica: Replica, lanes: Lanes, first: number, last: number, x: (moment: number) => number,
    width: number, theme: Theme, focus: Focus, view: View) {
    const context = this.context, bottom = lanes.top + lanes.slots * lanes.slotHeight;
    const pixelsPerStep = last > first ? width / (last - first) : 0;
    for (const [step, message] of replica.failed) {
      const row = replica.rowOf(step);
      if (row < first || row >= last) continue;
      context.fillStyle = theme.bad;
      context.globalAlpha = 0.25;
      context.fillRect(x(replica.beganAt(row)), lanes.top, Math.max(2, x(replica.endedAt(row)) - x(replica.beganAt(row))), bottom - lanes.top);
      context.globalAlpha = 1;
      if (pixelsPerStep > LABEL_WIDTH) context.fillText(`failed: ${message}`, x(replica.beganAt(row)) + 4, lanes.top - 3);
    }
    if (pixelsPerStep >= 5) {
      context.fillStyle = theme.back;
      for (let row = first; row < last; row++) context.fillRect(Math.round(x(replica.endedAt(row))) - 1, lanes.top, 1, bottom - lanes.top);
    }
    if (last - first <= width / 5 && lanes.slotHeight >= 12) this.paintLabels(replica, lanes, first, last, x);
    if (!lanes.hasCharts && pixelsPerStep < LABEL_WIDTH && lanes.slotHeight >= 10) this.paintNames(replica, lanes, first, last, x);
    context.textAlign = "start";
    for (const event of eventsBetween(replica, view.from, view.from + view.seconds)) {
      if (event.step === undefined) continue;
      const at = x(event.at), slot = event.slot ?? replica.runsOf(event.request).findLast((run) => run.first <= event.step!)?.slot;
      if (slot === undefined) continue;
      const middle = lanes.top + (slot + 0.5) * lanes.slotHeight, size = Math.max(2, Math.min(5, lanes.slotHeight / 2));
      if (event.type === "preempt") {
        paintCross(context, at, middle, size, theme);
      } else if (event.type === "admit" && event.cached) {
        context.fillStyle = theme.ink;
        context.fillRect(at, lanes.top + slot * lanes.slotHeight, 2, lanes.slotHeight);
        if (pixelsPerStep >= 2 * LABEL_WIDTH && lanes.slotHeight >= 12) {
          context.textAlign = "end";
          context.fillText(`${event.cached} cached ▸`, at - 2, middle + 4);
          context.textAlign = "start";
        }
      }
    }
    if (focus.step !== null && focus.slot !== null && focus.replica === replica.id) {
      const row = replica.rowOf(focus.step);
      if (row >= first && row < last) {
        context.strokeStyle = theme.ink;
        context.lineWidth = 2;
        const left = x(replica.beganAt(row));
        context.strokeRect(left, lanes.top + focus.slot * lanes.slotHeight, Math.max(4, x(replica.endedAt(row)) - left), lanes.slotHeight);
      }
    }
  }

  /** The id of a request at the beginning of its decodes, where it has room. */
  private paintNames(replica: Replica, lanes: Lanes, first: number, last: number, x: (moment: number) => number) {
    const context = this.context, firstStep = replica.get("step", first), lastStep = replica.get("step", last - 1);
    context.font = `600 ${Math.min(11, lanes.slotHeight - 1)}px system-ui, sans-serif`;
    context.fillStyle = "#fff";
    context.strokeStyle = "rgba(0,0,0,.6)";
    context.lineWidth = 2;
    for (const [slot, runs] of replica.runs.entries()) {
      for (const run of runs ?? []) {
        if (run.end <= firstStep || run.first > lastStep || run.kind !== Kind.Decode) continue;
        const left = Math.max(0, x(replica.beganAt(replica.rowOf(run.first)))), name = replica.requests.get(run.request)?.id ?? "";
        if (x(replica.endedAt(replica.rowOf(run.end - 1))) - left < 7 * name.length + 6) continue;
        const y = lanes.top + (slot + 0.5) * lanes.slotHeight + 4;
        context.strokeText(name, left + 3, y);
        context.fillText(name, left + 3, y);
      }
    }
  }

  /**
   * The number of prompt tokens in each cell that computes some; in a decode the index of its token. If tokens were drafted, it is followed by how many were accepted
   * and how many refused.
   */
  private paintLabels(replica: Replica, lanes: Lanes, first: number, last: number, x: (moment: number) => number) {
    const context = this.context;
    context.font = `${Math.min(11, lanes.slotHeight - 2)}px ui-monospace, monospace`;
    context.textAlign = "center";
    for (let row = first; row < last; row++) {
      const step = replica.get("step", row), left = x(replica.beganAt(row)), right = x(replica.endedAt(row));
      if (right - left < LABEL_WIDTH) continue;
      const middle = (left + right) / 2;
      for (let slot = 0; slot < lanes.slots; slot++) {
        const run = replica.runAt(slot, step);
        if (!run || run.kind === Kind.Held) continue;
        context.fillStyle = "#fff";
        context.strokeStyle = "rgba(0,0,0,.65)";
        context.lineWidth = 2.5;
        const [accepted, refused] = draftedAt(run, step), drafted = accepted || refused ? ` +${accepted}${refused ? ` −${refused}` : ""}` : "";
        const text = run.kind === Kind.Prefill ? `${short(run.tokens)} P` : tokenAt(run, step) + drafted;
        const y = lanes.top + (slot + 0.5) * lanes.slotHeight + 4;
        context.strokeText(text, middle, y);
        context.fillText(text, middle, y);
      }
    }
  }

  private paintQueue(replica: Replica, lanes: Lanes, bars: Bars, last: number, x: (moment: number) => number, width: number, theme: Theme, view: View) {
    const context = this.context, bottom = lanes.queueTop + QUEUE_HEIGHT, most = Math.max(1, ...bars.waiting);
    context.fillStyle = theme.line;
    context.fillRect(0, bottom, width, 1);
    context.fillStyle = theme.isDark ? "#a99df0" : "#7a6fbe";
    this.paintBars(bars, bars.waiting, most, bottom, QUEUE_HEIGHT - 12);
    context.fillStyle = theme.ink;
    for (const event of eventsBetween(replica, view.from, view.from + view.seconds))
      if (event.type === "arrive") context.fillRect(x(event.at), bottom - 4, 1, 4);
    label(context, theme, `Queue: ${replica.get("waiting", last - 1)} waiting`, lanes.queueTop + 10);
  }

  private paintCharts(replica: Replica, lanes: Lanes, bars: Bars, last: number, width: number, theme: Theme) {
    const context = this.context, room = CHART_HEIGHT - 13, now = last - 1;
    const bottom = (index: number) => lanes.chartsTop + index * (CHART_HEIGHT + CHART_GAP) + CHART_HEIGHT;
    context.fillStyle = theme.line;
    for (let index = 0; index < CHARTS.length; index++) context.fillRect(0, bottom(index), width, 1);
    // Step time: the slowest step of each pixel, split into its parts.
    const longest = Math.max(1, ...bars.slowest.map((row) => replica.microseconds(row)));
    const tops = bars.slowest.map(() => bottom(0));
    for (const [part, color] of PARTS) {
      context.fillStyle = color;
      for (const [index, row] of bars.slowest.entries()) {
        const height = (replica.get(part, row) / longest) * room;
        context.fillRect(bars.pixel[index]!, (tops[index]! -= height), bars.wide[index]!, height);
      }
    }
    const highest = Math.max(1, ...bars.rate);
    context.fillStyle = theme.accent;
    this.paintBars(bars, bars.rate, highest, bottom(1), room);
    context.fillStyle = theme.isDark ? "#4ba3e3" : "#0072b2";
    this.paintBars(bars, bars.running, replica.slots, bottom(2), room);
    context.fillStyle = theme.isDark ? "#f0b43c" : "#d98a00";
    this.paintBars(bars, bars.tokens, replica.budget, bottom(3), room);
    const second = replica.rowAt(replica.endedAt(now) - 1);
    let output = 0;
    for (let row = second; row <= now; row++) output += replica.get("output", row);
    const rate = output / Math.max(0.001, Math.min(1, replica.endedAt(now) - replica.beganAt(second)));
    const ms = (microseconds: number) => (microseconds / 1000).toFixed(2), parts = PARTS.map(([part]) => `${part} ${ms(replica.get(part, now))}`);
    const texts = [
      `Step time: ${ms(replica.microseconds(now))} ms (${parts.join(", ")}); top ${ms(longest)} ms`,
      `Output: ${short(rate)} tokens/s; top ${short(highest)}`,
      `Slots: ${replica.get("running", now)} of ${replica.slots} in use`,
      `Batch: ${short(replica.get("tokens", now))} tokens; budget ${short(replica.budget)}`,
    ];
    for (const [index, text] of texts.entries()) label(context, theme, text, bottom(index) - CHART_HEIGHT + 10);
  }

  private paintBars(bars: Bars, values: number[], most: number, bottom: number, room: number) {
    for (let index = 0; index < values.length; index++) {
      if (!values[index]) continue;
      const height = Math.max(1, Math.min(1, values[index]! / Math.max(1, most)) * room);
      this.context.fillRect(bars.pixel[index]!, bottom - height, bars.wide[index]!, height);
    }
  }
}

/** What the charts show, pixel column by pixel column: the slowest step, output tokens/s, and the highest of the other values. */
interface Bars { pixel: number[]; wide: number[]; slowest: number[]; rate: number[]; running: number[]; tokens: number[]; waiting: number[] }

function aggregate(replica: Replica, first: number, last: number, x: (moment: number) => number, width: number): Bars {
  const bars: Bars = { pixel: [], wide: [], slowest: [], rate: [], running: [], tokens: [], waiting: [] };
  eachPixel(replica, first, last, x, width, (pixel, wide, from, to) => {
    const { slowest, output, running, tokens, waiting } = replica.summary(from, to);
    // The rate counts from the end of the step before, so that pauses lower it.
    const since = from > replica.begin ? replica.endedAt(from - 1) : replica.beganAt(from);
    bars.pixel.push(pixel);
    bars.wide.push(wide);
    bars.slowest.push(slowest);
    bars.rate.push(output / Math.max(1e-4, replica.endedAt(to - 1) - since));
    bars.running.push(running);
    bars.tokens.push(tokens);
    bars.waiting.push(waiting);
  });
  return bars;
}

function label(context: CanvasRenderingContext2D, theme: Theme, text: string, y: number) {
  context.font = "11px system-ui, sans-serif";
  context.lineWidth = 3;
  context.strokeStyle = theme.back;
  context.strokeText(text, 4, y);
  context.fillStyle = theme.ink;
  context.fillText(text, 4, y);
}

function paintCross(context: CanvasRenderingContext2D, x: number, y: number, size: number, theme: Theme) {
  for (const [color, width] of [[theme.back, 5], [theme.bad, 2]] as const) {
    context.strokeStyle = color;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(x - size, y - size);
    context.lineTo(x + size, y + size);
    context.moveTo(x - size, y + size);
    context.lineTo(x + size, y - size);
    context.stroke();
  }
}

/** Call `draw(pixel, width, from, to)` for the rows of each pixel column; a wide step gets one call with its whole width. */
export function eachPixel(replica: Replica, first: number, last: number, x: (moment: number) => number, width: number,
  draw: (pixel: number, wide: number, from: number, to: number) => void) {
  for (let row = first; row < last;) {
    const pixel = Math.max(0, Math.floor(x(replica.beganAt(row))));
    // There may be many steps in a pixel: look for its last one in strides that double, then halve.
    let to = row + 1, stride = 1;
    const reaches = (end: number) => end <= last && Math.floor(x(replica.endedAt(end - 1))) <= pixel;
    for (; reaches(to + stride); stride *= 2) to += stride;
    for (; stride >= 1; stride >>= 1) if (reaches(to + stride)) to += stride;
    if (pixel < width) draw(pixel, Math.max(1, Math.ceil(x(replica.endedAt(to - 1))) - pixel), row, to);
    row = to;
  }
}

function* eventsBetween(replica: Replica, from: number, to: number) {
  let low = 0, high = replica.events.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (replica.events[middle]!.at >= from) high = middle;
    else low = middle + 1;
  }
  for (let number = 0; low < replica.events.length && replica.events[low]!.at <= to && number < 4096; low++, number++) yield replica.events[low]!;
}

function isFaint(replica: Replica, request: number, focus: Focus): boolean {
  if (focus.request !== null) return focus.replica !== replica.id || focus.request !== request;
  return focus.key !== null && (replica.requests.get(request)?.key ?? "") !== focus.key;
}

const rgb = (text: string) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)) as [number, number, number];
const mix = (from: number, to: number, share: number) => Math.round(from + (to - from) * share);
const pack = (r: number, g: number, b: number) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
