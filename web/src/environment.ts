/** An environment and its agents as three ONNX graphs, which have all the rules. */

import { env, InferenceSession, Tensor } from "onnxruntime-web/wasm";
import wasm from "onnxruntime-web/ort-wasm-simd-threaded.wasm?url";
import { type Card, sizesOf } from "./card";
import { checkDigest, LoadError, loadBytes, loadJson, type Progress } from "./files";
import { findMismatch } from "./fits";
import { randomNumbers } from "./random";

declare const WASM_BYTES: number;
export const runtimeBytes = WASM_BYTES;

let runtime: Promise<void> | undefined;

/** Loads onnxruntime's wasm from the site's own files, once. */
export function loadRuntime(progress: Progress): Promise<void> {
  runtime ??= (async () => {
    env.wasm.numThreads = 1;
    env.wasm.wasmBinary = (await loadBytes(wasm, "Write the site again: drivetrain play --out DIR.", progress)).buffer;
  })();
  runtime.catch(() => (runtime = undefined));
  return runtime;
}

type NamedTensors = Record<string, Tensor>;
type Sessions = Record<"reset" | "policy" | "step", InferenceSession>;

/** How the actions of a step are chosen. */
export interface StepOptions {
  /** Whether agents take their likeliest actions; else actions are sampled. */
  greedy: boolean;
  /** The action of a person, who plays one of the agents. */
  person?: { agent: number; action: number } | undefined;
}

export class Environment {
  readonly agents: number;
  /** How many random numbers a reset or a step uses. */
  readonly numRandom: number;
  episode = 0;
  steps = 0;
  /** Each agent's action in the last step. */
  actions: number[] = [];
  /** The probability that the policy gave to each action of each agent, in the last step. */
  probability: number[] = [];
  returns: number[] = [];
  ended: boolean[] = [];
  done = false;
  /** The outputs of the last reset or step. */
  private outputs: NamedTensors = {};
  /** The recurrent state of agents that have one. */
  private memory: NamedTensors = {};
  /** Ends when all calls so far have ended. */
  private queue: Promise<unknown> = Promise.resolve();

  private constructor(
    readonly card: Card,
    private readonly sessions: Sessions,
    /** Whether the graphs' SHA-256 were compared with export.json; false if the browser cannot compute them. */
    readonly checked: boolean,
  ) {
    this.agents = sizesOf(card.graphs.policy.inputs, "random")?.[0] ?? 1;
    // An environment without randomness has an input that only gives the batch size.
    this.numRandom = sizesOf(card.graphs.reset.inputs, "random")?.[0] ?? 0;
  }

  static async load(folder: string, progress: Progress): Promise<Environment> {
    const advice = "Export the run again (drivetrain export RUN), then start drivetrain play again.";
    const card = await loadJson<Card>(`${folder}/export.json`, advice);
    const names = ["reset", "policy", "step"] as const;
    if (names.some((name) => !card.graphs?.[name]?.file)) {
      throw new LoadError(`${folder}/export.json`, "has nothing that can be played: it needs reset, policy and step", advice);
    }
    const files = Promise.all(names.map((name) => loadBytes(`${folder}/${card.graphs[name].file}`, advice)));
    const [graphs] = await Promise.all([files, loadRuntime(progress)]);
    const digests = names.map((name, i) => {
      const { file } = card.graphs[name];
      return checkDigest(`${folder}/${file}`, graphs[i]!, card.sha256?.[file], advice);
    });
    const checked = (await Promise.all(digests)).every(Boolean);
    const sessions: Partial<Sessions> = {};
    for (const [i, name] of names.entries()) {
      sessions[name] = await InferenceSession.create(graphs[i]!, { logSeverityLevel: 3 }).catch((error: unknown) => {
        if (String(error).includes("backend")) throw new LoadError(wasm, `cannot be started: ${reason(error)}`, "Use a current browser with WebAssembly.");
        throw new LoadError(`${folder}/${card.graphs[name].file}`, `is broken: ${reason(error)}`, advice);
      });
    }
    const mismatch = findMismatch(sessions as Sessions);
    if (mismatch) throw new LoadError(`${folder}/${card.graphs[mismatch.consumer].file}`, `${mismatch.message}: they are of different worlds`, advice);
    return new Environment(card, sessions as Sessions, checked);
  }

