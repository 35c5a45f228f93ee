// A recording inside a self-contained document: the chunks of a trace, as `GET /v1/steps` sends them.

import type { Chunk } from "./store";

/** Runs of the same requests under several strategies, each a replica of its own. Times are seconds after the start. */
export interface Comparison {
  titles: Record<string, string>;  // by strategy
  seconds: number;  // shown at first
  padded: string[];  // strategies that pad every text to the longest one of its step
  legend: [kind: string, text: string][];
}
export interface Recording { chunks: Chunk[]; comparison?: Comparison }

export function readRecording(): Recording | null {
  const node = document.getElementById("recording");
  return node ? (JSON.parse(node.textContent ?? "") as Recording) : null;
}
