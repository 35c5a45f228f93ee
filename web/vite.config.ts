/// <reference types="vitest/config" />
import { defineConfig } from "vite";

// One script and one style sheet: the server inlines both into the document, so that its content security policy can name
// them by their hashes and pages need no further requests.
export default defineConfig({
  build: {
    outDir: "../inflight/web",
    emptyOutDir: false,
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    modulePreload: false,
    lib: { entry: "src/main.ts", formats: ["iife"], name: "inflight", fileName: () => "app.js", cssFileName: "app" },
  },
  test: { include: ["test/**/*.test.ts"] },
});
