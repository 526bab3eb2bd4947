/** The page: shows one environment at a time, and draws it once per screen frame. */

import { Environment, runtimeBytes } from "./environment";
import { showFacts } from "./facts";
import { LoadError, loadJson } from "./files";
import { randomNumbers } from "./random";
import { isTyping, Steer } from "./steer";
import { cartpole } from "./views/cartpole";
import { snake } from "./views/snake";
import { table } from "./views/table";
import type { View } from "./views/view";

const VIEWS = [snake, cartpole, table];
const PAUSE_BETWEEN_EPISODES_MS = 1200;
const SPEEDS = [1, 2, 4, 8, 15, 25, 50, 100, 200]; // steps a second, for each position of the slider
const STEP_BUDGET_MS = 14; // of each screen frame

/** The contents of agents.json. */
interface AgentList {
  format: number;
  agents: { name: string; folder: string }[];
}

/** Returns the element with this id. */
function find<T extends HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

const canvas = find<HTMLCanvasElement>("canvas");
const context = canvas.getContext("2d")!;
const [play, again, notice, progress] = [find("play"), find("again"), find("notice"), find<HTMLProgressElement>("progress")];
const [speed, seed] = [find<HTMLInputElement>("speed"), find<HTMLInputElement>("seed")];
const [agent, greedy, person] = [find<HTMLSelectElement>("agent"), find<HTMLSelectElement>("greedy"), find<HTMLSelectElement>("person")];
const steer = new Steer(canvas, find("pad"));

let environment: Environment | undefined;
let view: View = table;
let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
let stepsDue = 0;
let endTime = 0; // of the episode, or 0 while it runs
let latestLoad = 0; // results of earlier loads are dropped
let buttonAction: (() => void) | undefined; // of the notice's button

// --- loading ------------------------------------------------------------------------------------

async function loadAgents(): Promise<void> {
  try {
    const listed = await loadJson<AgentList>("agents.json", "Write the site again: drivetrain play RUN --out DIR.");
    agent.replaceChildren(...listed.agents.map(({ name, folder }) => new Option(name, folder)));
    find("agents").hidden = listed.agents.length < 2;
    const nameInAddress = decode(location.hash.slice(1));
    agent.selectedIndex = Math.max(0, listed.agents.findIndex(({ name }) => name === nameInAddress));
    await loadAgent(agent.value);
  } catch (error) {
    showError(error);
  }
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a percent sign without a code
  }
}

async function loadAgent(folder: string): Promise<void> {
  const thisLoad = ++latestLoad;
  const old = environment;
  environment = undefined;
  enableControls(false);
  const showProgress = (numBytes: number) => {
    const [loaded, total] = [numBytes, runtimeBytes].map((size) => (size / 1e6).toFixed(1));
    if (thisLoad === latestLoad) showNotice("Loading the player", `${loaded} of ${total} MB`, numBytes / runtimeBytes);
  };
  if (old) showNotice("Loading the agent", " ");
  else showProgress(0);
  try {
    await old?.release();
    const next = await Environment.load(folder, showProgress);
    if (thisLoad !== latestLoad) return void next.release();
    view = VIEWS.find((candidate) => candidate.canShow(next.card)) ?? table;
    await next.reset(Number(seed.value) || 0);
    environment = next;
    showEnvironment(next);
  } catch (error) {
    if (thisLoad === latestLoad) showError(error);
  }
}

function showEnvironment(next: Environment): void {
  const { card } = next;
  document.title = `${card.task} - drivetrain play`;
  canvas.setAttribute("aria-label", `${card.task}, as a drawing; its figures are in the table "This episode"`);
  greedy.value = card.settings["greedy"] === false ? "drawn" : "likeliest";
  speed.value = String(SPEEDS.indexOf(view.speed));
  person.replaceChildren(new Option("nobody", ""), ...playerNames(next).map((name, i) => new Option(name, String(i))));
  find("persons").hidden = !view.steering;
  choosePlayer();
  showSpeed();
  showFacts(card, next.checked);
  [stepsDue, endTime] = [0, 0];
  hideNotice();
  resize();
  document.querySelector("aside")!.hidden = false;
  enableControls(true);
}

function enableControls(isEnabled: boolean): void {
  find("controls").querySelector("fieldset")!.disabled = !isEnabled;
  play.textContent = playing ? "Pause" : "Play";
}

// --- messages over the environment ----------------------------------------------------------------

/** `fraction` of the progress bar, none by default; `button` is a label and an action. */
function showNotice(title: string, text: string, fraction?: number, kind = "", button?: [string, () => void]): void {
  [find("notice-title").textContent, find("notice-text").textContent] = [title, text];
  notice.className = kind;
  notice.hidden = false;
  progress.hidden = fraction === undefined;
  progress.value = Math.min(1, fraction ?? 0);
  again.hidden = !button;
  [again.textContent, buttonAction] = button ?? ["", undefined];
}

function hideNotice(): void {
  notice.hidden = true;
  buttonAction = undefined;
}

