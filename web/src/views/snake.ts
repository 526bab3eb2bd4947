/** Draws snakes on a grid as rounded lines, dead ones pale, and food as a disc. */

import { shapeOf } from "../card";
import { type Colour, formatFixed, type View } from "./view";

const STATE_PARTS = ["body", "head", "way", "length", "alive", "food"];
const DIRECTIONS = [[0, -1], [0, 1], [-1, 0], [1, 0]] as const; // up, down, left, right

export const snake: View = {
  canShow: (card) => STATE_PARTS.every((part) => shapeOf(card, `next_${part}`)) && shapeOf(card, "observation")?.length === 4,
  height: 1,
  speed: 8,
  steering: { heading: (environment, agent) => environment.state("way")[agent] ?? 0 },
  player: "Snake",
  columns: ["length", "return", ""],
  figures: (environment, agent) => [
    String(environment.state("length")[agent] ?? 0),
    formatFixed(environment.returns[agent], 1),
    environment.ended[agent] ? "dead" : "alive",
  ],
  draw(context, width, _, environment, colour, person) {
    const [, , rows = 1, columns = 1] = shapeOf(environment.card, "observation") ?? [];
    const cell = width / Math.max(rows, columns);
    context.save();
    context.translate((width - columns * cell) / 2, (width - rows * cell) / 2);
    context.scale(cell, cell);
    drawBoard(context, columns, rows, colour);
    const [heads, lengths, alive, directions, body] = ["head", "length", "alive", "way", "body"].map((part) => environment.state(part));
    drawDisc(context, environment.state("food")[0] ?? 0, columns, 0.3, colour("food"));
    const order = [...heads!.keys()].sort((a, b) => alive![a]! - alive![b]!); // living snakes are drawn over dead ones
    for (const agent of order) {
      context.globalAlpha = alive![agent] ? 1 : 0.25;
      const cells = bodyCells(body!.slice(agent * rows * columns, (agent + 1) * rows * columns), lengths![agent]!);
      drawBody(context, cells, columns, rows, colour(`player-${agent}`));
      if (agent === person) drawRing(context, heads![agent]!, columns, colour("ink"));
      drawEyes(context, heads![agent]!, directions![agent]!, columns, colour("board"));
    }
    context.restore();
  },
};

function drawBoard(context: CanvasRenderingContext2D, columns: number, rows: number, colour: Colour): void {
  context.beginPath();
  context.rect(0, 0, columns, rows);
  context.clip();
  context.fillStyle = colour("board");
  context.fillRect(0, 0, columns, rows);
  context.fillStyle = colour("grid");
  for (let y = 0; y < rows; y++) for (let x = y % 2; x < columns; x += 2) context.fillRect(x, y, 1, 1);
}

function drawDisc(context: CanvasRenderingContext2D, cell: number, columns: number, radius: number, fill: string): void {
  context.beginPath();
  context.arc((cell % columns) + 0.5, Math.floor(cell / columns) + 0.5, radius, 0, 2 * Math.PI);
  context.fillStyle = fill;
  context.fill();
}

/** Marks the head of the snake that the person plays. */
function drawRing(context: CanvasRenderingContext2D, cell: number, columns: number, stroke: string): void {
  context.beginPath();
  context.arc((cell % columns) + 0.5, Math.floor(cell / columns) + 0.5, 0.42, 0, 2 * Math.PI);
  context.lineWidth = 0.08;
  context.strokeStyle = stroke;
  context.stroke();
}

/** Returns a body's cells from head to tail. Each cell of `body` has the number of moves after which it is free. */
function bodyCells(body: number[], length: number): number[] {
  const cellOfValue = new Map(body.map((value, cell) => [value, cell]));
  const cells: number[] = [];
  for (let value = length; value > 0 && cellOfValue.has(value); value--) cells.push(cellOfValue.get(value)!);
  return cells;
}

/** Draws a body. A line that leaves the board at one side comes back at the other. */
function drawBody(context: CanvasRenderingContext2D, cells: number[], columns: number, rows: number, stroke: string): void {
  context.beginPath();
  cells.forEach((cell, i) => {
    const [x, y] = [cell % columns, Math.floor(cell / columns)];
    if (i === 0) context.moveTo(x + 0.5, y + 0.5);
    else {
      const [px, py] = [cells[i - 1]! % columns, Math.floor(cells[i - 1]! / columns)];
      const [dx, dy] = [shortest(x - px, columns), shortest(y - py, rows)];
      context.lineTo(px + dx + 0.5, py + dy + 0.5);
      if (px + dx !== x || py + dy !== y) {
        context.moveTo(x - dx + 0.5, y - dy + 0.5);
        context.lineTo(x + 0.5, y + 0.5);
      }
    }
  });
  if (cells.length === 1) context.lineTo((cells[0]! % columns) + 0.501, Math.floor(cells[0]! / columns) + 0.5);
  context.lineWidth = 0.72;
  context.lineCap = context.lineJoin = "round";
  context.strokeStyle = stroke;
  context.stroke();
}

/** Returns the shorter of the two distances on a torus: a step over the border is one step. */
function shortest(distance: number, size: number): number {
  return Math.abs(distance) > size / 2 ? distance - Math.sign(distance) * size : distance;
}

function drawEyes(context: CanvasRenderingContext2D, head: number, direction: number, columns: number, fill: string): void {
  const [dx, dy] = DIRECTIONS[direction] ?? DIRECTIONS[0];
  const [x, y] = [(head % columns) + 0.5 + 0.12 * dx, Math.floor(head / columns) + 0.5 + 0.12 * dy];
  context.fillStyle = fill;
  for (const side of [-0.15, 0.15]) {
    context.beginPath();
    context.arc(x + side * dy, y + side * dx, 0.08, 0, 2 * Math.PI);
    context.fill();
  }
}
