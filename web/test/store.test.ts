import { describe, expect, it } from "vitest";
import { eachPixel } from "../src/timeline/draw";
import { draftedAt, Kind, Replica, Store, tokenAt, type Chunk } from "../src/timeline/store";

/** A chunk of steps that take 1 ms each, one after the other. */
export function chunk(first: number, number: number, runs: Chunk["runs"] = [], extra: Partial<Chunk> = {}): Chunk {
  const steps = Array.from({ length: number }, (_, index) => first + index), zeros = steps.map(() => 0);
  return {
    replica: "0", slots: 4, budget: 64, kv: { blocks: 10, block_size: 16 }, runs,
    steps: { step: steps, at: steps.map((step) => step / 1000), schedule: zeros, launch: zeros, device: steps.map(() => 1000), update: zeros,
      tokens: zeros, output: zeros, running: zeros, waiting: zeros, used: zeros, cached: zeros },
    ...extra,
  };
}

describe("Replica", () => {
  it("joins runs that continue in the next chunk", () => {
    const replica = new Replica("0");
    replica.add(chunk(0, 10, [[1, 7, Kind.Prefill, 0, 1, 30, 0], [1, 7, Kind.Decode, 1, 9, 1, 30]]));
    replica.add(chunk(10, 10, [[1, 7, Kind.Decode, 10, 4, 1, 39], [1, 8, Kind.Prefill, 14, 1, 5, 0]]));
    expect(replica.runs[1]).toEqual([
      { slot: 1, request: 7, kind: Kind.Prefill, first: 0, end: 1, tokens: 30, firstToken: 0, counts: [] },
      { slot: 1, request: 7, kind: Kind.Decode, first: 1, end: 14, tokens: 1, firstToken: 30, counts: [] },
      { slot: 1, request: 8, kind: Kind.Prefill, first: 14, end: 15, tokens: 5, firstToken: 0, counts: [] },
    ]);
    expect(replica.runAt(1, 13)!.request).toBe(7);
    expect(replica.runAt(1, 14)!.request).toBe(8);
    expect(replica.runAt(1, 15)).toBeNull();
  });

  it("counts the tokens of decodes that return several", () => {
    const replica = new Replica("0"), tokens = () => Array.from({ length: 9 }, (_, step) => tokenAt(replica.runs[1]![0]!, step));
    replica.add(chunk(0, 4, [[1, 7, Kind.Decode, 0, 4, 1, 30, 7, [1, 0, 3, 0, 2, 1]]]));
    expect(tokens().slice(0, 5)).toEqual([30, 31, 34, 36, 37]);
    replica.add(chunk(2, 4, [[1, 7, Kind.Decode, 2, 4, 1, 34, 5, [2, 1]]]));  // a stream that was opened again
    replica.add(chunk(6, 2, [[1, 7, Kind.Decode, 6, 2, 1, 39, 5, [1, 2, 4, 0]]]));
    expect(tokens()).toEqual([30, 31, 34, 36, 37, 38, 39, 40, 44]);
    expect(replica.runs[1]!.length).toBe(1);
    expect([0, 1, 2, 3, 6, 7, 8].map((step) => draftedAt(replica.runs[1]![0]!, step))).toEqual([[0, 0], [2, 0], [1, 1], [0, 0], [0, 2], [3, 0], [0, 0]]);
  });

  it("forgets the counts of long runs, as it forgets runs", () => {
    const replica = new Replica("0", 1024, 32), counts = [2, 1, 1, 3];
    for (let step = 0; step < 1000; step += 2) replica.add(chunk(step, 2, [[0, 7, Kind.Decode, step, 2, 1, 30 + (step / 2) * 3, 3, counts]]));
    const run = replica.runs[0]![0]!;
    expect(replica.runs[0]!.length).toBe(1);
    expect(run.counts.length).toBeLessThan(32 * 16);
    expect(run.first).toBeGreaterThan(700);
    expect(tokenAt(run, 1000)).toBe(30 + 500 * 3);
    expect(draftedAt(run, 998)).toEqual([1, 1]);
    expect(counts).toEqual([2, 1, 1, 3]);
  });

  it("shows as many of the lowest free slots in use as others have", () => {
    const replica = new Replica("0"), shared = chunk(0, 4, [[1, 7, Kind.Decode, 0, 3, 1, 30]]);
    shared.steps.others = [0, 1, 2, 2];
    replica.add(shared);
    const shown = [0, 1, 2, 3].map((row) => [0, 1, 2, 3].filter((slot) => replica.isOthers(slot, row)));
    expect(shown).toEqual([[], [0], [0, 2], [0, 1]]);
    expect(replica.mostShared).toBe(3);
    expect(replica.summary(0, 4).others).toBe(2);
  });

  it("ignores what a reopened stream repeats", () => {
    const replica = new Replica("0"), first = chunk(0, 10, [[0, 1, Kind.Decode, 0, 10, 1, 5]]);
    replica.add(first);
    replica.add(first);
    replica.add(chunk(5, 10, [[0, 1, Kind.Decode, 5, 10, 1, 10]]));
    expect(replica.end - replica.begin).toBe(15);
    expect(replica.runs[0]!.map((run) => [run.first, run.end])).toEqual([[0, 15]]);
  });

  it("finds rows by time and by step, also where steps are missing", () => {
    const replica = new Replica("0");
    replica.add(chunk(0, 10));
    replica.add(chunk(20, 10));
    expect(replica.rowAt(-1)).toBe(0);
    expect(replica.get("step", replica.rowAt(0.0055))).toBe(5);
    expect(replica.get("step", replica.rowAt(0.015))).toBe(20);
    expect(replica.rowAt(1)).toBe(20);
    expect(replica.rowOf(25)).toBe(15);
    expect(replica.rowOf(12)).toBe(10);
  });

  it("does not grow beyond its limits", () => {
    const replica = new Replica("0", 1024, 300);
    for (let first = 0; first < 20000; first += 10) {
      const number = first / 10;
      replica.add(chunk(first, 10, [[number % 4, number, Kind.Decode, first, 10, 1, 0]], {
        requests: [{ number, arrived: first / 1000 }], events: [{ type: "arrive", at: first / 1000, request: number }] }));
    }
    expect(replica.end - replica.begin).toBeLessThanOrEqual(1024);
    expect(replica.runs.reduce((sum, runs) => sum + runs.length, 0)).toBeLessThanOrEqual(300);
    expect(replica.requests.size).toBeLessThan(400);
    expect(replica.get("step", replica.end - 1)).toBe(19999);
    expect(replica.runAt(1999 % 4, 19995)!.request).toBe(1999);
  });

  it("names the slowest step and request", () => {
    const replica = new Replica("0"), slow = chunk(0, 10, [], {
      requests: [{ number: 1, arrived: 0 }, { number: 2, arrived: 0.001 }],
      events: [{ type: "finish", at: 0.002, request: 1, step: 1 }, { type: "finish", at: 0.009, request: 2, step: 8 }] });
    slow.steps.device[4] = 900_000;
    replica.add(slow);
    expect(replica.slowestRow()).toBe(4);
    expect(replica.slowestRequest()).toBe(2);
  });
});

