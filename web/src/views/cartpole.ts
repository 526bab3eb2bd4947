/** A pole on a cart, from the side: the track as far as an episode goes, and the last push as an arrow. */

import { shapeOf } from "../card";
import { fixed, type View } from "./view";

const FAR = 2.4; // where the track ends
const POLE = 1.0; // its length, in the track's units

export const cartpole: View = {
  fits: (card) => String(shapeOf(card, "next_motion")) === "4",
  height: 0.5,
  speed: 50,
  player: "Cart",
  columns: ["steps", "return", "position", "angle"],
  figures: (world, agent) => {
    const [place = 0, , angle = 0] = world.state("motion");
    return [String(world.steps), fixed(world.returns[agent], 0), fixed(place, 2), `${fixed((angle * 180) / Math.PI, 1)}°`];
  },
  draw(pen, width, height, world, colour) {
    const [place = 0, , angle = 0] = world.state("motion");
    const unit = width / (2 * FAR + 0.8);
    pen.save();
    pen.fillStyle = colour("board");
    pen.fillRect(0, 0, width, height);
    pen.translate(width / 2, height * 0.72);
    pen.scale(unit, unit);
    pen.lineCap = "round";
    stroke(pen, colour("line"), 0.03, [[-FAR, 0], [FAR, 0]]);
    for (const side of [-FAR, FAR]) stroke(pen, colour("line"), 0.03, [[side, -0.12], [side, 0.12]]);
    pen.translate(place, 0);
    pen.fillStyle = colour("player-0");
    pen.beginPath();
    pen.roundRect(-0.3, -0.15, 0.6, 0.3, 0.06);
    pen.fill();
    const top = [2 * POLE * Math.sin(angle) * 0.6, -0.15 - 2 * POLE * Math.cos(angle) * 0.6] as const;
    stroke(pen, colour("player-1"), 0.1, [[0, -0.15], top]);
    pen.fillStyle = colour("ink");
    pen.beginPath();
    pen.arc(0, -0.15, 0.05, 0, 2 * Math.PI);
    pen.fill();
    const way = world.actions.length ? (world.actions[0] ? 1 : -1) : 0;
    if (way) stroke(pen, colour("ink"), 0.03, [[0, 0.35], [0.35 * way, 0.35], [0.27 * way, 0.29], [0.35 * way, 0.35], [0.27 * way, 0.41]]);
    pen.restore();
  },
};

function stroke(pen: CanvasRenderingContext2D, colour: string, width: number, points: (readonly [number, number])[]): void {
  pen.beginPath();
  for (const [x, y] of points) pen.lineTo(x, y);
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.stroke();
}
