// What tokens can be coloured by, and how numbers are written.

export const LEVELS = 6;

/** The figure of a token in a column; null without one. */
const at = (columns, name, index) => columns[name]?.[index] ?? null;

function logRatio(columns, index) {
  const ratio = at(columns, "ratio", index);
  return ratio === null ? null : Math.log(Math.max(ratio, 1e-9));
}

function difference(columns, index) {
  const [trainer, rollout] = [at(columns, "trainer", index), at(columns, "rollout", index)];
  return trainer === null || rollout === null ? null : trainer - rollout;
}

/**
 * `diverging` measures have a sign; the others start at 0. `value` is what is coloured, of a token by its index in the
 * columns, `show` what a legend writes, and `least` the smallest end of a scale, so that rounding errors have no colour.
 */
export const MEASURES = {
  ratio: { label: "ratio", diverging: true, least: Math.log(1.01), value: logRatio, show: (x) => number(Math.exp(x)) },
  difference: { label: "trainer − engine log-prob", diverging: true, least: 0.001, value: difference, show: (x) => number(x) },
  entropy: { label: "entropy", diverging: false, value: (c, i) => at(c, "entropy", i), show: (x) => `${number(x)} nats` },
  advantage: { label: "advantage", diverging: true, value: (c, i) => at(c, "advantage", i), show: (x) => number(x) },
  staleness: { label: "staleness", diverging: false, value: (c, i) => at(c, "staleness", i), show: (x) => number(x) },
  none: { label: "nothing", diverging: false, value: () => null, show: () => "" },
};

export const MARKS = [
  { bit: 1, name: "upper", text: "clipped by the upper bound" },
  { bit: 2, name: "lower", text: "clipped by the lower bound" },
  { bit: 4, name: "dual", text: "clipped by the dual clip" },
  { bit: 8, name: "rejected", text: "rejected by the correction" },
  { bit: 16, name: "dropped", text: "dropped: a value is not finite" },
  { bit: 32, name: "masked", text: "masked: the policy has left the response" },
];

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) > 1e300) return value > 0 ? "∞" : "−∞";
  const digits = Number.isInteger(value) ? value.toLocaleString("en-US") : Number(value.toPrecision(4)).toString();
  return digits.replace("-", "−");
}

/** The colour's class of a value on a scale that ends at `limit`; "" without a value or with a value next to 0. */
export function level(value, limit, diverging) {
  if (value === null || value === undefined || !(limit > 0)) return "";
  const step = Math.min(LEVELS, Math.round((LEVELS * Math.abs(value)) / limit));
  if (step === 0) return "";
  return diverging && value < 0 ? `n${step}` : `p${step}`;
}

/** The end of the scale: the value that 99% of the values do not exceed in size, or `least`; 0 if all values are 0. */
export function limitOf(values, least = 0) {
  const sizes = values.filter((value) => value !== null && Math.abs(value) < 1e300).map(Math.abs);
  if (!sizes.length) return 0;
  const sorted = Float64Array.from(sizes).sort();
  const limit = sorted[Math.floor(0.99 * (sorted.length - 1))] || sorted.at(-1);
  return limit > 0 ? Math.max(limit, least) : 0;
}
