// Copies the built page into the Python package, with the wasm files compressed.
import { cpSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const page = process.argv[2] ?? "../src/drivetrain/page";
mkdirSync(page, { recursive: true });
for (const name of readdirSync(page)) if (name !== "agents") rmSync(`${page}/${name}`, { recursive: true });
cpSync("dist", page, { recursive: true });
for (const name of readdirSync(`${page}/assets`).filter((name) => name.endsWith(".wasm"))) {
  const path = `${page}/assets/${name}`;
  writeFileSync(`${path}.gz`, gzipSync(readFileSync(path), { level: 9 }));
  rmSync(path);
}
