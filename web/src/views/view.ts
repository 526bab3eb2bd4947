/** A view of an environment: its drawing, and the figures next to it. */

import type { Card } from "../card";
import type { Environment } from "../environment";

export type Colour = (name: string) => string;

/** Formats a number with a fixed number of decimals; never as "-0". */
export function formatFixed(value: number | undefined, decimals: number): string {
  return (Number((value ?? 0).toFixed(decimals)) + 0).toFixed(decimals);
}

export interface View {
  /** Whether the view can show an environment; this depends on its state, not on its name. */
  canShow(card: Card): boolean;
  /** Height of the drawing relative to its width. */
  height: number;
  /** Steps a second that look natural. */
  speed: number;
  /** If a person can play: `heading` gives the present direction (0 up, 1 down, 2 left, 3 right), which is also the action. */
  steering?: { heading(environment: Environment, agent: number): number };
  /** The name of a player. */
  player: string;
  /** `person` is the agent that a person plays. */
  draw(context: CanvasRenderingContext2D, width: number, height: number, environment: Environment, colour: Colour, person?: number): void;
  /** Names of the figures; each agent has a row. */
  columns: string[];
  figures(environment: Environment, agent: number): string[];
}
