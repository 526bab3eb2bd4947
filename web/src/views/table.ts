/** Shows the numbers of an environment that has no drawing. */

import { formatFixed, type View } from "./view";

const MAX_NUMBERS = 8; // shown of one part of the state

export const table: View = {
  canShow: () => true,
  height: 0.6,
  speed: 4,
  player: "Agent",
  columns: ["action", "return", ""],
  figures: (environment, agent) => [
    String(environment.actions[agent] ?? "none yet"),
    formatFixed(environment.returns[agent], 2),
    environment.ended[agent] ? "ended" : "",
  ],
  draw(context, width, height, environment, colour) {
    context.fillStyle = colour("board");
    context.fillRect(0, 0, width, height);
    const parts = environment.names.map((name) => [name, formatNumbers(environment.state(name))] as const);
    const rowHeight = Math.min(28, height / (parts.length + 1));
    context.font = `${Math.round(rowHeight * 0.55)}px ui-monospace, monospace`;
    parts.forEach(([name, text], i) => {
      context.fillStyle = colour("muted");
      context.fillText(name, rowHeight, rowHeight * (i + 1.2));
      context.fillStyle = colour("ink");
      context.fillText(text, Math.max(width * 0.25, 5 * rowHeight), rowHeight * (i + 1.2));
    });
  },
};

function formatNumbers(numbers: number[]): string {
  const first = numbers.slice(0, MAX_NUMBERS).map((n) => (Number.isInteger(n) ? String(n) : n.toFixed(3)));
  return first.join("  ") + (numbers.length > MAX_NUMBERS ? `  and ${numbers.length - MAX_NUMBERS} more` : "");
}
