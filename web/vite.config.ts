import { statSync } from "node:fs";
import { defineConfig } from "vite";

const wasm = "node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.wasm";

export default defineConfig({
  base: "./", // so that the page works in any sub-path
  define: { WASM_BYTES: statSync(wasm).size },
  build: { target: "es2022", assetsInlineLimit: 0, modulePreload: { polyfill: false }, reportCompressedSize: false },
});
