/** export.json: what `drivetrain export` tells of an agent and its world. */

export interface Put {
  name: string;
  dtype: string;
  /** Sizes; those that are free have names. The first one counts worlds. */
  shape: (number | string)[];
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
  /** Of every exported file, in hexadecimal. */
  sha256: Record<string, string>;
  training: {
    date: string;
    step: number;
    seconds: number;
    hardware: string;
    versions: Record<string, string>;
    metrics: Record<string, number>;
  };
}

/** The sizes of one world's part of a tensor: without the first, which counts worlds. */
export function sizesOf(puts: Put[], name: string): number[] | undefined {
  return puts.find((put) => put.name === name)?.shape.slice(1).map(Number);
}

/** The shape of a tensor that the reset gives: `next_NAME` for state, or `observation`. */
export function shapeOf(card: Card, name: string): number[] | undefined {
  return sizesOf(card.graphs.reset.outputs, name);
}
