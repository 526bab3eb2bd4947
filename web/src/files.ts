/** Loads files of the site; each error says what the user can do. */

export class LoadError extends Error {
  constructor(
    readonly file: string,
    message: string,
    readonly advice: string,
  ) {
    super(message);
  }
}

export type Progress = (loaded: number) => void;

/** Returns a file's bytes; calls `progress` with the number received so far. */
export async function loadBytes(path: string, advice: string, progress?: Progress): Promise<Uint8Array<ArrayBuffer>> {
  const response = await fetch(path).catch(() => null);
  if (!response) throw new LoadError(path, "cannot be fetched: the server does not answer", "Start drivetrain play again, then reload.");
  if (!response.ok || !response.body) throw new LoadError(path, `is missing (the server answers ${response.status})`, advice);
  const parts: Uint8Array[] = [];
  let loaded = 0;
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read().catch(() => {
      throw new LoadError(path, "broke off while it was loading", "Reload the page.");
    });
    if (done) break;
    parts.push(value);
    loaded += value.length;
    progress?.(loaded);
  }
  const content = new Uint8Array(loaded);
  let offset = 0;
  for (const part of parts) {
    content.set(part, offset);
    offset += part.length;
  }
  return content;
}

/** Throws if a file's SHA-256 differs from export.json's. Returns false if the browser cannot compute it (no https, no localhost). */
export async function checkDigest(path: string, content: Uint8Array<ArrayBuffer>, expected: string | undefined, advice: string): Promise<boolean> {
  if (!expected) throw new LoadError(path, "has no SHA-256 in export.json", advice);
  if (!globalThis.crypto?.subtle) return false;
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  const actual = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (actual !== expected) throw new LoadError(path, "is broken: its SHA-256 is not the one in export.json", advice);
  return true;
}

export async function loadJson<T>(path: string, advice: string): Promise<T> {
  const text = new TextDecoder().decode(await loadBytes(path, advice));
  try {
    return JSON.parse(text) as T;
  } catch {
    throw new LoadError(path, "is broken: it is not JSON", advice);
  }
}
