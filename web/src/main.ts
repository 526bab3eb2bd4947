/** The page: shows one environment at a time, drawn once per screen frame. */

import { chance } from "./chance";
import { tellFacts } from "./facts";
import { json, Trouble } from "./files";
import { Steer, typing } from "./steer";
import { cartpole } from "./views/cartpole";
import { snake } from "./views/snake";
import { table } from "./views/table";
import type { View } from "./views/view";
import { runtimeBytes, World } from "./world";

const VIEWS = [snake, cartpole, table];
const OVER = 1200; // milliseconds between two episodes
const SPEEDS = [1, 2, 4, 8, 15, 25, 50, 100, 200]; // steps a second, for each position of the slider
const BUDGET = 14; // milliseconds of a frame for steps

interface Listed {
  format: number;
  agents: { name: string; folder: string }[];
}

function find<T extends HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

const canvas = find<HTMLCanvasElement>("canvas");
const pen = canvas.getContext("2d")!;
const [play, again, notice, progress] = [find("play"), find("again"), find("notice"), find<HTMLProgressElement>("progress")];
const [speed, seed] = [find<HTMLInputElement>("speed"), find<HTMLInputElement>("seed")];
const [agent, greedy, person] = [find<HTMLSelectElement>("agent"), find<HTMLSelectElement>("greedy"), find<HTMLSelectElement>("person")];
const steer = new Steer(canvas, find("pad"));

let world: World | undefined;
let view: View = table;
let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
let owed = 0; // steps that are due
let overSince = 0; // when the episode ended, or 0
let wanted = 0; // number of the latest load: results of earlier ones are dropped
let offered: (() => void) | undefined; // the action of the notice's button

// --- loading ------------------------------------------------------------------------------------

async function begin(): Promise<void> {
  try {
    const listed = await json<Listed>("agents.json", "Write the site anew: drivetrain play RUN --out DIR.");
    agent.replaceChildren(...listed.agents.map(({ name, folder }) => new Option(name, folder)));
    find("agents").hidden = listed.agents.length < 2;
    const asked = decoded(location.hash.slice(1));
    agent.selectedIndex = Math.max(0, listed.agents.findIndex(({ name }) => name === asked));
    await choose(agent.value);
  } catch (error) {
    tell(error);
  }
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a lone percent sign
  }
}

async function choose(folder: string): Promise<void> {
  const mine = ++wanted;
  const old = world;
  world = undefined;
  enable(false);
  const loaded = (count: number) => {
    const [now, all] = [count, runtimeBytes].map((size) => (size / 1e6).toFixed(1));
    if (mine === wanted) say("Loading the player", `${now} of ${all} MB`, count / runtimeBytes);
  };
  if (old) say("Loading the agent", " ");
  else loaded(0);
  try {
    await old?.release();
    const next = await World.load(folder, loaded);
    if (mine !== wanted) return void next.release();
    view = VIEWS.find((one) => one.fits(next.card)) ?? table;
    await next.reset(Number(seed.value) || 0);
    world = next;
    show(next);
  } catch (error) {
    if (mine === wanted) tell(error);
  }
}

function show(next: World): void {
  const { card } = next;
  document.title = `${card.task} - drivetrain play`;
  canvas.setAttribute("aria-label", `${card.task}, drawn; its figures are in the table "This episode"`);
  greedy.value = card.settings["greedy"] === false ? "drawn" : "likeliest";
  speed.value = String(SPEEDS.indexOf(view.speed));
  person.replaceChildren(new Option("nobody", ""), ...names(next).map((name, i) => new Option(name, String(i))));
  find("persons").hidden = !view.steered;
  takeOver();
  tellSpeed();
  tellFacts(card, next.checked);
  [owed, overSince] = [0, 0];
  hideNotice();
  resize();
  document.querySelector("aside")!.hidden = false;
  enable(true);
}

function enable(on: boolean): void {
  find("controls").querySelector("fieldset")!.disabled = !on;
  play.textContent = playing ? "Pause" : "Play";
}

// --- messages over the environment ----------------------------------------------------------------

/** `offer` is a button: its label and its action. */
function say(title: string, text: string, done?: number, kind = "", offer?: [string, () => void]): void {
  [find("notice-title").textContent, find("notice-text").textContent] = [title, text];
  notice.className = kind;
  notice.hidden = false;
  progress.hidden = done === undefined;
  progress.value = Math.min(1, done ?? 0);
  again.hidden = !offer;
  [again.textContent, offered] = offer ?? ["", undefined];
}

function hideNotice(): void {
  notice.hidden = true;
  offered = undefined;
}

