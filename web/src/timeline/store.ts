// The steps that the page knows, replica by replica. The oldest are dropped, so that a page left open does not grow.

export const enum Kind { Decode = 0, Prefill = 1, Held = 2 }

export interface RequestInfo {
  number: number; id?: string; answer?: number; key?: string; route?: string; prompt_tokens?: number; priority?: number;
  arrived: number; text?: string;
}

export interface TimelineEvent {
  type: "arrive" | "admit" | "preempt" | "finish" | "abort";
  at: number; request: number; step?: number; slot?: number; cached?: number; reason?: string;
}

/** One message of `GET /v1/steps`. */
export interface Chunk {
  replica: string; slots: number; budget: number; kv: { blocks: number; block_size: number };
  steps: Record<Exclude<ColumnName, "others">, number[]> & { others?: number[] };  // recordings of comparisons have no others
  failed?: Record<string, string>;
  runs: [slot: number, request: number, kind: Kind, firstStep: number, numSteps: number, tokens: number, firstToken: number, outputs?: number, counts?: number[]][];
  requests?: RequestInfo[];
  events?: TimelineEvent[];
  skipped?: number;
}

const COLUMNS = ["step", "at", "schedule", "launch", "device", "update", "tokens", "output", "running", "waiting", "used", "cached", "others"] as const;
export type ColumnName = (typeof COLUMNS)[number];

/** Several steps together: the row of the slowest one, the sum of their outputs, and the highest of the other values. */
export interface Summary { slowest: number; longest: number; output: number; running: number; tokens: number; waiting: number; others: number }

const BLOCK_BITS = 5;  // steps are summarized in blocks of 32, so that a long time can be drawn without looking at each

/**
 * Consecutive steps of one request in one slot, doing the same: `tokens` tokens in each step. In decodes, `counts` has two numbers for each of the first steps: the
 * tokens that it returned, and the drafted ones that were refused. Every later step returned one.
 */
export interface Run { slot: number; request: number; kind: Kind; first: number; end: number; tokens: number; firstToken: number; counts: number[] }

/** The index of the token that a run has reached in a step. */
export function tokenAt(run: Run, step: number): number {
  const { counts } = run, number = step - run.first, known = Math.min(number, counts.length / 2);
  let token = run.firstToken + (number - known) * run.tokens;
  for (let index = 0; index < known; index++) token += counts[2 * index]!;
  return token;
}

/** How many drafted tokens a step of decodes accepted, and how many it refused. */
export function draftedAt(run: Run, step: number): [accepted: number, refused: number] {
  const index = 2 * (step - run.first);
  return [(run.counts[index] ?? 1) - 1, run.counts[index + 1] ?? 0];
}

const MAX_STEPS = 1 << 20;  // ten minutes at 1,000 steps/s fit
const MAX_RUNS = 1 << 18;
const COUNTS_PER_RUN = 16;  // that take as much memory as a run
const MAX_EVENTS = 1 << 17;

/** A column of numbers that grows to a limit and then forgets its beginning. Indices are counted from the first value ever. */
class Column {
  private values: Float64Array;
  private mask: number;  // lengths are powers of two

  constructor(private readonly limit: number, capacity = 4096) {
    this.values = new Float64Array(Math.min(limit, capacity));
    this.mask = this.values.length - 1;
  }

  set(index: number, value: number) {
    if (index >= this.values.length && this.values.length < this.limit) {
      const larger = new Float64Array(Math.min(this.limit, this.values.length * 4));
      larger.set(this.values);
      this.values = larger;
      this.mask = larger.length - 1;
    }
    this.values[index & this.mask] = value;
  }

  get(index: number): number {
    return this.values[index & this.mask]!;
  }
}

export class Replica {
  slots = 0;
  budget = 0;
  kv = { blocks: 0, block_size: 0 };
  /** Rows [begin, end) are known; a row is one step. */
  begin = 0;
  end = 0;
  /** Whether every text was padded to the longest one of its step. */
  isPadded = false;
  /** The most slots that one's own requests and others' had together in a step with others. */
  mostShared = 0;
  readonly requests = new Map<number, RequestInfo>();
  readonly failed = new Map<number, string>();
  readonly runs: Run[][] = [];  // by slot, in order of steps
  events: TimelineEvent[] = [];
  private readonly columns: Record<ColumnName, Column>;
  private readonly began: Column;
  private readonly ended: Column;
  private readonly blocks = new Map<number, Summary>();  // by row >> BLOCK_BITS; complete ones only
  private numRuns = 0;  // with their counts

  /** `maxSteps` is a power of two. */
  constructor(readonly id: string, private readonly maxSteps = MAX_STEPS, private readonly maxRuns = MAX_RUNS) {
    this.columns = Object.fromEntries(COLUMNS.map((name) => [name, new Column(maxSteps)])) as Record<ColumnName, Column>;
    this.began = new Column(maxSteps);
    this.ended = new Column(maxSteps);
  }

  get(column: ColumnName, row: number): number {
    return this.columns[column].get(row);
  }

