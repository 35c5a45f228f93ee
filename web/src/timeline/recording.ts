// A recording inside a self-contained document: the chunks of a trace, as `GET /v1/steps` sends them.

import type { Chunk } from "./store";

export interface Recording { chunks: Chunk[] }

export function readRecording(): Recording | null {
  const node = document.getElementById("recording");
  return node ? (JSON.parse(node.textContent ?? "") as Recording) : null;
}