function showError(error: unknown): void {
  environment = undefined;
  latestLoad++; // drops the result of a load in progress
  enableControls(false);
  const retry: [string, () => void] = ["Try again", () => void loadAgents()];
  if (error instanceof LoadError) showNotice(error.file, `${error.message}.\n${error.advice}`, undefined, "trouble", retry);
  else showNotice("The environment stopped", `${String(error).split("\n")[0]}\nExport the run again (drivetrain export RUN), then reload.`, undefined, "trouble", retry);
}

/** Shows how the episode of the person's agent ended; a button or the Enter key starts a new episode. */
function showEnd(shown: Environment, title: string, text: string): void {
  const next = () => {
    setPlaying(true);
    canvas.focus({ preventScroll: true });
    void restart(shown, shown.episode + 1).catch(showError);
  };
  showNotice(title, text, undefined, "brief", ["Play again", next]);
}

// --- playing ------------------------------------------------------------------------------------

async function step(shown: Environment): Promise<void> {
  const steering = view.steering;
  const played = steer.agent; // by the person
  let turn: { agent: number; action: number } | undefined;
  if (steering && played !== undefined) turn = { agent: played, action: steer.nextTurn(steering.heading(shown, played)) };
  const wasAlive = played !== undefined && !shown.ended[played];
  await shown.step({ greedy: greedy.value === "likeliest", person: turn });
  if (wasAlive && shown.ended[played] && played === steer.agent) showEnd(shown, `You died at step ${shown.steps}`, shown.done ? "" : "The others play on.");
}

async function restart(shown: Environment, episode: number): Promise<void> {
  seed.value = String(episode);
  await shown.reset(episode);
  [stepsDue, endTime] = [0, 0];
  steer.setAgent(steer.agent); // drops the turns of the last episode
  hideNotice();
}

/** Takes the steps that are due, but stops when the frame's time is used up. */
async function advance(shown: Environment, now: number, elapsedSeconds: number): Promise<void> {
  if (shown.done) {
    if (!endTime) {
      endTime = now;
      const title = `Over after ${shown.steps} steps`;
      if (steer.agent === undefined) showNotice(title, "", undefined, "brief");
      else showEnd(shown, title, shown.ended[steer.agent] ? "You died." : "You are still alive.");
    } else if (steer.agent === undefined && now - endTime > PAUSE_BETWEEN_EPISODES_MS) await restart(shown, shown.episode + 1);
    return;
  }
  stepsDue = Math.min(stepsDue + elapsedSeconds * stepsPerSecond(), stepsPerSecond() / 4 + 1);
  for (; stepsDue >= 1 && !shown.done && performance.now() - now < STEP_BUDGET_MS; stepsDue--) await step(shown);
}

let previousTime = 0;
const counted = { since: 0, frames: 0, steps: 0 }; // for the display of FPS and speed

async function frame(now: number): Promise<void> {
  const shown = environment;
  if (shown) {
    try {
      const stepsBefore = shown.steps;
      if (playing) await advance(shown, now, Math.min(0.25, (now - previousTime) / 1000));
      counted.frames++;
      counted.steps += Math.max(0, shown.steps - stepsBefore);
      if (shown === environment) draw(shown);
    } catch (error) {
      if (shown === environment) showError(error);
    }
    if (now - counted.since > 500) {
      const [frames, steps] = [counted.frames, counted.steps].map((count) => ((count * 1000) / (now - counted.since)).toFixed(0));
      find("rate").textContent = `${frames} FPS, ${steps} steps/s`;
      [counted.since, counted.frames, counted.steps] = [now, 0, 0];
    }
  }
  previousTime = now;
  requestAnimationFrame(frame);
}

// --- drawing ------------------------------------------------------------------------------------

let colours = getComputedStyle(document.documentElement);

function draw(shown: Environment): void {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const pixelRatio = canvas.width / Math.max(1, width);
  context.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
  view.draw(context, width, height, shown, (name) => colours.getPropertyValue(`--${name}`), steer.agent);
  find("episode").textContent = `Episode ${shown.episode}, step ${shown.steps}`;
  updateScores(shown);
}

function resize(): void {
  find("board").classList.toggle("low", view.height < 1);
  canvas.style.aspectRatio = `1 / ${view.height}`;
  const pixelRatio = Math.min(2, devicePixelRatio || 1);
  [canvas.width, canvas.height] = [canvas.clientWidth * pixelRatio, canvas.clientHeight * pixelRatio].map(Math.round) as [number, number];
  if (environment) draw(environment);
}

function playerNames(shown: Environment): string[] {
  return shown.agents > 1 ? Array.from({ length: shown.agents }, (_, i) => `${view.player} ${i + 1}`) : [view.player];
}

/** Updates shown row per agent; writes only what changed. */
function updateScores(shown: Environment): void {
  const scores = find<HTMLTableElement>("scores");
  const heads = ["", ...view.columns];
  updateCells(scores.tHead!, [heads], "th");
  const rows = playerNames(shown).map((name, i) => [i === steer.agent ? `${name} (you)` : name, ...view.figures(shown, i)]);
  updateCells(scores.tBodies[0]!, rows, "td", shown.agents > 1);
  [...scores.tBodies[0]!.rows].forEach((row, i) => row.classList.toggle("ended", Boolean(shown.ended[i])));
}

