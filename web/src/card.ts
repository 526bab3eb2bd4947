/** The contents of export.json, which `drivetrain export` writes for an agent and its environment. */

export interface TensorInfo {
  name: string;
  dtype: string;
  /** A free size is a name instead of a number. The first dimension is the batch of environments. */
  shape: (number | string)[];
}

export interface Graph {
  file: string;
  inputs: TensorInfo[];
  outputs: TensorInfo[];
}

export interface Card {
  format: number;
  run: string;
  task: string;
  settings: Record<string, unknown>;
  graphs: Record<"reset" | "policy" | "step", Graph>;
  /** The SHA-256 of each exported file, in hexadecimal. */
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

/** The shape of the tensor of one environment: without the batch dimension. */
export function sizesOf(tensors: TensorInfo[], name: string): number[] | undefined {
  return tensors.find((tensor) => tensor.name === name)?.shape.slice(1).map(Number);
}

/** The shape of an output of the reset graph: `next_NAME` for a part of the state, or `observation`. */
export function shapeOf(card: Card, name: string): number[] | undefined {
  return sizesOf(card.graphs.reset.outputs, name);
}
