/** The panel that shows how an agent was trained. */

import type { Card } from "./card";

const TOLD = [
  "epochs", "steps", "envs", "horizon", "passes", "global_batch", "learning_rate", "gamma", "gae", "ratio_clip", "entropy_weight",
  "net", "width", "layers", "agents", "grid", "walls", "seed", "eval_episodes", "greedy",
];

/** Without https or localhost a browser computes no SHA-256. */
const UNCHECKED = "not checked: browsers compute SHA-256 over https and on localhost only";

export function tellFacts(card: Card, checked: boolean): void {
  const { training } = card;
  const figures = Object.entries(training.metrics).map(([name, value]) => [name.replace("eval/", "evaluated "), figure(value)] as const);
  list("facts", [
    ["task", card.task], ["run", card.run], ["date", training.date], ["hardware", training.hardware],
    ["optimizer steps", training.step.toLocaleString("en")], ["training time", time(training.seconds)], ...figures,
    ["files", checked ? "SHA-256 checked" : UNCHECKED],
  ]);
  list("settings", TOLD.filter((key) => card.settings[key] !== undefined && card.settings[key] !== null).map((key) => [key.replaceAll("_", " "), String(card.settings[key])]));
  list("versions", Object.entries(training.versions ?? {}).map(([name, version]) => [name, String(version)]));
}

function list(id: string, rows: readonly (readonly [string, string])[]): void {
  document.getElementById(id)!.replaceChildren(
    ...rows.flatMap(([name, value]) => {
      const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
      [dt.textContent, dd.textContent] = [name, value];
      return [dt, dd];
    }),
  );
}

function figure(value: number): string {
  return Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function time(seconds: number): string {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
