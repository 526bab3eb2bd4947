import { statSync } from "node:fs";
import { defineConfig } from "vite";

const wasm = "node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.wasm";

/** Removes the attribute crossorigin: with it, a page opened from disk would have no style. */
const withoutCrossorigin = { name: "without-crossorigin", transformIndexHtml: { order: "post" as const, handler: (html: string) => html.replaceAll(" crossorigin", "") } };

export default defineConfig({
  plugins: [withoutCrossorigin],
  base: "./", // so that the page works in any sub-path
  define: { WASM_BYTES: statSync(wasm).size },
  build: { target: "es2022", assetsInlineLimit: 0, modulePreload: { polyfill: false }, reportCompressedSize: false },
});
