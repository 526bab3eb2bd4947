/** Loads files of the site; errors say what a person can do. */

export class Trouble extends Error {
  constructor(
    readonly file: string,
    what: string,
    readonly advice: string,
  ) {
    super(what);
  }
}

export type Progress = (loaded: number) => void;

/** Returns a file's bytes; calls `progress` with the number received so far. */
export async function bytes(path: string, advice: string, progress?: Progress): Promise<Uint8Array<ArrayBuffer>> {
  const answer = await fetch(path).catch(() => null);
  if (!answer) throw new Trouble(path, "cannot be fetched: the server does not answer", "Start drivetrain play again, then reload.");
  if (!answer.ok || !answer.body) throw new Trouble(path, `is missing (the server answers ${answer.status})`, advice);
  const parts: Uint8Array[] = [];
  let loaded = 0;
  const reader = answer.body.getReader();
  for (;;) {
    const { done, value } = await reader.read().catch(() => {
      throw new Trouble(path, "broke off while it was loading", "Reload the page.");
    });
    if (done) break;
    parts.push(value);
    loaded += value.length;
    progress?.(loaded);
  }
  const whole = new Uint8Array(loaded);
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** Refuses a file whose SHA-256 is another than export.json's; false where the browser computes none (no https, no localhost). */
export async function checkDigest(path: string, content: Uint8Array<ArrayBuffer>, wanted: string | undefined, advice: string): Promise<boolean> {
  if (!wanted) throw new Trouble(path, "has no SHA-256 in export.json", advice);
  if (!globalThis.crypto?.subtle) return false;
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  const found = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (found !== wanted) throw new Trouble(path, "is broken: its SHA-256 is not the one in export.json", advice);
  return true;
}

export async function json<T>(path: string, advice: string): Promise<T> {
  const text = new TextDecoder().decode(await bytes(path, advice));
  try {
    return JSON.parse(text) as T;
  } catch {
    throw new Trouble(path, "is broken: it is not JSON", advice);
  }
}
