// The page with the requests of this key: waiting, running and finished, and the story of one of them.

import { callJson, Failure, KEY_ERRORS } from "./api";
import { make } from "./dom";
import { count, duration } from "./format";
import { Polling, type Page } from "./page";
import { server } from "./server";

const REFRESH_MS = 1500;

interface Breakdown {
  queue: Record<string, number>; prefill: number; prefill_of_others: number; decode: number; preempted: number; held: number; lost: number;
}
interface AnswerReport {
  index: number; status: string; finish_reason: string | null; num_prompt_tokens: number; num_cached_tokens: number;
  num_output_tokens: number; num_preemptions: number; replica: string; number?: number | null;
  breakdown: Breakdown;
}
interface Neighbour { number: number | null; id: string | null; seconds: number; why: string }
interface RequestSummary {
  id: string; route: string; status: string; created: number; stream: boolean; priority: number; tenant: string;
  total_seconds: number; first_token_seconds: number | null; client_seconds: number; num_answers: number;
  num_prompt_tokens: number; num_output_tokens: number; waiting_reason: string | null; why: string;
}
interface RequestList { data: RequestSummary[]; has_more: boolean }
interface RequestReport extends RequestSummary { answers: AnswerReport[]; has_more: boolean; neighbours: Neighbour[] | null }

const QUEUE_CAUSES: Record<string, string> = {
  step: "for the next step", memory: "for KV memory", slots: "for a slot", budget: "for the token budget", policy: "because of the policy",
};

const NEIGHBOURS: Record<string, string> = {
  prompt: "its prompt was in the same steps", queue: "it ran while this one waited", preemption: "it ran while this one was preempted",
};

export class RequestsPage implements Page {
  readonly title = "Requests";
  private readonly notice = make("p", { id: "requests-notice", role: "status" });
  private readonly lists = make("div", { id: "request-lists" });
  private readonly story = make("section", { id: "story", "aria-live": "polite" });
  readonly root = make("section", { class: "text-page wide" }, this.notice, this.story, this.lists);
  private readonly polling = new Polling(() => this.refresh(), REFRESH_MS);
  private selected: string | null = null;
  private numPages = 1;  // of the list
  private numAnswerPages = 1;
  private told = false;  // the story is that of a finished request, which does not change

  show(query: URLSearchParams) {
    this.selected = query.get("id");
    this.showAnswers(1);
  }

  private showAnswers(numPages: number) {
    [this.numAnswerPages, this.told] = [numPages, false];
    this.polling.start();
  }

  hide() {
    this.polling.stop();
  }

  private async refresh() {
    try {
      const pages = await readPages<RequestList>(this.numPages, (before) =>
        callJson(`v1/requests?limit=200${before ? `&after=${encodeURIComponent(before.data.at(-1)!.id)}` : ""}`));
      this.notice.textContent = "";
      this.showLists(pages.flatMap(({ data }) => data), pages.at(-1)!.has_more);
      if (this.selected === null) this.story.replaceChildren();
      else if (!this.told) await this.showStory(this.selected);
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      this.notice.textContent = error.message;
      if (error.code in KEY_ERRORS) server.requireKey();
    }
  }

  private showLists(reports: RequestSummary[], hasMore: boolean) {
    const groups: [string, RequestSummary[]][] = [
      ["Waiting", reports.filter(({ status }) => status === "queued")],
      ["Running", reports.filter(({ status }) => status === "running")],
      ["Finished", reports.filter(hasEnded)],
    ];
    const focused = document.activeElement?.getAttribute("href");
    this.lists.replaceChildren(...groups.map(([name, group]) => make("section", {},
      make("h2", {}, `${name} `, make("span", { class: "soft" }, count(group.length))),
      group.length ? make("div", { class: "table" }, table(group, this.selected)) : make("p", { class: "soft" }, "none"))),
      ...(hasMore ? [moreButton("Show earlier requests", () => { this.numPages++; this.polling.start(); })] : []));
    if (focused) this.lists.querySelector<HTMLElement>(`a[href="${CSS.escape(focused)}"]`)?.focus();
  }

  private async showStory(id: string) {
    let pages: RequestReport[];
    try {
      pages = await readPages<RequestReport>(this.numAnswerPages, (before) =>
        callJson(`v1/requests/${encodeURIComponent(id)}${before ? `?after=${before.answers.at(-1)!.index}` : ""}`));
    } catch (error) {
      if (!(error instanceof Failure) || error.code !== "request_not_found") throw error;
      return this.story.replaceChildren(make("p", { class: "error" }, `Request ${id} is not known: it is too old, or belongs to another key.`));
    }
    if (this.selected !== id) return;
    const report = pages[0]!;
    this.told = hasEnded(report);
    this.story.replaceChildren(
      make("h2", {}, report.id, " ", make("a", { href: "requests", "data-page": true, class: "soft" }, "close")),
      make("p", { class: "why" }, report.why),
      ...pages.flatMap(({ answers }) => answers).map((answer) => answerStory(answer, report)),
      ...(pages.at(-1)!.has_more ? [moreButton("Show more answers", () => this.showAnswers(this.numAnswerPages + 1))] : []),
      ...[neighbours(report)].filter((node) => node !== null));
  }
}