function tell(error: unknown): void {
  world = undefined;
  wanted++; // drops the result of a load in progress
  enable(false);
  const retry: [string, () => void] = ["Try again", () => void begin()];
  if (error instanceof Trouble) say(error.file, `${error.message}.\n${error.advice}`, undefined, "trouble", retry);
  else say("The world stopped", `${String(error).split("\n")[0]}\nExport the run again (drivetrain export RUN), then reload.`, undefined, "trouble", retry);
}

/** What became of the person's own player, with a new episode at a button or the Enter key. */
function sayEnd(one: World, title: string, text: string): void {
  const next = () => {
    setPlaying(true);
    canvas.focus({ preventScroll: true });
    void restart(one, one.episode + 1).catch(tell);
  };
  say(title, text, undefined, "brief", ["Play again", next]);
}

// --- playing ------------------------------------------------------------------------------------

async function step(one: World): Promise<void> {
  const steered = view.steered;
  const mine = steer.agent;
  const turn = steered && mine !== undefined ? { agent: mine, action: steer.next(steered.heading(one, mine)) } : undefined;
  const alive = mine !== undefined && !one.ended[mine];
  await one.step({ greedy: greedy.value === "likeliest", person: turn });
  if (alive && one.ended[mine] && mine === steer.agent) sayEnd(one, `You died at step ${one.steps}`, one.done ? "" : "The others play on.");
}

async function restart(one: World, episode: number): Promise<void> {
  seed.value = String(episode);
  await one.reset(episode);
  [owed, overSince] = [0, 0];
  steer.take(steer.agent); // drops the turns of the last episode
  hideNotice();
}

/** Takes the steps that are due, as far as the frame's time allows. */
async function advance(one: World, now: number, passed: number): Promise<void> {
  if (one.done) {
    if (!overSince) {
      overSince = now;
      const title = `Over after ${one.steps} steps`;
      if (steer.agent === undefined) say(title, "", undefined, "brief");
      else sayEnd(one, title, one.ended[steer.agent] ? "You died." : "You are still alive.");
    } else if (steer.agent === undefined && now - overSince > OVER) await restart(one, one.episode + 1);
    return;
  }
  owed = Math.min(owed + passed * rate(), rate() / 4 + 1);
  for (; owed >= 1 && !one.done && performance.now() - now < BUDGET; owed--) await step(one);
}

let before = 0;
const drawn = { since: 0, frames: 0, steps: 0 };

async function frame(now: number): Promise<void> {
  const one = world;
  if (one) {
    try {
      const had = one.steps;
      if (playing) await advance(one, now, Math.min(0.25, (now - before) / 1000));
      drawn.frames++;
      drawn.steps += Math.max(0, one.steps - had);
      if (one === world) draw(one);
    } catch (error) {
      if (one === world) tell(error);
    }
    if (now - drawn.since > 500) {
      const [frames, steps] = [drawn.frames, drawn.steps].map((count) => ((count * 1000) / (now - drawn.since)).toFixed(0));
      find("rate").textContent = `${frames} FPS, ${steps} steps/s`;
      [drawn.since, drawn.frames, drawn.steps] = [now, 0, 0];
    }
  }
  before = now;
  requestAnimationFrame(frame);
}

// --- drawing ------------------------------------------------------------------------------------

let colours = getComputedStyle(document.documentElement);

function draw(one: World): void {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const dense = canvas.width / Math.max(1, width);
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  view.draw(pen, width, height, one, (name) => colours.getPropertyValue(`--${name}`), steer.agent);
  find("episode").textContent = `Episode ${one.episode}, step ${one.steps}`;
  score(one);
}

function resize(): void {
  find("board").classList.toggle("low", view.height < 1);
  canvas.style.aspectRatio = `1 / ${view.height}`;
  const dense = Math.min(2, devicePixelRatio || 1);
  [canvas.width, canvas.height] = [canvas.clientWidth * dense, canvas.clientHeight * dense].map(Math.round) as [number, number];
  if (world) draw(world);
}

function names(one: World): string[] {
  return one.agents > 1 ? Array.from({ length: one.agents }, (_, i) => `${view.player} ${i + 1}`) : [view.player];
}

/** Updates one row per agent; writes only what changed. */
function score(one: World): void {
  const scores = find<HTMLTableElement>("scores");
  const heads = ["", ...view.columns];
  write(scores.tHead!, [heads], "th");
  write(scores.tBodies[0]!, names(one).map((name, i) => [i === steer.agent ? `${name} (you)` : name, ...view.figures(one, i)]), "td", one.agents > 1);
  [...scores.tBodies[0]!.rows].forEach((row, i) => row.classList.toggle("ended", Boolean(one.ended[i])));
}

