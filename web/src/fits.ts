/** Checks that three graphs are of one environment: the outputs of one have the shapes of the next one's inputs. */

import type { InferenceSession } from "onnxruntime-web/wasm";

type Name = "reset" | "policy" | "step";
type Shape = readonly (number | string)[] | undefined;

/** Returns the graph and input whose shape differs from the output it comes from: a policy beside an environment of another grid. */
export function misfit(graphs: Record<Name, InferenceSession>): { taker: Name; what: string } | undefined {
  const flows: [Name, string, Name, string][] = [["policy", "action", "step", "action"]];
  for (const giver of ["step", "reset"] as const) {
    flows.unshift([giver, "observation", "policy", "observation"]);
    for (const part of graphs.step.inputNames) {
      if (!["action", "random", "worlds"].includes(part)) flows.push([giver, `next_${part}`, "step", part]);
    }
  }
  for (const [giver, output, taker, input] of flows) {
    const [gives, takes] = [shape(graphs[giver].outputMetadata, output), shape(graphs[taker].inputMetadata, input)];
    if (String(gives) !== String(takes)) return { taker, what: `takes ${input} of ${size(takes)}, ${giver}.onnx gives ${size(gives)}` };
  }
  return undefined;
}

/** Without the batch dimension. */
function shape(puts: readonly InferenceSession.ValueMetadata[], name: string): Shape {
  const put = puts.find((one) => one.name === name);
  return put?.isTensor ? put.shape.slice(1) : undefined;
}

function size(shape: Shape): string {
  return shape ? shape.join("x") || "one number" : "no shape";
}
