/** export.json: what `drivetrain export` tells of an agent and its world. */

export interface Put {
  name: string;
  dtype: string;
  /** Without the first dimension, which counts worlds. */
  shape: number[];
}

export interface Graph {
  file: string;
  inputs: Put[];
  outputs: Put[];
}

export interface Card {
  format: number;
  run: string;
  task: string;
  settings: Record<string, unknown>;
  graphs: Record<"reset" | "policy" | "step", Graph>;
  training: {
    date: string;
    step: number;
    seconds: number;
    hardware: string;
    versions: Record<string, string>;
    metrics: Record<string, number>;
  };
}

/** The shape of a tensor that the reset gives: `next_NAME` for state, or `observation`. */
export function shapeOf(card: Card, name: string): number[] | undefined {
  return card.graphs.reset.outputs.find((put) => put.name === name)?.shape;
}