  /** When the device began with the step of a row, in unix seconds. */
  beganAt(row: number): number {
    return this.began.get(row);
  }

  endedAt(row: number): number {
    return this.ended.get(row);
  }

  /** How long the step of a row took. */
  microseconds(row: number): number {
    return this.get("schedule", row) + this.get("launch", row) + this.get("device", row) + this.get("update", row);
  }

  /** Summarize rows [from, to). */
  summary(from: number, to: number): Summary {
    const all: Summary = { slowest: from, longest: -1, output: 0, running: 0, tokens: 0, waiting: 0, others: 0 };
    for (let row = from; row < to;) {
      const block = row % (1 << BLOCK_BITS) === 0 && row + (1 << BLOCK_BITS) <= to ? this.blocks.get(row >> BLOCK_BITS) : undefined;
      if (block) merge(all, block);
      else this.addRow(all, row);
      row += block ? 1 << BLOCK_BITS : 1;
    }
    return all;
  }

  private addRow(summary: Summary, row: number) {
    const time = this.microseconds(row);
    if (time > summary.longest) [summary.slowest, summary.longest] = [row, time];
    summary.output += this.get("output", row);
    summary.running = Math.max(summary.running, this.get("running", row));
    summary.tokens = Math.max(summary.tokens, this.get("tokens", row));
    summary.waiting = Math.max(summary.waiting, this.get("waiting", row));
    summary.others = Math.max(summary.others, this.get("others", row));
  }

  /** The first row whose step ended after the moment; `end` if there is none. */
  rowAt(moment: number): number {
    let low = this.begin, high = this.end;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.endedAt(middle) > moment) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** The row of a step; the next later one if the step is not known, `end` if there is none. */
  rowOf(step: number): number {
    const guess = this.begin + step - this.get("step", this.begin);  // right unless steps are missing in between
    if (guess >= this.begin && guess < this.end && this.get("step", guess) === step) return guess;
    let low = this.begin, high = this.end;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.get("step", middle) >= step) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  add(chunk: Chunk) {
    this.slots = chunk.slots;
    this.budget = chunk.budget;
    this.kv = chunk.kv;
    const steps = chunk.steps, known = this.end > this.begin ? this.get("step", this.end - 1) : -1;
    const from = steps.step.findIndex((step) => step > known);
    for (const request of chunk.requests ?? []) this.requests.set(request.number, request);
    if (from < 0) {
      if (!steps.step.length) this.addEvents(chunk.events ?? []);
      return;  // a stream that was opened again repeats what is known
    }
    for (let index = from; index < steps.step.length; index++) {
      for (const name of COLUMNS) this.columns[name].set(this.end, steps[name]?.[index] ?? 0);
      const began = steps.at[index]! + (steps.schedule[index]! + steps.launch[index]!) / 1e6;
      this.began.set(this.end, began);
      this.ended.set(this.end, began + steps.device[index]! / 1e6);
      this.end++;
      if (this.end % (1 << BLOCK_BITS) === 0) {
        this.blocks.set((this.end - 1) >> BLOCK_BITS, this.summary(this.end - (1 << BLOCK_BITS), this.end));
        this.blocks.delete((this.end - this.maxSteps - 1) >> BLOCK_BITS);
      }
    }
    for (const [step, message] of Object.entries(chunk.failed ?? {})) this.failed.set(Number(step), message);
    for (const [slot, request, kind, first, number, tokens, firstToken, , counts] of chunk.runs)
      if (first + number > known + 1) this.addRun({ slot, request, kind, first, end: first + number, tokens, firstToken, counts: [...(counts ?? [])] });
    this.countShared(chunk);
    this.addEvents(chunk.events ?? []);
    this.begin = Math.max(this.begin, this.end - this.maxSteps + 1);
    if (this.numRuns > this.maxRuns) this.dropOldRuns();
  }

  private addRun(run: Run) {
    const runs = (this.runs[run.slot] ??= []), last = runs.at(-1);
    if (last && last.end >= run.first && last.request === run.request && last.kind === run.kind && last.tokens === run.tokens) {
      if (run.counts.length && run.end > last.end) {
        const { counts } = last, numBefore = 2 * (run.first - last.first);
        this.numRuns -= sizeOf(last);
        if (counts.length > numBefore) counts.length = numBefore;
        while (counts.length < numBefore) counts.push(1, 0);
        for (const count of run.counts) counts.push(count);
        this.numRuns += sizeOf(last);
      }
      last.end = Math.max(last.end, run.end);
    } else {
      runs.push(run);
      this.numRuns += sizeOf(run);
    }
  }

  private countShared({ steps, runs }: Chunk) {
    if (!steps.others?.some((count) => count > 0)) return;
    const shared = steps.others.map((count, index) => count && count + runs.filter(([, , , first, number]) =>
      first <= steps.step[index]! && steps.step[index]! < first + number).length);
    for (const count of shared) this.mostShared = Math.max(this.mostShared, count);
  }

  private addEvents(events: TimelineEvent[]) {
    this.events.push(...events);
    if (this.events.length > MAX_EVENTS) this.events = this.events.slice(-MAX_EVENTS / 2);
  }

