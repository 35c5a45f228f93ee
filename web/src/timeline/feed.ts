// Follows `GET /v1/steps` for as long as a page shows it, also across breaks of the connection.

import { call, events, Failure, isAbort, KEY_ERRORS } from "../api";
import { sleep } from "../dom";
import { server } from "../server";
import type { Chunk, Store } from "./store";

const PAST_SECONDS = 600;  // shown when a page is opened
const AGAIN_MS = 1500;

export class Feed {
  private controller: AbortController | null = null;
  problem = "";

  constructor(private readonly store: Store) {}

  start() {
    if (!this.controller) void this.follow((this.controller = new AbortController()).signal);
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
  }

  private async follow(signal: AbortSignal) {
    while (!signal.aborted) {
      const last = this.store.range()?.[1];
      try {
        const response = await call(`v1/steps?since=${last === undefined ? -PAST_SECONDS : last - 1}`, undefined, signal);
        this.problem = "";
        for await (const chunk of events<Chunk>(response)) this.store.add(chunk);
      } catch (error) {
        if (isAbort(error)) return;
        if (!(error instanceof Failure)) throw error;
        this.problem = error.message;
        if (error.code in KEY_ERRORS) server.requireKey();
      }
      await sleep(AGAIN_MS);
    }
  }
}
