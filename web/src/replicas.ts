// The page with the state of the engines.

import { callJson, Failure, KEY_ERRORS } from "./api";
import { make } from "./dom";
import { count, percent } from "./format";
import { Polling, type Page } from "./page";
import { server } from "./server";

const REFRESH_MS = 2000;
const STATES: Record<string, string> = {
  starting: "is starting", draining: "takes no new requests", stalled: "makes no progress", restarting: "is restarting",
  dead: "is dead", closing: "is shutting down", closed: "has shut down",
};

interface Replica {
  id: string; state: string; num_running: number; num_waiting: number; num_queued_tokens: number; kv_usage: number;
  prefix_hit_rate: number; num_output_tokens: number; num_restarts: number;
}
interface Replicas { data: Replica[]; routing: string | null }

export class ReplicasPage implements Page {
  readonly title = "Replicas";
  private readonly summary = make("p", { id: "summary", role: "status" });
  private readonly list = make("ul", { id: "replicas" });
  readonly root = make("section", { class: "text-page" }, this.summary, this.list);
  private readonly polling = new Polling(() => this.refresh(), REFRESH_MS);

  show() {
    this.polling.start();
  }

  hide() {
    this.polling.stop();
  }

  private async refresh() {
    let isOld = false;
    try {
      this.update(await callJson<Replicas>("v1/replicas"));
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      isOld = true;
      if (error.code !== "no_answer") this.update({ data: [], routing: null });
      if (error.code in KEY_ERRORS) server.requireKey();
      else this.summary.textContent = error.code === "loading" ? "The model is loading." : error.message;
    }
    this.list.classList.toggle("old", isOld);
  }

  private update({ data, routing }: Replicas) {
    this.summary.textContent = data.length ? summarize(data, routing) : "";
    this.list.replaceChildren(...data.map((replica) => card(replica, routing)));
  }
}

function summarize(data: Replica[], routing: string | null): string {
  const name = (replica: Replica) => (routing === null ? "the engine" : `replica ${replica.id}`);
  const unhealthy = data.filter((replica) => replica.state !== "running");
  const trouble = unhealthy.map((replica) => `${name(replica)} ${STATES[replica.state]}`).join(", ");
  if (routing === null)
    return `This server has one engine and no router${trouble ? `: ${trouble}.` : "; it is running."}`;
  const number = data.length === 1 ? "One replica" : `${data.length} replicas`;
  return `${number} behind a router (${routing.replace("_", " ")}): ${trouble || "all are running"}.`;
}

function card(replica: Replica, routing: string | null) {
  const list = make("dl");
  const row = (term: string, value: string) => list.append(make("dt", {}, term), make("dd", {}, value));
  row("Running requests", count(replica.num_running));
  row("Waiting requests", count(replica.num_waiting));
  row("Queued prompt tokens", count(replica.num_queued_tokens));
  row("KV cache usage", percent(replica.kv_usage));
  const filled = make("div");
  filled.style.width = percent(replica.kv_usage).replace(" ", "");
  list.append(make("div", { class: "bar" }, filled));
  row("Prefix cache hit rate", percent(replica.prefix_hit_rate));
  row("Output tokens", count(replica.num_output_tokens));
  row("Restarts", count(replica.num_restarts));
  const title = make("h2", {}, routing === null ? "Engine" : `Replica ${replica.id}`, make("span", { class: "state" }, replica.state));
  const links = make("p", { class: "links" },
    make("a", { href: `timeline?replica=${encodeURIComponent(replica.id)}`, "data-page": true }, "Timeline"), " · ",
    make("a", { href: `memory?replica=${encodeURIComponent(replica.id)}`, "data-page": true }, "Memory"));
  return make("li", { class: replica.state }, title, list, links);
}