describe("Store", () => {
  it("keeps replicas apart and knows the whole range", () => {
    const store = new Store();
    expect(store.range()).toBeNull();
    store.add(chunk(5, 5));
    store.add({ ...chunk(0, 2), replica: "1" });
    expect([...store.replicas.keys()]).toEqual(["0", "1"]);
    expect(store.range()![0]).toBeCloseTo(0);
    expect(store.range()![1]).toBeCloseTo(0.01);
  });
});

describe("eachPixel", () => {
  it("covers every step once, at any zoom", () => {
    const replica = new Replica("0");
    replica.add(chunk(0, 1000));
    for (const width of [7, 100, 1000, 5000]) {
      const seen: number[] = [];
      let right = 0;
      eachPixel(replica, 0, 1000, (moment) => moment * width, width, (pixel, wide, from, to) => {
        for (let row = from; row < to; row++) seen.push(row);
        expect(pixel).toBeLessThanOrEqual(right + 1);
        right = pixel + wide;
      });
      expect(seen).toEqual(Array.from({ length: 1000 }, (_, row) => row));
    }
  });
});

describe("summary", () => {
  it("is that of the rows one by one, wherever it begins and ends", () => {
    const replica = new Replica("0", 256), all = chunk(0, 200);
    all.steps.device = all.steps.step.map((step) => (step * 37) % 101);
    all.steps.output = all.steps.step.map((step) => step % 7);
    all.steps.waiting = all.steps.step.map((step) => (step * 13) % 17);
    replica.add(all);
    for (const [from, to] of [[0, 200], [0, 32], [31, 65], [5, 6], [33, 190]] as const) {
      const rows = Array.from({ length: to - from }, (_, index) => from + index), summary = replica.summary(from, to);
      expect(summary.output).toBe(rows.reduce((sum, row) => sum + replica.get("output", row), 0));
      expect(summary.waiting).toBe(Math.max(...rows.map((row) => replica.get("waiting", row))));
      expect(replica.microseconds(summary.slowest)).toBe(Math.max(...rows.map((row) => replica.microseconds(row))));
    }
  });

  it("forgets steps as the replica does", () => {
    const replica = new Replica("0", 256);
    for (let first = 0; first < 2000; first += 10) replica.add(chunk(first, 10));
    expect(replica.summary(replica.begin, replica.end).longest).toBe(1000);
  });
});
