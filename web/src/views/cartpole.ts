/** Draws a pole on a cart from the side, the track, and the last push as an arrow. */

import { shapeOf } from "../card";
import { formatFixed, type View } from "./view";

const TRACK_END = 2.4; // an episode ends beyond it
const POLE_LENGTH = 1.0; // in the track's units

export const cartpole: View = {
  canShow: (card) => String(shapeOf(card, "next_motion")) === "4",
  height: 0.5,
  speed: 50,
  player: "Cart",
  columns: ["steps", "return", "position", "angle"],
  figures: (environment, agent) => {
    const [position = 0, , angle = 0] = environment.state("motion");
    return [String(environment.steps), formatFixed(environment.returns[agent], 0), formatFixed(position, 2), `${formatFixed((angle * 180) / Math.PI, 1)}°`];
  },
  draw(context, width, height, environment, colour) {
    const [position = 0, , angle = 0] = environment.state("motion");
    const pixelsPerUnit = width / (2 * TRACK_END + 0.8);
    context.save();
    context.fillStyle = colour("board");
    context.fillRect(0, 0, width, height);
    context.translate(width / 2, height * 0.72);
    context.scale(pixelsPerUnit, pixelsPerUnit);
    context.lineCap = "round";
    stroke(context, colour("line"), 0.03, [[-TRACK_END, 0], [TRACK_END, 0]]);
    for (const side of [-TRACK_END, TRACK_END]) stroke(context, colour("line"), 0.03, [[side, -0.12], [side, 0.12]]);
    context.translate(position, 0);
    context.fillStyle = colour("player-0");
    context.beginPath();
    context.roundRect(-0.3, -0.15, 0.6, 0.3, 0.06);
    context.fill();
    const top = [2 * POLE_LENGTH * Math.sin(angle) * 0.6, -0.15 - 2 * POLE_LENGTH * Math.cos(angle) * 0.6] as const;
    stroke(context, colour("player-1"), 0.1, [[0, -0.15], top]);
    context.fillStyle = colour("ink");
    context.beginPath();
    context.arc(0, -0.15, 0.05, 0, 2 * Math.PI);
    context.fill();
    const direction = environment.actions.length ? (environment.actions[0] ? 1 : -1) : 0;
    if (direction) stroke(context, colour("ink"), 0.03, [[0, 0.35], [0.35 * direction, 0.35], [0.27 * direction, 0.29], [0.35 * direction, 0.35], [0.27 * direction, 0.41]]);
    context.restore();
  },
};

function stroke(context: CanvasRenderingContext2D, colour: string, width: number, points: (readonly [number, number])[]): void {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.stroke();
}
