/** A world that nobody drew: its numbers. */

import { fixed, type View } from "./view";

const SHOWN = 8; // numbers of one part

export const table: View = {
  fits: () => true,
  height: 0.6,
  speed: 4,
  player: "Agent",
  columns: ["action", "return", ""],
  figures: (world, agent) => [
    String(world.actions[agent] ?? "none yet"),
    fixed(world.returns[agent], 2),
    world.ended[agent] ? "ended" : "",
  ],
  draw(pen, width, height, world, colour) {
    pen.fillStyle = colour("board");
    pen.fillRect(0, 0, width, height);
    const lines = world.names.map((name) => [name, shown(world.state(name))] as const);
    const row = Math.min(28, height / (lines.length + 1));
    pen.font = `${Math.round(row * 0.55)}px ui-monospace, monospace`;
    lines.forEach(([name, text], i) => {
      pen.fillStyle = colour("muted");
      pen.fillText(name, row, row * (i + 1.2));
      pen.fillStyle = colour("ink");
      pen.fillText(text, Math.max(width * 0.25, 5 * row), row * (i + 1.2));
    });
  },
};

function shown(numbers: number[]): string {
  const few = numbers.slice(0, SHOWN).map((n) => (Number.isInteger(n) ? String(n) : n.toFixed(3)));
  return few.join("  ") + (numbers.length > SHOWN ? `  and ${numbers.length - SHOWN} more` : "");
}
