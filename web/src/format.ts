// Numbers as text.

export const count = (value: number) => value.toLocaleString("en");
export const percent = (value: number) => `${Math.round(value * 100)} %`;

/** A duration with a fitting unit: "12 µs", "3.4 ms", "1.25 s", "2 min 5 s". */
export function duration(seconds: number): string {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.1) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(2)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

/** A moment, by this machine's clock, to the millisecond. */
export function timeOfDay(unixSeconds: number): string {
  const date = new Date(unixSeconds * 1000);
  return `${date.toLocaleTimeString("en-GB")}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

/** A number in at most four characters or so: 950, 12.3k, 4.5M. */
export function short(value: number): string {
  if (value < 1000) return value < 10 && value % 1 ? value.toFixed(1) : String(Math.round(value));
  return value < 1e6 ? `${(value / 1e3).toPrecision(3)}k` : `${(value / 1e6).toPrecision(3)}M`;
}
