/** Reads a player's turns from keys, buttons and swipes; each step uses one. */

/** Key to direction: 0 up, 1 down, 2 left, 3 right. */
const KEYS: Record<string, number> = {
  ArrowUp: 0, ArrowDown: 1, ArrowLeft: 2, ArrowRight: 3, KeyW: 0, KeyS: 1, KeyA: 2, KeyD: 3,
};
const MIN_SWIPE_PIXELS = 16;
const MAX_QUEUED_TURNS = 2; // so that a quick double turn is not lost

export class Steer {
  /** The agent that the person plays, or none. */
  agent: number | undefined;
  private turns: number[] = [];

  constructor(canvas: HTMLCanvasElement, pad: HTMLElement) {
    addEventListener("keydown", (event) => {
      const direction = KEYS[event.code];
      if (direction === undefined || this.agent === undefined || event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
      event.preventDefault();
      if (!event.repeat) this.queueTurn(direction);
    });
    pad.addEventListener("click", (event) => {
      const direction = (event.target as HTMLElement).dataset["way"];
      if (direction) this.queueTurn(Number(direction));
    });
    let swipeStart: [number, number] | undefined;
    canvas.addEventListener("pointerdown", (event) => (swipeStart = [event.clientX, event.clientY]));
    canvas.addEventListener("pointermove", (event) => {
      if (!swipeStart || this.agent === undefined) return;
      const [dx, dy] = [event.clientX - swipeStart[0], event.clientY - swipeStart[1]];
      if (Math.max(Math.abs(dx), Math.abs(dy)) < MIN_SWIPE_PIXELS) return;
      if (Math.abs(dx) > Math.abs(dy)) this.queueTurn(dx < 0 ? 2 : 3);
      else this.queueTurn(dy < 0 ? 0 : 1);
      swipeStart = [event.clientX, event.clientY];
    });
    for (const end of ["pointerup", "pointercancel", "pointerleave"] as const) canvas.addEventListener(end, () => (swipeStart = undefined));
  }

  setAgent(agent: number | undefined): void {
    this.agent = agent;
    this.turns = [];
  }

  /** Returns the next turn, or the present direction if there is none. */
  nextTurn(heading: number): number {
    return this.turns.shift() ?? heading;
  }

  private queueTurn(direction: number): void {
    if (this.agent !== undefined && this.turns.at(-1) !== direction && this.turns.length < MAX_QUEUED_TURNS) this.turns.push(direction);
  }
}

export function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLInputElement || target instanceof HTMLSelectElement;
}
