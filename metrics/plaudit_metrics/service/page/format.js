/** Numbers as people read them. What is not there is a dash, never a zero. */

const NOTHING = "–";

function fixed(value, digits) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** Digits that tell apart what differs: three or so that count. */
export function figure(value) {
  if (!known(value)) return NOTHING;
  const size = Math.abs(value);
  if (Number.isInteger(value)) return fixed(value, 0);
  if (size < 1e-12) return "0"; // what rounding leaves of it, as of the mean of normalised rewards
  if (size < 0.01) return size < 1e-6 ? value.toExponential(1) : value.toLocaleString("en-US", { maximumSignificantDigits: 2 });
  return fixed(value, size < 1 ? 3 : size < 10 ? 2 : size < 100 ? 1 : 0);
}

export function seconds(value) {
  if (!known(value)) return NOTHING;
  return `${fixed(value, value === 0 ? 0 : value < 0.0995 ? 3 : value < 10 ? 2 : value < 100 ? 1 : 0)} s`;
}

/** Marks of an axis, which are round numbers: no more digits than they have. */
export const mark = {
  figure: (value) => (value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential() : value.toLocaleString("en-US", { maximumFractionDigits: 6 })),
  seconds: (value) => `${mark.figure(value)} s`,
  share: (value) => `${mark.figure(+(100 * value).toFixed(6))} %`,
};

export function share(value) {
  return known(value) ? `${fixed(100 * value, value > 0 && value < 0.1 ? 1 : 0)} %` : NOTHING;
}

export function clock(epoch) {
  return new Date(epoch * 1000).toLocaleTimeString("en-GB");
}

export function moment(epoch) {
  return new Date(epoch * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

/** A number with its noun: `1 scorer`, `20 scorers`. */
export function counted(number, noun) {
  return `${figure(number)} ${noun}${number === 1 ? "" : "s"}`;
}
