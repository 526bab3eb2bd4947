/** An environment and its agents as three ONNX graphs, which have all the rules. */

import { env, InferenceSession, Tensor } from "onnxruntime-web/wasm";
import wasm from "onnxruntime-web/ort-wasm-simd-threaded.wasm?url";
import { type Card, sizesOf } from "./card";
import { chance } from "./chance";
import { bytes, checkDigest, json, type Progress, Trouble } from "./files";
import { misfit } from "./fits";

declare const WASM_BYTES: number;
export const runtimeBytes = WASM_BYTES;

let runtime: Promise<void> | undefined;

/** onnxruntime's wasm, from our own files; loaded once. */
export function loadRuntime(progress: Progress): Promise<void> {
  runtime ??= (async () => {
    env.wasm.numThreads = 1;
    env.wasm.wasmBinary = (await bytes(wasm, "Write the site anew: drivetrain play --out DIR.", progress)).buffer;
  })();
  runtime.catch(() => (runtime = undefined));
  return runtime;
}

type Told = Record<string, Tensor>;
type Sessions = Record<"reset" | "policy" | "step", InferenceSession>;

/** How a step is chosen: the likeliest actions or drawn ones, and what a person does instead of an agent. */
export interface Choice {
  greedy: boolean;
  person?: { agent: number; action: number } | undefined;
}

export class World {
  readonly agents: number;
  /** Random numbers that a reset or a step uses. */
  readonly chances: number;
  episode = 0;
  steps = 0;
  /** What each agent did in the last step. */
  actions: number[] = [];
  /** The probability that the policy gave to each action of each agent, in the last step. */
  probability: number[] = [];
  returns: number[] = [];
  ended: boolean[] = [];
  done = false;
  private told: Told = {};
  /** The recurrent state of agents that have one. */
  private memory: Told = {};
  private turn: Promise<unknown> = Promise.resolve();

  private constructor(
    readonly card: Card,
    private readonly sessions: Sessions,
    /** Whether the graphs' SHA-256 are those in export.json; false where the browser computes none. */
    readonly checked: boolean,
  ) {
    this.agents = sizesOf(card.graphs.policy.inputs, "random")?.[0] ?? 1;
    // An environment without randomness has an input that only gives the batch size.
    this.chances = sizesOf(card.graphs.reset.inputs, "random")?.[0] ?? 0;
  }

  static async load(folder: string, progress: Progress): Promise<World> {
    const advice = "Export the run again (drivetrain export RUN), then start drivetrain play again.";
    const card = await json<Card>(`${folder}/export.json`, advice);
    const names = ["reset", "policy", "step"] as const;
    if (names.some((name) => !card.graphs?.[name]?.file)) {
      throw new Trouble(`${folder}/export.json`, "has nothing that can be played: reset, policy and step are wanted", advice);
    }
    const files = Promise.all(names.map((name) => bytes(`${folder}/${card.graphs[name].file}`, advice)));
    const [graphs] = await Promise.all([files, loadRuntime(progress)]);
    const digests = names.map((name, i) => {
      const { file } = card.graphs[name];
      return checkDigest(`${folder}/${file}`, graphs[i]!, card.sha256?.[file], advice);
    });
    const checked = (await Promise.all(digests)).every(Boolean);
    const sessions: Partial<Sessions> = {};
    for (const [i, name] of names.entries()) {
      sessions[name] = await InferenceSession.create(graphs[i]!, { logSeverityLevel: 3 }).catch((error: unknown) => {
        if (String(error).includes("backend")) throw new Trouble(wasm, `cannot be started: ${reason(error)}`, "Use a current browser with WebAssembly.");
        throw new Trouble(`${folder}/${card.graphs[name].file}`, `is broken: ${reason(error)}`, advice);
      });
    }
    const other = misfit(sessions as Sessions);
    if (other) throw new Trouble(`${folder}/${card.graphs[other.taker].file}`, `${other.what}: they are of different worlds`, advice);
    return new World(card, sessions as Sessions, checked);
  }

