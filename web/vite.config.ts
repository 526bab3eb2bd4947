import { statSync } from "node:fs";
import { defineConfig } from "vite";

const wasm = "node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.wasm";

/** Files of the same origin need no CORS; with it, a page opened from disk would have no style. */
const plain = { name: "plain-links", transformIndexHtml: { order: "post" as const, handler: (html: string) => html.replaceAll(" crossorigin", "") } };

export default defineConfig({
  plugins: [plain],
  base: "./", // so that the page works in any sub-path
  define: { WASM_BYTES: statSync(wasm).size },
  build: { target: "es2022", assetsInlineLimit: 0, modulePreload: { polyfill: false }, reportCompressedSize: false },
});