const hasEnded = ({ status }: RequestSummary) => status !== "queued" && status !== "running";
const moreButton = (text: string, onclick: () => void) => make("button", { type: "button", onclick }, text);

/** Return the first pages of a list, at most that many; `read` gets the page before. */
export async function readPages<P extends { has_more: boolean }>(most: number, read: (before: P | null) => Promise<P>): Promise<P[]> {
  const pages: P[] = [];
  do pages.push(await read(pages.at(-1) ?? null)); while (pages.at(-1)!.has_more && pages.length < most);
  return pages;
}

function table(reports: RequestSummary[], selected: string | null) {
  const head = ["Request", "Time", "First token", "Tokens", "Why"];
  return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))),
    make("tbody", {}, ...reports.map((report) => make("tr", { "aria-selected": String(report.id === selected) },
      make("td", {}, make("a", { href: `requests?id=${encodeURIComponent(report.id)}`, "data-page": true }, report.id)),
      make("td", { class: "figure" }, duration(report.total_seconds)),
      make("td", { class: "figure" }, report.first_token_seconds === null ? "–" : duration(report.first_token_seconds)),
      make("td", { class: "figure" }, tokens(report)),
      make("td", {}, waiting(report) ?? report.why)))));
}

/** Why a request waits, if it does. */
function waiting({ waiting_reason: reason }: RequestSummary): string | null {
  return reason ? `Waiting ${QUEUE_CAUSES[reason] ?? reason}` : null;
}

const sum = (values: number[]) => values.reduce((total, value) => total + value, 0);
const tokens = (report: RequestSummary) => `${count(report.num_prompt_tokens)} in, ${count(report.num_output_tokens)} out`;

/** The parts of a request's time, largest cause by cause, in the order in which they happen. They add up to its latency in the engine. */
export function parts(breakdown: Breakdown): [kind: string, label: string, seconds: number][] {
  const queue = Object.entries(breakdown.queue).map(([cause, seconds]): [string, string, number] =>
    [`queue-${cause}`, `waiting ${QUEUE_CAUSES[cause] ?? cause}`, seconds]);
  const rest: [string, string, number][] = [
    ["prefill", "its prompt", breakdown.prefill], ["decode", "decoding", breakdown.decode],
    ["others", "other requests' prompts in the same steps", breakdown.prefill_of_others], ["preempted", "preempted", breakdown.preempted],
    ["held", "held by the policy", breakdown.held], ["lost", "lost to engines that died", breakdown.lost],
  ];
  return [...queue, ...rest].filter(([, , seconds]) => seconds > 0);
}

function answerStory(answer: AnswerReport, report: RequestReport): HTMLElement {
  const all = parts(answer.breakdown), total = sum(all.map(([, , seconds]) => seconds));
  const bar = make("div", { class: "causes", role: "img", "aria-label": all.map(([, label, seconds]) => `${label}: ${duration(seconds)}`).join("; ") },
    ...all.map(([kind, label, seconds]) => {
      const part = make("div", { class: `cause ${kind}`, title: `${label}: ${duration(seconds)}` });
      part.style.flexGrow = String(seconds / Math.max(total, 1e-9));
      return part;
    }));
  const hasTimeline = answer.number !== undefined && answer.number !== null;
  return make("div", { class: "answer-story" },
    make("p", {}, report.num_answers > 1 ? `Answer ${answer.index + 1}: ` : "", `${duration(total)} in the engine, ${count(answer.num_prompt_tokens)} prompt tokens ` +
      `(${count(answer.num_cached_tokens)} cached), ${count(answer.num_output_tokens)} output tokens, ${answer.num_preemptions} preemptions, ${answer.finish_reason ?? answer.status}. `,
      hasTimeline && make("a", { href: `timeline?replica=${encodeURIComponent(answer.replica)}&request=${answer.number}`, "data-page": true }, "Show it on the timeline")),
    bar,
    make("ul", { class: "legend" }, ...all.map(([kind, label, seconds]) => make("li", {}, make("span", { class: `swatch cause ${kind}` }), `${label} ${duration(seconds)}`))));
}

function neighbours({ neighbours: list }: RequestReport): HTMLElement | null {
  if (!list?.length) return null;
  return make("div", {}, make("h3", {}, "Requests that slowed it down"), make("ul", {}, ...list.map(({ number, id, seconds, why }) =>
    make("li", {}, id ? make("a", { href: `requests?id=${encodeURIComponent(id)}`, "data-page": true }, id) : number === null ? "another key's request" : `request ${number}`, `: ${duration(seconds)}, ${NEIGHBOURS[why] ?? why}`))));
}
