/** What a view of a world is: how it is drawn, and what is told beside the drawing. */

import type { Card } from "../card";
import type { World } from "../world";

export type Colour = (name: string) => string;

/** A number with so many decimals, and never minus nothing. */
export function fixed(value: number | undefined, decimals: number): string {
  return (Number((value ?? 0).toFixed(decimals)) + 0).toFixed(decimals);
}

export interface View {
  /** Whether a world can be shown like this: by its state, not by its name. */
  fits(card: Card): boolean;
  /** Height of the drawing for a width of one. */
  height: number;
  /** Steps a second that look natural. */
  speed: number;
  /** The four actions that a person's keys up, down, left and right mean, where a person can play. */
  steered?: { heading(world: World, agent: number): number };
  /** What players are called. */
  player: string;
  /** `person` is the agent that a person plays. */
  draw(pen: CanvasRenderingContext2D, width: number, height: number, world: World, colour: Colour, person?: number): void;
  /** Columns of figures, a row for each agent. */
  columns: string[];
  figures(world: World, agent: number): string[];
}
