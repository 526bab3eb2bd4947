/** Random numbers as a function of (episode, step): the same as those of drivetrain/tasks/rl/episode_random.py, bit for bit. */
export function randomNumbers(episode: number, step: number, count: number): Float32Array<ArrayBuffer> {
  const start = mix(episode + 0x9e3779b9);
  return Float32Array.from({ length: count }, (_, i) => (mix(start + step * count + i + 1) >>> 8) * 2 ** -24);
}

/** A pseudo-random bijection of 32-bit numbers. */
function mix(number: number): number {
  let x = number >>> 0;
  x = Math.imul(x ^ (x >>> 16), 0x7feb352d);
  x = Math.imul(x ^ (x >>> 15), 0x46ca68b5);
  return (x ^ (x >>> 16)) >>> 0;
}