  /** Forget the first quarter of the known steps' runs, the requests that are then unknown, and what lies before the first run. */
  private dropOldRuns() {
    const row = this.begin + ((this.end - this.begin) >>> 2), step = this.get("step", row);
    this.begin = row;
    this.numRuns = 0;
    const inUse = new Set<number>();
    for (const [slot, runs] of this.runs.entries()) {
      if (!runs) continue;
      const kept = runs.filter((run) => run.end > step);
      this.runs[slot] = kept;
      for (const run of kept) {
        if (run.counts.length) beginAt(run, step);
        this.numRuns += sizeOf(run);
        inUse.add(run.request);
      }
    }
    const since = this.beganAt(row);
    this.events = this.events.filter((event) => event.at >= since);
    for (const event of this.events) inUse.add(event.request);
    for (const number of this.requests.keys()) if (!inUse.has(number)) this.requests.delete(number);
    for (const failed of this.failed.keys()) if (failed < step) this.failed.delete(failed);
  }

  /** The run of a slot that covers a step, if there is one. */
  runAt(slot: number, step: number): Run | null {
    const runs = this.runs[slot] ?? [], index = firstEndingAfter(runs, step);
    return index < runs.length && runs[index]!.first <= step ? runs[index]! : null;
  }

  /** Whether a slot without a run is shown as one of others' in the step of a row. Which ones they have is not known: the lowest. */
  isOthers(slot: number, row: number): boolean {
    const step = this.get("step", row);
    let free = 0;
    for (let lower = 0; lower < slot; lower++) if (!this.runAt(lower, step)) free++;
    return free < this.get("others", row) && !this.runAt(slot, step);
  }

  /** The share of a run's cells that it filled: less than 1 if it was padded. */
  filledShare(run: Run): number {
    if (!this.isPadded || run.kind !== Kind.Prefill) return 1;
    return run.tokens / Math.max(...this.runs.map((_, slot) => this.runAt(slot, run.first)?.tokens ?? 0));
  }

  /** The runs of a request in order of steps. */
  runsOf(request: number): Run[] {
    return this.runs.flatMap((runs) => runs?.filter((run) => run.request === request) ?? []).sort((a, b) => a.first - b.first);
  }

  eventsOf(request: number): TimelineEvent[] {
    return this.events.filter((event) => event.request === request);
  }

  /** The row of the step that took the device longest, among rows [from, to). */
  slowestRow(from = this.begin, to = this.end): number | null {
    let slowest: number | null = null, longest = -1;
    for (let row = from; row < to; row++) {
      const seconds = this.get("device", row) + this.get("schedule", row) + this.get("update", row);
      if (seconds > longest) [slowest, longest] = [row, seconds];
    }
    return slowest;
  }

  /** The request that took longest from its arrival to its end (or until now), among those whose arrival is known. */
  slowestRequest(): number | null {
    const now = this.end > this.begin ? this.endedAt(this.end - 1) : 0, ends = new Map<number, number>();
    for (const event of this.events) if (event.type === "finish" || event.type === "abort") ends.set(event.request, event.at);
    let slowest: number | null = null, longest = -1;
    for (const request of this.requests.values()) {
      const seconds = (ends.get(request.number) ?? now) - request.arrived;
      if (seconds > longest) [slowest, longest] = [request.number, seconds];
    }
    return slowest;
  }
}

function sizeOf(run: Run): number {
  return 1 + run.counts.length / COUNTS_PER_RUN;
}

/** Forget the steps of a run before this one. */
function beginAt(run: Run, step: number) {
  if (step <= run.first) return;
  run.firstToken = tokenAt(run, step);
  run.counts = run.counts.slice(2 * (step - run.first));
  run.first = step;
}

function merge(summary: Summary, block: Summary) {
  if (block.longest > summary.longest) [summary.slowest, summary.longest] = [block.slowest, block.longest];
  summary.output += block.output;
  summary.running = Math.max(summary.running, block.running);
  summary.tokens = Math.max(summary.tokens, block.tokens);
  summary.waiting = Math.max(summary.waiting, block.waiting);
  summary.others = Math.max(summary.others, block.others);
}

/** The index of the first run that ends after a step. */
export function firstEndingAfter(runs: Run[], step: number): number {
  let low = 0, high = runs.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (runs[middle]!.end > step) high = middle;
    else low = middle + 1;
  }
  return low;
}

export class Store {
  readonly replicas = new Map<string, Replica>();

  add(chunk: Chunk) {
    let replica = this.replicas.get(chunk.replica);
    if (!replica) this.replicas.set(chunk.replica, (replica = new Replica(chunk.replica)));
    replica.add(chunk);
  }

  /** The moments of the first and last known step of all replicas. */
  range(): [number, number] | null {
    let first = Infinity, last = -Infinity;
    for (const replica of this.replicas.values()) {
      if (replica.end === replica.begin) continue;
      first = Math.min(first, replica.beganAt(replica.begin));
      last = Math.max(last, replica.endedAt(replica.end - 1));
    }
    return first < last ? [first, last] : null;
  }
}
