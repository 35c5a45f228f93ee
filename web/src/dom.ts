// Small helpers to build and find elements. Text is always set as text, never as markup.

export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const node = document.getElementById(id);
  if (!node) throw new Error(`there is no element #${id}`);
  return node as T;
}

type Child = Node | string | null | undefined | false;
type Properties = Record<string, string | number | boolean | ((event: never) => void)>;

/** Create an element: `make("button", { class: "small", onclick: stop }, "Stop")`. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K, properties: Properties = {}, ...children: Child[]
): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value as EventListener);
    else if (typeof value === "boolean") node.toggleAttribute(name, value);
    else node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child): child is Node | string => Boolean(child)));
  return node;
}

export const sleep = (ms: number) => new Promise<void>((done) => setTimeout(done, ms));
