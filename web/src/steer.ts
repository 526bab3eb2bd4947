/** The player's turns from keys, buttons and swipes; each is used in one step. */

const KEYS: Record<string, number> = {
  ArrowUp: 0, ArrowDown: 1, ArrowLeft: 2, ArrowRight: 3, KeyW: 0, KeyS: 1, KeyA: 2, KeyD: 3,
};
const SWIPE = 16; // pixels
const KEPT = 2; // queued turns, so that a quick double turn is not lost

export class Steer {
  /** The agent that the person plays, or none. */
  agent: number | undefined;
  private turns: number[] = [];

  constructor(canvas: HTMLCanvasElement, pad: HTMLElement) {
    addEventListener("keydown", (event) => {
      const way = KEYS[event.code];
      if (way === undefined || this.agent === undefined || event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
      event.preventDefault();
      if (!event.repeat) this.turn(way);
    });
    pad.addEventListener("click", (event) => {
      const way = (event.target as HTMLElement).dataset["way"];
      if (way) this.turn(Number(way));
    });
    let from: [number, number] | undefined;
    canvas.addEventListener("pointerdown", (event) => (from = [event.clientX, event.clientY]));
    canvas.addEventListener("pointermove", (event) => {
      if (!from || this.agent === undefined) return;
      const [dx, dy] = [event.clientX - from[0], event.clientY - from[1]];
      if (Math.max(Math.abs(dx), Math.abs(dy)) < SWIPE) return;
      this.turn(Math.abs(dx) > Math.abs(dy) ? (dx < 0 ? 2 : 3) : dy < 0 ? 0 : 1);
      from = [event.clientX, event.clientY];
    });
    for (const over of ["pointerup", "pointercancel", "pointerleave"] as const) canvas.addEventListener(over, () => (from = undefined));
  }

  take(agent: number | undefined): void {
    this.agent = agent;
    this.turns = [];
  }

  /** Returns the next turn, or straight on. */
  next(heading: number): number {
    return this.turns.shift() ?? heading;
  }

  private turn(way: number): void {
    if (this.agent !== undefined && this.turns.at(-1) !== way && this.turns.length < KEPT) this.turns.push(way);
  }
}

export function typing(target: EventTarget | null): boolean {
  return target instanceof HTMLInputElement || target instanceof HTMLSelectElement;
}
