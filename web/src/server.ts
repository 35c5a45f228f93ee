// The state of the server: whether it responds, and its model.

import { access, callJson, Failure, KEY_ERRORS } from "./api";
import { byId, sleep } from "./dom";

const AGAIN_MS = 1500;
const GONE = "The server does not respond. This page continues when it is back.";
const SHORT: Record<string, string> = {
  no_answer: "not reachable", loading: "loading", missing_api_key: "API key required", invalid_api_key: "invalid API key",
};

interface Model { id: string; max_model_len: number }

class Server {
  isLoading = false;
  /** Called whenever a connection was made. */
  readonly onConnected: (() => void)[] = [];
  private attempt = 0;

  /** Retry while the server is loading or unreachable. */
  async connect() {
    const mine = ++this.attempt;  // a later attempt takes over
    while (mine === this.attempt) {
      try {
        const model = (await callJson<{ data: Model[] }>("v1/models")).data[0]!;
        if (mine === this.attempt) this.connected(model);
        return;
      } catch (error) {
        if (!(error instanceof Failure)) throw error;
        if (mine !== this.attempt || !(await this.explain(error))) return;
        await sleep(AGAIN_MS);
      }
    }
  }

  reconnectLater() {
    setTimeout(() => void this.connect(), AGAIN_MS);
  }

  setKey(key: string) {
    access.key = key;
    void this.connect();
  }

  /** Show the field for the API key and put the cursor into it. */
  requireKey() {
    byId<HTMLDetailsElement>("access").open = true;
    byId("key").focus();
  }

  private connected(model: Model) {
    this.isLoading = false;
    byId("notice").textContent = "";
    byId("model").textContent = `${model.id} · context length ${model.max_model_len.toLocaleString("en")}`;
    for (const callback of this.onConnected) callback();
  }

  /** Show what is wrong. Return whether retrying makes sense. */
  private async explain(error: Failure): Promise<boolean> {
    this.isLoading = error.code === "loading";
    const isGone = error.code === "no_answer";
    byId("model").textContent = SHORT[error.code] ?? "";
    byId("notice").textContent = this.isLoading ? await loadingText() : isGone ? GONE : error.message;
    if (error.code in KEY_ERRORS) this.requireKey();
    return this.isLoading || isGone;
  }
}

async function loadingText(): Promise<string> {
  let share: number | null = null;
  try { share = (await (await fetch("health")).json()).progress; } catch { /* the next attempt shows it */ }
  return `The model is loading${share === null ? "" : ` (${Math.round(share * 100)} %)`}. This page continues when it is ready.`;
}

export const server = new Server();
