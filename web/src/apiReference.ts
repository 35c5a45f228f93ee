// The page with all routes of the server, their fields and an example of each.

import { access, callJson, Failure, KEY_ERRORS } from "./api";
import { make } from "./dom";
import type { Page } from "./page";
import { server } from "./server";

interface Schema {
  $ref?: string; type?: string; description?: string; properties?: Record<string, Schema>; required?: string[]; anyOf?: Schema[];
  enum?: unknown[]; const?: unknown; items?: Schema; default?: unknown; example?: unknown; examples?: unknown[];
}
interface Operation {
  summary?: string; description?: string; tags?: string[];
  requestBody?: { content: Record<string, { schema: Schema; example?: unknown }> };
  parameters?: { name: string; in: string; required?: boolean; description?: string; schema: Schema }[];
  responses?: Record<string, { description?: string }>;
}
interface Document {
  info: { title: string; version: string; description: string };
  paths: Record<string, Record<string, Operation>>;
  components?: { schemas: Record<string, Schema> };
}

export class ApiPage implements Page {
  readonly title = "API";
  readonly root = make("section", { class: "text-page", id: "api" });

  show() {
    void this.load();
  }

  hide() {}

  private async load() {
    try {
      const document = await callJson<Document>("openapi.json");
      const routes = Object.entries(document.paths).flatMap(([path, methods]) =>
        Object.entries(methods).map(([method, operation]) => route(document, method, path, operation)));
      this.root.replaceChildren(make("h2", {}, `${document.info.title} ${document.info.version}`),
        make("p", {}, `${document.info.description} For programs: `, make("a", { href: "openapi.json" }, "openapi.json"), "."), ...routes);
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      this.root.replaceChildren(make("p", { class: "error" }, error.message));
      if (error.code in KEY_ERRORS) server.requireKey();
    }
  }
}

function route(document: Document, method: string, path: string, operation: Operation): HTMLElement {
  const body = operation.requestBody?.content["application/json"], schema = body && resolve(document, body.schema);
  const fields = Object.entries(schema?.properties ?? {}).map(([name, field]): [string, string, string] =>
    [name, kind(field) + (schema!.required?.includes(name) ? ", required" : ""), field.description ?? ""]);
  for (const { name, in: where, required, description, schema: own } of operation.parameters ?? [])
    fields.unshift([name, `${kind(own)}, in the ${where}${required ? ", required" : ""}`, description ?? own.description ?? ""]);
  return make("details", { class: "route" },
    make("summary", {}, make("b", {}, method.toUpperCase()), " ", make("code", {}, path), " ", make("span", { class: "soft" }, operation.description ?? "")),
    make("h3", {}, "Example"), make("pre", { tabindex: 0 }, make("code", {}, example(document, method, path, body?.example ?? schema?.examples?.[0] ?? schema?.example, schema))),
    fields.length ? make("h3", {}, "Fields") : null,
    fields.length ? make("dl", { class: "fields" }, ...fields.map(([name, type, text]) =>
      make("div", {}, make("dt", {}, make("code", {}, name), " ", make("span", { class: "soft" }, type)), make("dd", {}, text)))) : null);
}

/** A curl command that calls the route. */
export function example(document: Document, method: string, path: string, given: unknown, schema?: Schema): string {
  const base = location.href.replace(/\/[^/]*$/, ""), filled = path.replace(/\{[^}]+\}/g, (name) => name.slice(1, -1).toUpperCase());
  const key = access.key ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
  if (method === "get") return `curl ${base}${filled}${key}`;
  const body = given ?? (schema ? minimal(document, schema) : undefined);
  const data = body === undefined ? "" : ` \\\n  -H "Content-Type: application/json" \\\n  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
  return `curl -X ${method.toUpperCase()} ${base}${filled}${key}${data}`;
}

/** The required fields of a schema, each with a plausible value. */
function minimal(document: Document, schema: Schema, depth = 0): unknown {
  const own = resolve(document, schema);
  if (own.examples?.length) return own.examples[0];
  if (own.example !== undefined) return own.example;
  if (own.const !== undefined) return own.const;
  if (own.enum?.length) return own.enum[0];
  if (own.anyOf) return minimal(document, own.anyOf.find((one) => one.type !== "null") ?? own.anyOf[0]!, depth);
  if (own.type === "object" || own.properties)
    return Object.fromEntries((own.required ?? []).map((name) => [name, depth > 4 ? null : minimal(document, own.properties?.[name] ?? {}, depth + 1)]));
  if (own.type === "array") return depth > 4 ? [] : [minimal(document, own.items ?? {}, depth + 1)];
  return { integer: 1, number: 1, boolean: true, string: "text" }[own.type ?? "string"] ?? "text";
}

function resolve(document: Document, schema: Schema): Schema {
  return schema.$ref ? document.components?.schemas[schema.$ref.split("/").pop()!] ?? {} : schema;
}

/** The type of a field in a few words. */
function kind(field: Schema): string {
  if (field.$ref) return field.$ref.split("/").pop()!;
  if (field.anyOf) return [...new Set(field.anyOf.map(kind))].filter((name) => name !== "null").join(" or ");
  if (field.enum || field.const !== undefined) return (field.enum ?? [field.const]).map(String).join(", ");
  if (field.type === "array" && field.items) return `array of ${kind(field.items)}`;
  return field.type ?? "any";
}