function updateCells(part: HTMLTableSectionElement, rows: string[][], kind: "td" | "th", swatches = false): void {
  if (part.rows.length !== rows.length || part.rows[0]?.cells.length !== rows[0]?.length) {
    part.replaceChildren(...rows.map((row, i) => newRow(row.length, i, kind, swatches)));
  }
  rows.forEach((row, i) =>
    row.forEach((text, j) => {
      const node = part.rows[i]!.cells[j]!.lastChild as Text;
      if (node.data !== text) node.data = text;
    }),
  );
}

function newRow(numCells: number, index: number, kind: "td" | "th", swatches: boolean): HTMLTableRowElement {
  const row = document.createElement("tr");
  for (let j = 0; j < numCells; j++) {
    const cell = document.createElement(j ? kind : "th");
    if (kind === "th") cell.scope = "col";
    else if (j === 0) cell.scope = "row";
    if (swatches && !j) cell.innerHTML = `<svg class="swatch player-${index}" viewBox="0 0 2 2" aria-hidden="true"><circle cx="1" cy="1" r="1"/></svg>`;
    cell.append(document.createTextNode(""));
    row.append(cell);
  }
  return row;
}

// --- controls -----------------------------------------------------------------------------------

function stepsPerSecond(): number {
  return SPEEDS[Number(speed.value)] ?? 1;
}

function showSpeed(): void {
  find("speed-said").textContent = `${stepsPerSecond()} steps/s`;
  speed.setAttribute("aria-valuetext", `${stepsPerSecond()} steps a second`);
}

function setPlaying(isPlaying: boolean): void {
  playing = isPlaying;
  stepsDue = 0;
  play.textContent = isPlaying ? "Pause" : "Play";
}

/** Gives the chosen agent to the person, or to nobody. */
function choosePlayer(): void {
  steer.setAgent(person.value === "" ? undefined : Number(person.value));
  find("pad").hidden = steer.agent === undefined;
  canvas.classList.toggle("steered", steer.agent !== undefined);
  if (notice.classList.contains("brief")) hideNotice();
  if (environment && steer.agent !== undefined && environment.ended[steer.agent]) showEnd(environment, `${playerNames(environment)[steer.agent]} is dead`, "");
}

async function stepOnce(): Promise<void> {
  setPlaying(false);
  if (!environment) return;
  if (environment.done) await restart(environment, environment.episode + 1);
  else await step(environment);
  draw(environment);
}

play.addEventListener("click", () => setPlaying(!playing));
find("step").addEventListener("click", () => void stepOnce().catch(showError));
find("reset").addEventListener("click", () => environment && void restart(environment, chosenSeed()).catch(showError));
seed.addEventListener("change", () => environment && void restart(environment, chosenSeed()).catch(showError));
speed.addEventListener("input", showSpeed);
person.addEventListener("change", () => {
  choosePlayer();
  if (steer.agent !== undefined) canvas.focus({ preventScroll: true }); // from now on the arrow keys steer the snake
});
agent.addEventListener("change", () => {
  location.hash = agent.selectedOptions[0]?.text ?? "";
  void loadAgent(agent.value);
});
again.addEventListener("click", () => buttonAction?.());
find("controls").addEventListener("submit", (event) => event.preventDefault());
addEventListener("keydown", (event) => {
  if (event.code === "Enter" && event.target === canvas) buttonAction?.();
  if (event.code !== "Space" || isTyping(event.target) || event.target instanceof HTMLButtonElement || !environment) return;
  if ((event.target as HTMLElement).tagName === "SUMMARY") return;
  event.preventDefault();
  setPlaying(!playing);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (colours = getComputedStyle(document.documentElement)));
new ResizeObserver(resize).observe(find("board"));

function chosenSeed(): number {
  return Math.min(2 ** 32 - 1, Math.max(0, Math.floor(Number(seed.value) || 0)));
}

// --- for the browser's console and for tests -------------------------------------------------------------

const consoleApi = {
  /** The random numbers of a step. */
  chance: (episode: number, step: number, count: number) => Array.from(randomNumbers(episode, step, count)),
  pause: () => setPlaying(false),
  play: () => setPlaying(true),
  /** `reset` starts an episode and `step` takes shown step; both return the state. */
  reset: async (episode: number) => environment && (await restart(environment, episode), consoleApi.state()),
  step: async () => environment && (await step(environment), consoleApi.state()),
  /** Returns the current state as plain numbers; undefined while loading. */
  state: () =>
    environment && {
      episode: environment.episode, steps: environment.steps, done: environment.done, ended: environment.ended, returns: environment.returns, actions: environment.actions,
      probability: environment.probability, state: Object.fromEntries(environment.names.map((name) => [name, environment!.state(name)])),
    },
};
Object.assign(window, { drivetrain: consoleApi });

requestAnimationFrame(frame);
void loadAgents();
