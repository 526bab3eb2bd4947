/** Snakes on a grid: bodies as rounded lines, the dead pale, food as a disc. */

import { shapeOf } from "../card";
import { type Colour, fixed, type View } from "./view";

const PARTS = ["body", "head", "way", "length", "alive", "food"];
const AHEAD = [[0, -1], [0, 1], [-1, 0], [1, 0]] as const; // up, down, left, right

export const snake: View = {
  fits: (card) => PARTS.every((part) => shapeOf(card, `next_${part}`)) && shapeOf(card, "observation")?.length === 4,
  height: 1,
  speed: 8,
  steered: { heading: (world, agent) => world.state("way")[agent] ?? 0 },
  player: "Snake",
  columns: ["length", "return", ""],
  figures: (world, agent) => [
    String(world.state("length")[agent] ?? 0),
    fixed(world.returns[agent], 1),
    world.ended[agent] ? "dead" : "alive",
  ],
  draw(pen, width, _, world, colour, person) {
    const [, , rows = 1, columns = 1] = shapeOf(world.card, "observation") ?? [];
    const cell = width / Math.max(rows, columns);
    pen.save();
    pen.translate((width - columns * cell) / 2, (width - rows * cell) / 2);
    pen.scale(cell, cell);
    board(pen, columns, rows, colour);
    const [heads, lengths, alive, ways, body] = ["head", "length", "alive", "way", "body"].map((part) => world.state(part));
    disc(pen, world.state("food")[0] ?? 0, columns, 0.3, colour("food"));
    const order = [...heads!.keys()].sort((a, b) => alive![a]! - alive![b]!); // the dead lie under the living
    for (const agent of order) {
      pen.globalAlpha = alive![agent] ? 1 : 0.25;
      const cells = chain(body!.slice(agent * rows * columns, (agent + 1) * rows * columns), lengths![agent]!);
      line(pen, cells, columns, rows, colour(`player-${agent}`));
      if (agent === person) ring(pen, heads![agent]!, columns, colour("ink"));
      eyes(pen, heads![agent]!, ways![agent]!, columns, colour("board"));
    }
    pen.restore();
  },
};

function board(pen: CanvasRenderingContext2D, columns: number, rows: number, colour: Colour): void {
  pen.beginPath();
  pen.rect(0, 0, columns, rows);
  pen.clip();
  pen.fillStyle = colour("board");
  pen.fillRect(0, 0, columns, rows);
  pen.fillStyle = colour("grid");
  for (let y = 0; y < rows; y++) for (let x = y % 2; x < columns; x += 2) pen.fillRect(x, y, 1, 1);
}

function disc(pen: CanvasRenderingContext2D, cell: number, columns: number, radius: number, fill: string): void {
  pen.beginPath();
  pen.arc((cell % columns) + 0.5, Math.floor(cell / columns) + 0.5, radius, 0, 2 * Math.PI);
  pen.fillStyle = fill;
  pen.fill();
}

/** Around the head of the person's own. */
function ring(pen: CanvasRenderingContext2D, cell: number, columns: number, stroke: string): void {
  pen.beginPath();
  pen.arc((cell % columns) + 0.5, Math.floor(cell / columns) + 0.5, 0.42, 0, 2 * Math.PI);
  pen.lineWidth = 0.08;
  pen.strokeStyle = stroke;
  pen.stroke();
}

/** A body's cells from head to tail: each holds the moves after which it is free. */
function chain(body: number[], length: number): number[] {
  const at = new Map(body.map((value, cell) => [value, cell]));
  const cells: number[] = [];
  for (let value = length; value > 0 && at.has(value); value--) cells.push(at.get(value)!);
  return cells;
}

/** The line leaves the board at one side where it comes back at the other. */
function line(pen: CanvasRenderingContext2D, cells: number[], columns: number, rows: number, stroke: string): void {
  pen.beginPath();
  cells.forEach((cell, i) => {
    const [x, y] = [cell % columns, Math.floor(cell / columns)];
    if (i === 0) pen.moveTo(x + 0.5, y + 0.5);
    else {
      const [px, py] = [cells[i - 1]! % columns, Math.floor(cells[i - 1]! / columns)];
      const [dx, dy] = [nearest(x - px, columns), nearest(y - py, rows)];
      pen.lineTo(px + dx + 0.5, py + dy + 0.5);
      if (px + dx !== x || py + dy !== y) {
        pen.moveTo(x - dx + 0.5, y - dy + 0.5);
        pen.lineTo(x + 0.5, y + 0.5);
      }
    }
  });
  if (cells.length === 1) pen.lineTo((cells[0]! % columns) + 0.501, Math.floor(cells[0]! / columns) + 0.5);
  pen.lineWidth = 0.72;
  pen.lineCap = pen.lineJoin = "round";
  pen.strokeStyle = stroke;
  pen.stroke();
}

/** The short way round: a step over the border is one step. */
function nearest(way: number, size: number): number {
  return Math.abs(way) > size / 2 ? way - Math.sign(way) * size : way;
}

function eyes(pen: CanvasRenderingContext2D, head: number, way: number, columns: number, fill: string): void {
  const [dx, dy] = AHEAD[way] ?? AHEAD[0];
  const [x, y] = [(head % columns) + 0.5 + 0.12 * dx, Math.floor(head / columns) + 0.5 + 0.12 * dy];
  pen.fillStyle = fill;
  for (const side of [-0.15, 0.15]) {
    pen.beginPath();
    pen.arc(x + side * dy, y + side * dx, 0.08, 0, 2 * Math.PI);
    pen.fill();
  }
}
