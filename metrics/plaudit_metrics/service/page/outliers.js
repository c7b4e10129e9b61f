/** Outliers of a chart: a few values so far above the others that these could not be told apart. */

const FEWEST = 8;
const FAR = 4;
const MARGIN = 1.5;

/**
 * Returns the value at which the axis ends, or null if no value is far above the others.
 *
 * @param {number[]} values
 */
export function usualTop(values) {
  const known = values.filter((value) => Number.isFinite(value)).sort((one, other) => one - other);
  if (known.length < FEWEST) return null;
  const usual = known[Math.floor(0.9 * (known.length - 1))];
  return usual > 0 && known.at(-1) > FAR * usual ? MARGIN * usual : null;
}