  /** Returns the numbers of a part of the state. */
  state(name: string): number[] {
    const tensor = this.outputs[`next_${name}`];
    return tensor ? Array.from(tensor.data as ArrayLike<number | bigint>, Number) : [];
  }

  /** The names of the state's parts. */
  get names(): string[] {
    return this.card.graphs.reset.outputs.filter((tensor) => tensor.name.startsWith("next_")).map((tensor) => tensor.name.slice(5));
  }

  /** Starts an episode; the same number gives the same random numbers, as in `drivetrain eval`. */
  reset(episode: number): Promise<void> {
    return this.enqueue(async () => {
      const random = this.numRandom ? randomNumbers(episode, 0, this.numRandom) : new Float32Array(1);
      this.memory = this.zeroMemory();
      this.outputs = await this.run("reset", { random: batchOfOne(random), worlds: batchOfOne(random) });
      this.episode = episode;
      this.steps = 0;
      this.actions = this.probability = [];
      this.returns = Array<number>(this.agents).fill(0);
      this.ended = Array<boolean>(this.agents).fill(false);
      this.done = false;
    });
  }

  /** Takes one step of all agents; does nothing after the end of the episode. */
  step(options: StepOptions): Promise<void> {
    return this.enqueue(async () => {
      if (this.done) return;
      const draws = randomNumbers(this.episode, this.steps + 1, this.numRandom + this.agents);
      const random = this.numRandom ? draws.slice(0, this.numRandom) : new Float32Array(1);
      const policy = await this.run("policy", { ...this.outputs, ...this.memory, random: batchOfOne(draws.slice(this.numRandom)) });
      if (policy["next_memory"]) this.memory = { memory: policy["next_memory"] };
      const action = BigInt64Array.from(policy[options.greedy ? "likeliest" : "action"]!.data as BigInt64Array);
      if (options.person) action[options.person.agent] = BigInt(options.person.action);
      const state = Object.fromEntries(this.card.graphs.step.inputs.map((input) => [input.name, this.outputs[`next_${input.name}`]!]));
      const actions = new Tensor("int64", action, [1, this.agents]);
      this.outputs = await this.run("step", { ...state, action: actions, random: batchOfOne(random), worlds: batchOfOne(random) });
      const reward = Array.from(this.outputs["reward"]!.data as Float32Array);
      this.returns = this.returns.map((sum, agent) => sum + (this.ended[agent] ? 0 : reward[agent]!));
      this.ended = Array.from(this.outputs["ended"]!.data as Uint8Array, (end, agent) => Boolean(end) || this.ended[agent]!);
      this.done = Boolean(this.outputs["done"]!.data[0]);
      this.actions = Array.from(action, Number);
      this.probability = Array.from(policy["probability"]!.data as Float32Array);
      this.steps += 1;
    });
  }

  private zeroMemory(): NamedTensors {
    const shape = sizesOf(this.card.graphs.policy.inputs, "memory");
    if (!shape) return {};
    const zeros = new Float32Array(shape.reduce((product, size) => product * size, 1));
    return { memory: new Tensor("float32", zeros, [1, ...shape]) };
  }

  private async run(name: keyof Sessions, inputs: NamedTensors): Promise<NamedTensors> {
    const session = this.sessions[name];
    return (await session.run(Object.fromEntries(session.inputNames.map((input) => [input, inputs[input]!])))) as NamedTensors;
  }

  /** Runs a call after all earlier calls have ended. */
  private enqueue(call: () => Promise<void>): Promise<void> {
    const next = this.queue.then(call);
    this.queue = next.catch(() => undefined);
    return next;
  }

  /** Frees the memory of the graphs. */
  release(): Promise<void> {
    return this.enqueue(async () => {
      for (const session of Object.values(this.sessions)) await session.release();
    });
  }
}

/** Returns onnxruntime's message without its codes. */
function reason(error: unknown): string {
  return String(error).split("\n")[0]!.replace(/^.*ERROR_MESSAGE:\s*/, "").replace(/^\w*Error:\s*/, "").replace(/\.+$/, "");
}

/** Returns a tensor with a batch dimension of one. */
function batchOfOne(numbers: Float32Array<ArrayBuffer>): Tensor {
  return new Tensor("float32", numbers, [1, numbers.length]);
}