function write(part: HTMLTableSectionElement, rows: string[][], kind: "td" | "th", swatches = false): void {
  if (part.rows.length !== rows.length || part.rows[0]?.cells.length !== rows[0]?.length) {
    part.replaceChildren(...rows.map((row, i) => line(row.length, i, kind, swatches)));
  }
  rows.forEach((row, i) =>
    row.forEach((text, j) => {
      const place = part.rows[i]!.cells[j]!.lastChild as Text;
      if (place.data !== text) place.data = text;
    }),
  );
}

function line(cells: number, index: number, kind: "td" | "th", swatches: boolean): HTMLTableRowElement {
  const row = document.createElement("tr");
  for (let j = 0; j < cells; j++) {
    const cell = document.createElement(j ? kind : "th");
    cell.scope = kind === "th" ? "col" : j ? "" : "row";
    if (swatches && !j) cell.innerHTML = `<svg class="swatch player-${index}" viewBox="0 0 2 2" aria-hidden="true"><circle cx="1" cy="1" r="1"/></svg>`;
    cell.append(document.createTextNode(""));
    row.append(cell);
  }
  return row;
}

// --- controls -----------------------------------------------------------------------------------

function rate(): number {
  return SPEEDS[Number(speed.value)] ?? 1;
}

function tellSpeed(): void {
  find("speed-said").textContent = `${rate()} steps/s`;
  speed.setAttribute("aria-valuetext", `${rate()} steps a second`);
}

function setPlaying(on: boolean): void {
  playing = on;
  owed = 0;
  play.textContent = on ? "Pause" : "Play";
}

function takeOver(): void {
  steer.take(person.value === "" ? undefined : Number(person.value));
  find("pad").hidden = steer.agent === undefined;
  canvas.classList.toggle("steered", steer.agent !== undefined);
  if (notice.classList.contains("brief")) hideNotice();
  if (world && steer.agent !== undefined && world.ended[steer.agent]) sayEnd(world, `${names(world)[steer.agent]} is dead`, "");
}

async function single(): Promise<void> {
  setPlaying(false);
  if (!world) return;
  if (world.done) await restart(world, world.episode + 1);
  else await step(world);
  draw(world);
}

play.addEventListener("click", () => setPlaying(!playing));
find("step").addEventListener("click", () => void single().catch(tell));
find("reset").addEventListener("click", () => world && void restart(world, asked()).catch(tell));
seed.addEventListener("change", () => world && void restart(world, asked()).catch(tell));
speed.addEventListener("input", tellSpeed);
person.addEventListener("change", () => {
  takeOver();
  if (steer.agent !== undefined) canvas.focus({ preventScroll: true }); // the arrow keys are the snake's from now on
});
agent.addEventListener("change", () => {
  location.hash = agent.selectedOptions[0]?.text ?? "";
  void choose(agent.value);
});
again.addEventListener("click", () => offered?.());
find("controls").addEventListener("submit", (event) => event.preventDefault());
addEventListener("keydown", (event) => {
  if (event.code === "Enter" && event.target === canvas) offered?.();
  if (event.code !== "Space" || typing(event.target) || event.target instanceof HTMLButtonElement || !world) return;
  if ((event.target as HTMLElement).tagName === "SUMMARY") return;
  event.preventDefault();
  setPlaying(!playing);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (colours = getComputedStyle(document.documentElement)));
new ResizeObserver(resize).observe(find("board"));

function asked(): number {
  return Math.min(2 ** 32 - 1, Math.max(0, Math.floor(Number(seed.value) || 0)));
}

// --- for the console, and for tests -------------------------------------------------------------

const hook = {
  /** The random numbers of a step. */
  chance: (episode: number, step: number, count: number) => Array.from(chance(episode, step, count)),
  pause: () => setPlaying(false),
  play: () => setPlaying(true),
  /** Begin an episode; play one step; both give the state. */
  reset: async (episode: number) => world && (await restart(world, episode), hook.state()),
  step: async () => world && (await step(world), hook.state()),
  /** The current state as plain numbers; undefined while loading. */
  state: () =>
    world && {
      episode: world.episode, steps: world.steps, done: world.done, ended: world.ended, returns: world.returns, actions: world.actions,
      probability: world.probability, state: Object.fromEntries(world.names.map((name) => [name, world!.state(name)])),
    },
};
Object.assign(window, { drivetrain: hook });

requestAnimationFrame(frame);
void begin();