  /** The numbers of a part of the state. */
  state(name: string): number[] {
    const tensor = this.told[`next_${name}`];
    return tensor ? Array.from(tensor.data as ArrayLike<number | bigint>, Number) : [];
  }

  /** The names of the state's parts. */
  get names(): string[] {
    return this.card.graphs.reset.outputs.filter((put) => put.name.startsWith("next_")).map((put) => put.name.slice(5));
  }

  /** Starts an episode; the same number gives the same random numbers, as in `drivetrain eval`. */
  reset(episode: number): Promise<void> {
    return this.alone(async () => {
      const random = this.chances ? chance(episode, 0, this.chances) : new Float32Array(1);
      this.memory = this.blank();
      this.told = await this.run("reset", { random: column(random), worlds: column(random) });
      this.episode = episode;
      this.steps = 0;
      this.actions = this.probability = [];
      this.returns = Array<number>(this.agents).fill(0);
      this.ended = Array<boolean>(this.agents).fill(false);
      this.done = false;
    });
  }

  /** Takes one step of all agents; does nothing after the end of the episode. */
  step(choice: Choice): Promise<void> {
    return this.alone(async () => {
      if (this.done) return;
      const draws = chance(this.episode, this.steps + 1, this.chances + this.agents);
      const random = this.chances ? draws.slice(0, this.chances) : new Float32Array(1);
      const judged = await this.run("policy", { ...this.told, ...this.memory, random: column(draws.slice(this.chances)) });
      if (judged["next_memory"]) this.memory = { memory: judged["next_memory"] };
      const action = BigInt64Array.from(judged[choice.greedy ? "likeliest" : "action"]!.data as BigInt64Array);
      if (choice.person) action[choice.person.agent] = BigInt(choice.person.action);
      const state = Object.fromEntries(this.card.graphs.step.inputs.map((put) => [put.name, this.told[`next_${put.name}`]!]));
      const actions = new Tensor("int64", action, [1, this.agents]);
      this.told = await this.run("step", { ...state, action: actions, random: column(random), worlds: column(random) });
      const reward = Array.from(this.told["reward"]!.data as Float32Array);
      this.returns = this.returns.map((sum, agent) => sum + (this.ended[agent] ? 0 : reward[agent]!));
      this.ended = Array.from(this.told["ended"]!.data as Uint8Array, (end, agent) => Boolean(end) || this.ended[agent]!);
      this.done = Boolean(this.told["done"]!.data[0]);
      this.actions = Array.from(action, Number);
      this.probability = Array.from(judged["probability"]!.data as Float32Array);
      this.steps += 1;
    });
  }

  private blank(): Told {
    const shape = sizesOf(this.card.graphs.policy.inputs, "memory");
    return shape ? { memory: new Tensor("float32", new Float32Array(shape.reduce((a, b) => a * b, 1)), [1, ...shape]) } : {};
  }

  private async run(name: keyof Sessions, given: Told): Promise<Told> {
    const session = this.sessions[name];
    return (await session.run(Object.fromEntries(session.inputNames.map((input) => [input, given[input]!])))) as Told;
  }

  /** Runs calls one after another. */
  private alone(what: () => Promise<void>): Promise<void> {
    const next = this.turn.then(what);
    this.turn = next.catch(() => undefined);
    return next;
  }

  release(): Promise<void> {
    return this.alone(async () => {
      for (const session of Object.values(this.sessions)) await session.release();
    });
  }
}

/** onnxruntime's message without its codes. */
function reason(error: unknown): string {
  return String(error).split("\n")[0]!.replace(/^.*ERROR_MESSAGE:\s*/, "").replace(/^\w*Error:\s*/, "").replace(/\.+$/, "");
}

function column(numbers: Float32Array<ArrayBuffer>): Tensor {
  return new Tensor("float32", numbers, [1, numbers.length]);
}
