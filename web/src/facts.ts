/** The panel that shows how an agent was trained. */

import type { Card } from "./card";

const SHOWN_SETTINGS = [
  "epochs", "steps", "envs", "horizon", "passes", "global_batch", "learning_rate", "gamma", "gae", "ratio_clip", "entropy_weight",
  "net", "width", "layers", "agents", "grid", "walls", "seed", "eval_episodes", "greedy",
];

/** Browsers compute SHA-256 only over https and on localhost. */
const UNCHECKED = "not checked: browsers compute SHA-256 over https and on localhost only";

export function showFacts(card: Card, checked: boolean): void {
  const { training } = card;
  const figures = Object.entries(training.metrics).map(([name, value]) => [name.replace("eval/", "evaluated "), formatFigure(value)] as const);
  showRows("facts", [
    ["task", card.task], ["run", card.run], ["date", training.date], ["hardware", training.hardware],
    ["optimizer steps", training.step.toLocaleString("en")], ["training time", formatDuration(training.seconds)], ...figures,
    ["files", checked ? "SHA-256 checked" : UNCHECKED],
  ]);
  showRows("settings", SHOWN_SETTINGS.filter((key) => card.settings[key] !== undefined && card.settings[key] !== null).map((key) => [key.replaceAll("_", " "), String(card.settings[key])]));
  showRows("versions", Object.entries(training.versions ?? {}).map(([name, version]) => [name, String(version)]));
}

function showRows(id: string, rows: readonly (readonly [string, string])[]): void {
  document.getElementById(id)!.replaceChildren(
    ...rows.flatMap(([name, value]) => {
      const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
      [dt.textContent, dd.textContent] = [name, value];
      return [dt, dd];
    }),
  );
}

function formatFigure(value: number): string {
  return Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function formatDuration(seconds: number): string {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
