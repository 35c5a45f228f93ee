// The application: a header with the pages, the API key, and the page that the address names.

import "./style.css";
import { ApiPage } from "./apiReference";
import { ChatPage } from "./chat/page";
import { byId, make } from "./dom";
import { MemoryPage } from "./memory";
import type { Page } from "./page";
import { ReplicasPage } from "./replicas";
import { RequestsPage } from "./requests";
import { server } from "./server";
import { readRecording } from "./timeline/recording";
import { TimelinePage } from "./timeline/page";

/** The pages by path, for the console of a browser: `inflight.pages.timeline.store` holds the steps. */
export const pages: Record<string, Page> = {};

function start() {
  const recording = readRecording();
  Object.assign(pages, recording
    ? { "": new TimelinePage(recording) }
    : {
        "": new ChatPage(),
        timeline: new TimelinePage(),
        requests: new RequestsPage(),
        memory: new MemoryPage(),
        replicas: new ReplicasPage(),
        docs: new ApiPage(),
      });
  buildShell(recording !== null);
  let current: Page | null = null;

  function show() {
    const name = recording ? "" : location.pathname.split("/").pop()!;
    const page = pages[name] ?? pages[""]!;
    if (page !== current) {
      current?.hide();
      current = page;
      byId("page").replaceChildren(page.root);
      document.title = page.title === "Chat" ? "inflight" : `inflight: ${page.title}`;
      for (const link of document.querySelectorAll("nav a"))
        link.toggleAttribute("aria-current", link.textContent === page.title);
      document.querySelector("nav a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    page.show(new URLSearchParams(location.search));
  }

  // Links between pages change only the address and the page: streams and recorded steps stay.
  document.addEventListener("click", (event) => {
    const link = (event.target as Element).closest?.<HTMLAnchorElement>("a[data-page]");
    if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    event.preventDefault();
    history.pushState(null, "", link.href);
    show();
  });
  addEventListener("popstate", show);
  show();
  if (!recording) void server.connect();
}

function buildShell(isRecording: boolean) {
  const links = Object.entries(pages).map(([path, page]) =>
    make("a", { href: path || "./", "data-page": true }, page.title));
  const key = make("input", { id: "key", type: "password", autocomplete: "off", placeholder: "if required",
    onchange: () => server.setKey(key.value) });
  const keyField = make("details", { id: "access" }, make("summary", {}, "API key"), make("label", {}, "API key ", key));
  document.body.append(
    make("header", {}, make("h1", {}, "inflight"),
      isRecording ? make("span", { id: "model" }, document.getElementById("before") ? "comparison" : "recording") : make("nav", { "aria-label": "Pages" }, ...links),
      !isRecording && make("span", { id: "model", role: "status" }), !isRecording && keyField),
    make("div", { id: "notice", role: "status" }),
    make("main", { id: "page" }),
  );
  // A document may have a text before and after the page.
  const [before, after] = [document.getElementById("before"), document.getElementById("after")];
  if (before && after) {
    document.body.classList.add("document");
    byId("page").before(before);
    byId("page").after(after);
  }
}

start();
