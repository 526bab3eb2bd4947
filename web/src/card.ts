/** The contents of export.json, which `drivetrain export` writes for an agent and its environment. */

export interface Put {
  name: string;
  dtype: string;
  /** Sizes; a free size is a name. The first dimension is the batch of environments. */
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

/** The shape of one environment's part of a tensor: without the batch dimension. */
export function sizesOf(puts: Put[], name: string): number[] | undefined {
  return puts.find((put) => put.name === name)?.shape.slice(1).map(Number);
}

/** The shape of a tensor that the reset gives: `next_NAME` for state, or `observation`. */
export function shapeOf(card: Card, name: string): number[] | undefined {
  return sizesOf(card.graphs.reset.outputs, name);
}
