/** Checks that three graphs belong to the same environment: each output must have the shape of the input that it becomes. */

import type { InferenceSession } from "onnxruntime-web/wasm";

type Name = "reset" | "policy" | "step";
type Shape = readonly (number | string)[] | undefined;

/** Returns the first graph with an input of another shape than the output it receives, such as a policy for another grid. */
export function findMismatch(graphs: Record<Name, InferenceSession>): { consumer: Name; message: string } | undefined {
  const connections: [Name, string, Name, string][] = [["policy", "action", "step", "action"]];
  for (const producer of ["step", "reset"] as const) {
    connections.unshift([producer, "observation", "policy", "observation"]);
    for (const part of graphs.step.inputNames) {
      if (!["action", "random", "worlds"].includes(part)) connections.push([producer, `next_${part}`, "step", part]);
    }
  }
  for (const [producer, output, consumer, input] of connections) {
    const produced = shapeOfOne(graphs[producer].outputMetadata, output);
    const expected = shapeOfOne(graphs[consumer].inputMetadata, input);
    if (String(produced) !== String(expected)) {
      return { consumer, message: `takes ${input} of ${describe(expected)}, ${producer}.onnx gives ${describe(produced)}` };
    }
  }
  return undefined;
}

/** Returns a tensor's shape without the batch dimension. */
function shapeOfOne(tensors: readonly InferenceSession.ValueMetadata[], name: string): Shape {
  const tensor = tensors.find((candidate) => candidate.name === name);
  return tensor?.isTensor ? tensor.shape.slice(1) : undefined;
}

function describe(shape: Shape): string {
  return shape ? shape.join("x") || "one number" : "no shape";
}
