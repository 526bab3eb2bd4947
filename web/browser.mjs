// Controls a browser for tests: reads one JSON command per line from stdin, writes one JSON answer per line to stdout.
//   {"open": URL, "width": 1200, "height": 900, "scheme": "light"}   {"run": "JavaScript"}   {"press": "ArrowUp"}
//   {"click": "#play"}   {"choose": ["#person", "0"]}   {"shot": "file.png"}   {"seen": true}: requests, bytes and errors
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const quiet = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run"];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: quiet });
let page, seen;

async function open({ open: url, width = 1200, height = 900, scheme = "light", touch = false, hold = "", insecure = false }) {
  await page?.context().close();
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: scheme, hasTouch: touch });
  page = await context.newPage();
  seen = { requests: [], bytes: {}, errors: [] };
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("console", (message) => message.type() === "error" && seen.errors.push(message.text()));
  page.on("requestfinished", async (request) => (seen.bytes[request.url()] = (await request.sizes()).responseBodySize));
  if (insecure) await page.addInitScript(() => Object.defineProperty(crypto, "subtle", { value: undefined })); // as if without https
  if (hold) await page.route(new RegExp(hold), () => {}); // these requests get no answer
  await page.goto(url);
}

const verbs = {
  open,
  run: ({ run }) => page.evaluate(run),
  press: ({ press }) => page.keyboard.press(press),
  click: ({ click }) => page.click(click),
  choose: ({ choose }) => page.selectOption(...choose),
  shot: ({ shot, whole = false }) => page.screenshot({ path: shot, fullPage: whole }),
  seen: () => seen,
};

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  const verb = Object.keys(verbs).find((name) => name in command);
  try {
    console.log(JSON.stringify({ answer: (await verbs[verb](command)) ?? null }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error) }));
  }
}
await browser.close();
